"""`lab/clairvoyant.py`: the bound and the offline rule, against all that is possible on tiny traces."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import replay as command
from megatron_hybrid_prefix.lab import clairvoyant as module
from megatron_hybrid_prefix.lab.clairvoyant import all_uses, clairvoyant, follow, usable_blocks
from megatron_hybrid_prefix.lab.replay import Policy, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest
from megatron_hybrid_prefix.policy.registry import eviction_policy_names
from tests.harness.trace_helpers import KINDS, made_up, write_trace


def trace_of(*prompts: str) -> Trace:
    """A trace of these prompts. A letter is a block; "." is a last token beyond the last full block."""
    requests = []
    for number, prompt in enumerate(prompts):
        blocks = prompt.removesuffix(".")
        keys = [blocks[:depth].encode() for depth in range(1, len(blocks) + 1)]
        tokens = 4 * len(blocks) + (blocks != prompt)
        requests.append(TraceRequest(keys=keys, prompt_tokens=tokens, timestamp=number))
    return Trace(format="session", block_tokens=4, requests=tuple(requests))


def tiny_traces(count: int) -> list[Trace]:
    rng = random.Random(1)

    def prompt() -> str:
        return "".join(rng.choices("AB", [3, 1], k=rng.randint(1, 4))) + rng.choice([".", ""])

    return [trace_of(*(prompt() for _ in range(rng.randint(2, 7)))) for _ in range(count)]


def best_possible(trace: Trace, slots: int) -> int:
    """Most tokens that any rule reuses: tries everything that may be kept after each request."""
    requests = trace.requests

    @cache
    def best(number: int, kept: frozenset[bytes]) -> int:
        if number == len(requests):
            return 0
        keys, found = requests[number].keys, 0
        for resume in range(usable_blocks(requests[number], trace.block_tokens) + 1):
            if resume and keys[resume - 1] not in kept:
                continue
            there = kept | set(keys[resume:])
            for after in combinations(sorted(there), min(slots, len(there))):
                found = max(found, resume * trace.block_tokens + best(number + 1, frozenset(after)))
        return found

    return best(0, frozenset())


def best_uses(trace: Trace, slots: int) -> int:
    """Most profit of uses, at most one for each request and ``slots`` in each gap: tries all."""
    uses = all_uses(trace)

    def best(number: int, load: list[int]) -> int:
        if number < 0:
            return 0
        found = best(number - 1, load)
        for since, blocks in uses[number]:
            if all(held < slots for held in load[since:number]):
                more = [held + (since <= gap < number) for gap, held in enumerate(load)]
                found = max(found, blocks * trace.block_tokens + best(number - 1, more))
        return found

    return best(len(uses) - 1, [0] * len(uses))


def test_the_best_rule_is_between_the_offline_rule_and_the_bound():
    met = 0
    for trace in tiny_traces(60):
        for found in clairvoyant(trace, [0, 1, 2, 3]):
            best = best_possible(trace, found.slots)
            assert found.rule_tokens <= best <= found.bound_tokens, (trace, found, best)
            assert found.bound_tokens == best_uses(trace, found.slots), (trace, found)
            met += found.rule_tokens == best
    assert met > 200, f"the offline rule is the best one in {met} of 240 cases"


def test_examples():
    # One slot: "AAAA" twice is worth more than "BB" between.
    (found,) = clairvoyant(trace_of("AAAA.", "BB.", "BB.", "AAAA."), [1])
    assert found.bound_tokens == found.rule_tokens == 16
    # Two prompts in turn, one slot: it is kept for one of them, where LRU reuses nothing.
    (found,) = clairvoyant(trace_of(*["AAA.", "BBB."] * 4), [1])
    assert found.bound_tokens == found.rule_tokens == 3 * 12
    # The last token is computed, so "AB" resumes after "A".
    (found,) = clairvoyant(trace_of("AB", "AB"), [5])
    assert found.bound_tokens == found.rule_tokens == 4
    # What the bound leaves out: the second request resumes behind "A", so it does not compute the state that the last
    # one needs, and the only slot cannot keep both. It is better to compute "AAAB" again.
    trace = trace_of("AAAB.", "AAAB.", "A.")
    (found,) = clairvoyant(trace, [1])
    assert (found.rule_tokens, best_possible(trace, 1), found.bound_tokens) == (16, 16, 20)
    assert clairvoyant(trace_of("AB."), [3])[0].bound_tokens == 0


def test_the_rule_has_a_slot_for_each_state_while_a_request_runs():
    """The state that a request resumes from is in its slot until the request is done: it cannot take its successor."""
    trace = trace_of("A.", "AB.", "AB.")
    uses = [uses[-1] if uses else None for uses in all_uses(trace)]
    assert follow(trace, uses, 1) == 1, "the state after AB needs a second slot"
    assert follow(trace, uses, 2) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_beats_the_bound_and_enough_slots_reach_the_ceiling(kind):
    trace = made_up(kind, 150, seed=4)
    few, many = clairvoyant(trace, [1000, 8])
    for eviction in eviction_policy_names():
        policy = Policy(name=eviction, eviction=eviction)
        assert sum(replay(trace, policy, state_slots=8).reused_tokens) <= few.rule_tokens <= few.bound_tokens
    assert many.bound_tokens == many.rule_tokens == sum(ceiling_tokens(trace))


def without_the_limit_of_a_request(self: Any, *args: Any) -> int:
    tail, head, room, cost = (*args, 0)[:4]
    return connect(self, tail, head, 9 if room == 1 and cost == 0 else room, cost)


connect = module._Flow._connect


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_Flow._connect", without_the_limit_of_a_request),
        ("_Flow._update_distances", lambda self: setattr(self, "_distances", [0] * len(self._distances))),
        ("usable_blocks", lambda request, block_tokens: len(request.keys)),
    ],
)
def test_mutants_are_found(monkeypatch, name, mutant):
    target = getattr(module, name.split(".")[0]) if "." in name else module
    monkeypatch.setattr(target, name.split(".")[-1], mutant)
    with pytest.raises(AssertionError):
        test_the_best_rule_is_between_the_offline_rule_and_the_bound()


def test_table_and_json(tmp_path, capsys):
    requests, report = made_up("chat", 60), tmp_path / "r.json"
    trace = write_trace(tmp_path / "t.jsonl", requests)
    arguments = [str(trace), "--state-slots", "8,2", "--clairvoyant", "--baselines", "none", "--json", str(report)]
    assert command.main(arguments) == 0
    said, data = capsys.readouterr().out, json.loads(report.read_text())
    few, many = data["clairvoyant"]
    assert few["slots"] == 2 and many["slots"] == 8
    found = clairvoyant(requests, [2])[0]
    assert (few["bound_tokens"], few["rule_tokens"]) == (found.bound_tokens, found.rule_tokens)
    for text in (
        "knows all requests",
        "no rule reuses more",
        f"{found.bound_tokens / data['trace']['prompt_tokens']:.4f}",
    ):
        assert text in said
    assert command.main([str(trace), "--state-slots", "2", "--baselines", "none"]) == 0
    assert "knows all requests" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [["--kv-blocks", "9"], ["--host-pages", "4"], ["--cache-gb", "1", "--preset", "tiny"]],
)
def test_options_that_do_not_go_with_it(tmp_path, capsys, options):
    trace = write_trace(tmp_path / "t.jsonl", made_up("chat", 2))
    assert command.main([str(trace), "--clairvoyant", *options]) == 2
    assert "--clairvoyant: " in capsys.readouterr().err
