"""Recorded sessions of agents side by side: speed-ups change nothing, the clock, the ceiling, and what is gained."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_hybrid_prefix.lab import replay as lab
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import CacheServer, ceiling_tokens, kv_alone, replay, running_bytes
from megatron_hybrid_prefix.lab.traces import Trace, _SessionReader, sessions_of
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction
from tests.harness.agents import HELD_OUT, PACKED, agents
from tests.harness.trace_helpers import BLOCK, made_up

MEMORY = {"kv_blocks": 240, "page_blocks": 6}
HOST = {"host_pages": 600, "host_kv_pages": 2, "host_state_pages": 12}


class Obvious(CacheServer):
    """Matches each time that a waiting prompt is tried again."""

    def begin(self, *args: Any, **named: Any) -> tuple[int, int] | None:
        self._refused = None
        return super().begin(*args, **named)


@pytest.mark.parametrize("host", [{}, HOST], ids=["device", "host"])
@pytest.mark.parametrize("kind", ["agents", "chat"])
def test_a_waiting_prompt_is_matched_once_with_the_same_result(monkeypatch, kind, host):
    calls, requests = [], made_up(kind, 300).requests  # all sent at once
    trace = Trace(
        format="session",
        block_tokens=BLOCK,
        requests=tuple(replace(each, timestamp=0, answer_tokens=50) for each in requests),
    )
    match = lab.HybridPrefixCache.match
    monkeypatch.setattr(lab.HybridPrefixCache, "match", lambda *args: calls.append(1) or match(*args))
    fast = replay(trace, at_once=40, **MEMORY, **host).reused_tokens
    assert len(calls) == 300
    monkeypatch.setattr(lab, "CacheServer", Obvious)
    assert replay(trace, at_once=40, **MEMORY, **host).reused_tokens == fast and len(calls) > 700


@pytest.mark.parametrize("joined", [1, 3])
def test_keys_are_equal_where_all_ids_before_are(joined):
    dice, reader, named = random.Random(0), _SessionReader(None), {}
    prompts: list[tuple[int, list[int]]] = [(0, [])]
    for _ in range(200):
        scope, before = dice.choice(prompts)
        prompts.append(
            (dice.choice([scope, scope, 1 - scope]), before[: dice.randrange(20)] + dice.choices([1, 2], k=3))
        )
    for scope, ids in prompts:
        keys = reader.keys(scope, ids, joined)
        assert len(keys) == len(ids) // joined
        for blocks, key in enumerate(keys, 1):
            assert named.setdefault((scope, *ids[: blocks * joined]), key) is key
    assert len(set(named.values())) == len(named) > 100


def test_the_next_request_comes_when_it_was_recorded_but_not_before_the_answer(monkeypatch):
    """Two sessions; the first of them answers for longer than the second one waits."""
    begun = []

    class Logging(CacheServer):
        def begin(self, request, *args, **named):
            begun.append((request.session, request.prompt_tokens))
            return super().begin(request, *args, **named)

    requests = [
        lab.TraceRequest(keys=[b"%d" % at], prompt_tokens=tokens, timestamp=at, session=name, answer_tokens=answer)
        for tokens, (name, at, answer) in enumerate(
            [("slow", 0, 500), ("slow", 1, 1), ("quick", 2, 1), ("quick", 5, 1), ("quick", 20, 1)], 8
        )
    ]
    trace = Trace(format="session", block_tokens=8, requests=tuple(requests))
    monkeypatch.setattr(lab, "CacheServer", Logging)
    replay(trace, at_once=2, kv_blocks=20)
    assert begun[2:] == [("quick", 11), ("slow", 9), ("quick", 12)], "3 s after the first, 10 s, 18 s"


@pytest.mark.parametrize("host", [{}, HOST], ids=["device", "host"])
@pytest.mark.parametrize("kind", ["agents", "chat", "popular"])
def test_states_of_no_bytes_at_every_block_lose_nothing_and_reuse_more(kind, host):
    trace, sizes = made_up(kind, 300), MEMORY | host
    ceiling, ours = (replay(trace, at_once=12, **each) for each in (kv_alone(sizes), sizes))
    assert ceiling.counters["lost_tokens_no_state"] == 0
    assert ceiling.reused_token_fraction > ours.reused_token_fraction


def test_a_running_agent_keeps_the_state_that_its_next_request_resumes_from(monkeypatch):
    """Evicting it frees its own bytes alone: the KV before it is held. Ranked as if it freed the KV, too, it goes far too early."""
    trace = made_up("agents", 600)
    ours = replay(trace, at_once=12, **MEMORY).reused_token_fraction
    monkeypatch.setattr(
        RecomputeCostEviction, "know_holders", lambda self, is_held: setattr(self, "_is_held", lambda state: False)
    )
    assert ours > 1.02 * replay(trace, at_once=12, **MEMORY).reused_token_fraction


SIZES = {
    "qwen3.5-35b-a3b": (5_242_880, 64_880_640, 18_186_240),
    "nemotron-3-nano-30b-a3b": (1_572_864, 49_364_992, 13_754_368),
}  # of a block, a state, and a checkpoint in int8


@pytest.mark.parametrize("preset", ["qwen3.5-35b-a3b", pytest.param("nemotron-3-nano-30b-a3b", marks=pytest.mark.slow)])
def test_recorded_sessions_in_a_quarter_of_what_they_need(preset):
    """The ceiling has more room and loses nothing. Whom to evict matters little here: the others are close, and no end costs much."""
    trace, (block_bytes, state_bytes, kept_bytes) = agents(8), SIZES[preset]
    cache_bytes = int(running_bytes(trace, 4, block_bytes, state_bytes) / 4)
    quarter = Memory(cache_bytes, block_bytes, state_bytes).cache_sizes()
    ways = {"ours": {}, "lru": {"eviction_policy": "lru"}, "told ends": {"sessions": sessions_of(trace)}}
    ways["int8"] = Memory(cache_bytes, block_bytes, kept_bytes, live_bytes=state_bytes).cache_sizes()
    found = {name: replay(trace, at_once=4, **quarter | way).reused_token_fraction for name, way in ways.items()}
    found["ceiling"] = replay(trace, at_once=4, **kv_alone(quarter)).reused_token_fraction
    assert sum(ceiling_tokens(trace)) / trace.prompt_tokens > found["ceiling"] > found["ours"] > 0.97 * found["lru"]
    assert found["ceiling"] > found["int8"] > found["ours"]
    assert found["told ends"] > 0.97 * found["ours"]


def test_no_packed_session_is_held_out():
    lines = [json.loads(line) for line in gzip.decompress(PACKED.read_bytes()).splitlines()]
    chosen, held_out = {line["sha256"] for line in lines[1:]}, set(HELD_OUT.read_text().split())
    assert lines[0]["license"] == "Apache-2.0" and len(chosen) == 50 and not chosen & held_out
    assert sum(len(word) == 64 for word in held_out) == 90
