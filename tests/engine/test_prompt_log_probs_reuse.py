"""Log-probs of prompts that skip tokens: at every position, against a float64 recompute."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from megatron_hybrid_prefix.index.keys import KeyMaker
from megatron_hybrid_prefix.mcore.context import context, scored_prompt, scores
from megatron_hybrid_prefix.mcore.context.scored_prompt import Scores
from megatron_hybrid_prefix.requests.scores import Kept, ScoreTable
from tests.engine.test_prompt_log_probs import Reference, Traffic, WrongLogProb, prompt
from tests.harness.bits import Alone, differing, exact_harness
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, raising
from tests.harness.selection import mostly_slow


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


def ending(cut: int, number: int, length: int = 30) -> list[int]:
    """A prompt that has the first ``cut`` tokens of one context, and then tokens of its own, the first one included."""
    context, own = prompt(0, 240), random_tokens(length, seed=900 + number)
    if own[0] == context[cut]:
        own[0] += 1
    return context[:cut] + own


def computed(traffic: Traffic) -> int:
    """Prompt tokens computed so far."""
    return traffic.context.prefix_stats().computed_prompt_tokens


CUTS = (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_gdn", "tiny_mixed"])
def test_other_recurrent_layers(model, request):
    model = request.getfixturevalue(model)
    traffic = Traffic(model, "on", max_tokens=64)
    for number, cut in enumerate(CUTS):
        traffic.send(ending(cut, number), count=1, top_n_logprobs=1)
    traffic.check(Reference(model))
    assert traffic.finished[4].num_cached_tokens >= 2 * BLOCK


# -- four endings of one long context ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mostly_slow([("async", True), ("legacy", False)], ("async", True)), ids=str)
def test_four_endings_of_a_long_context(tiny, case):
    """What a multiple-choice task asks for: the context is computed once."""
    mode, at_once = case
    context, own = random_tokens(2000, seed=7), (5, 20, 33, 70)
    traffic = Traffic(
        tiny, "on", async_sched_mode=mode, max_tokens=512, max_sequence_length=2304, states=64, buffer_size_gb=0.05
    )
    for number, length in enumerate(own):
        traffic.add(context + random_tokens(length, seed=50 + number), 0, top_n_logprobs=1)
        if not at_once:
            traffic.run()
    traffic.run()
    assert computed(traffic) <= len(context) + sum(own) + 4 * BLOCK
    whole = Traffic(tiny, "off", max_tokens=512, max_sequence_length=2304, buffer_size_gb=0.05)
    for number, request in traffic.finished.items():
        same = whole.add([int(t) for t in request.prompt_tokens], 0, top_n_logprobs=1)
        whole.run()
        right = whole.finished[same]
        assert len(request.prompt_log_probs) == len(context) + own[number - 1] - 1
        assert request.prompt_log_probs == pytest.approx(right.prompt_log_probs, abs=1e-4)
        assert [list(entry) for entry in request.prompt_top_n_logprobs[2000:]] == [
            list(entry) for entry in right.prompt_top_n_logprobs[2000:]
        ]


# -- who has what ------------------------------------------------------------------------------------------------------------


def test_requests_that_do_not_ask_pay_nothing(tiny, monkeypatch):
    traffic = Traffic(tiny, "on", materialize_only_last_token_logits=True)
    monkeypatch.setattr(scores, "ScoredPrompt", None)
    monkeypatch.setattr(scores.ScoredPrompts, "_first_tokens", None)
    for number, cut in enumerate(CUTS):
        traffic.send(ending(cut, number), count=1, skip_prompt_log_probs=True)
    stats = traffic.context.prefix_stats()
    assert stats.scores_bytes_used == 0 and stats.reused_tokens > 0


def test_prompts_cached_without_log_probs_are_computed_and_fill_them(tiny, reference):
    traffic = Traffic(tiny, "on")
    traffic.send(ending(128, 0), count=1, skip_prompt_log_probs=True)
    for number, (cached, lost) in enumerate([(0, 128), (128, 128)], 1):
        asked = traffic.add(ending(128, number), 1, top_n_logprobs=1)
        traffic.run()
        assert traffic.finished[asked].num_cached_tokens == cached
        assert traffic.context.prefix_stats().lost_tokens_no_scores == lost
    more = [traffic.add(ending(128, 5 + number), 1, top_n_logprobs=top_n) for number, top_n in enumerate((0, 2, 2, 1))]
    traffic.run()
    assert [traffic.finished[asked].num_cached_tokens for asked in more[:2]] == [128, 0]
    traffic.run()
    again = traffic.add(ending(128, 20), 1, top_n_logprobs=2)
    traffic.run()
    assert traffic.finished[again].num_cached_tokens == 128
    traffic.check(reference)


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant"])
@pytest.mark.parametrize("options", [{"cache_salt": "b"}, {"cache_adapter": "x"}], ids=str)
def test_never_across_salts_and_adapters(tiny, reference, options, mutant, monkeypatch):
    """The mutant makes keys without them. Log-probs are the same under each salt, so only what is computed tells."""
    if mutant:
        chain = KeyMaker.chain
        monkeypatch.setattr(KeyMaker, "chain", lambda self, *args, salt, adapter, **rest: chain(self, *args, **rest))
    traffic = Traffic(tiny, "on")
    for number in range(2):
        traffic.send(ending(128, number), count=1, cache={"cache_salt": "a"})
    assert traffic.context.prefix_stats().reused_tokens == 128
    asked = traffic.add(ending(128, 5), 1, cache=options)
    traffic.run()
    assert traffic.finished[asked].num_cached_tokens == (128 if mutant else 0)
    traffic.check(reference)


@pytest.mark.parametrize(
    ("mode", "when"),
    [("legacy", "idle"), ("legacy", "between two chunks"), ("async", "between two chunks"), ("async", "mutant")],
)
def test_never_across_weights(tiny, mode, when):
    """The output layer changes: log-probs of the old weights are wrong, and no KV or state tells."""
    traffic = Traffic(tiny, "on", async_sched_mode=mode, max_tokens=64, check_weights=when != "mutant")
    weight = tiny.output_layer.weight
    kept = weight.detach().clone()
    traffic.add(ending(128, 0), 1)
    traffic.step(2) if when == "between two chunks" else traffic.run()
    try:
        with torch.no_grad():
            weight *= 1.1
        if when != "mutant":
            traffic.engine.invalidate()
        traffic.run()
        for number in (1, 2):
            traffic.send(ending(128, number), count=1)
            assert traffic.finished[number + 1].num_cached_tokens == (0 if number == 1 and when != "mutant" else 128)
        del traffic.asked[1], traffic.finished[1]
        right = Reference(tiny)
        if when == "mutant":
            with pytest.raises(WrongLogProb):
                traffic.check(right)
        else:
            traffic.check(right)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_a_step_whose_bookkeeping_raises_keeps_nothing(tiny, reference, monkeypatch):
    traffic = Traffic(tiny, "on", async_sched_mode="async")
    traffic.add(ending(128, 0), 1)
    monkeypatch.setattr(scores.ScoredPrompts, "collect", raising(RuntimeError("a tokenizer that fails")))
    with pytest.raises(RuntimeError, match="tokenizer"):
        traffic.run()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="reset"):
        traffic.engine.step_modern()
    traffic.engine.reset()
    del traffic.asked[1]
    for number, cached in ((2, 0), (3, 128)):
        traffic.send(ending(128, number), count=1)
        assert traffic.finished[number].num_cached_tokens == cached
    traffic.check(reference)


def test_a_request_whose_promised_log_probs_never_come_starts_over(tiny, reference, monkeypatch):
    """The step that promised them turns out to lack some."""
    traffic = Traffic(tiny, "on", async_sched_mode="async")
    add, calls = scored_prompt.ScoredPrompt.add, itertools.count()

    def lose_once(prompt: Any, *step: Any) -> bool:
        if next(calls) == 0:
            prompt.lose_step()
        return add(prompt, *step)

    monkeypatch.setattr(scored_prompt.ScoredPrompt, "add", lose_once)
    traffic.add(ending(128, 0), 3)
    traffic.send(ending(128, 1), count=3)
    assert next(calls) > 1
    traffic.check(reference)
    traffic.context.check_integrity()


def test_processed_log_probs_are_not_shared(tiny):
    traffic = Traffic(tiny, "on", logprobs_mode="processed_logprobs")
    for number in range(2):
        traffic.send(ending(128, number), count=1, top_k=0, temperature=1.0 + number)
    stats = traffic.context.prefix_stats()
    assert stats.reused_tokens == stats.scores_bytes_budget == 0


# -- eviction, host tier, preemption, drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mostly_slow([("legacy", True), ("async", False)], ("legacy", True)), ids=str)
def test_back_from_the_host(tiny, reference, case):
    """Log-probs stay on the host beside the tier's entries. After a failed load they are those of the computed prompt."""
    mode, fault = case
    traffic = Traffic(tiny, "on", async_sched_mode=mode, max_tokens=64, blocks=7, states=4, host_gb=0.02)
    first = ending(128, 0, length=70)
    traffic.send(first, count=1, top_n_logprobs=1)
    traffic.send(ending(128, 8), count=1, skip_prompt_log_probs=True)
    for number in range(1, 4):
        traffic.send(prompt(number, 200), count=1, skip_prompt_log_probs=True)
    cache = traffic.context.prefix_cache
    assert not cache.match(cache.chain(first)).path
    if fault:
        mover, node = traffic.context.host_moves, cache.node(cache.chain(first).keys[1])
        mover.pages.memory[cache._device.host.kv[node].pages[0] * mover.pages.page_bytes + 17] ^= 4
    asked = traffic.add(ending(128, 9), 2, top_n_logprobs=1)
    traffic.run()
    stats = traffic.context.prefix_stats()
    assert (stats.reused_tokens_host, traffic.finished[asked].num_cached_tokens) == ((0, 0) if fault else (128, 128))
    assert stats.fallbacks == ({"host_load_failed": 1} if fault else {})
    traffic.check(reference)


@pytest.mark.slow
def test_drafts(tiny_mtp):
    right = Reference(tiny_mtp)
    truth = {n: ending(cut, n) + right.answer(ending(cut, n), 8) for n, cut in enumerate((*CUTS, 128), 1)}
    traffic = Traffic(tiny_mtp, "on", async_sched_mode="async", max_tokens=128, num_speculative_tokens=2)
    with forced_drafts(traffic.engine, truth, lambda request_id, position: (request_id + position) % 3):
        for number, tokens in truth.items():
            traffic.add(tokens[:-8], 8, top_n_logprobs=1)
            traffic.step(2) if number % 2 else traffic.run()
            traffic.context.check_integrity()
        traffic.run()
    traffic.check(right)
    assert traffic.context.prefix_stats().reused_tokens >= 2 * 128


# -- random traffic ------------------------------------------------------------------------------------------------------

RANDOM = mostly_slow(range(10), 3)


def random_traffic(model: Any, seed: int) -> Traffic:
    """Random endings of two contexts, budgets, evictions, salts, epochs, aborts."""
    dice = random.Random(seed)
    plenty = seed % 2 == 0
    traffic = Traffic(
        model,
        "on",
        async_sched_mode=dice.choice(MODES),
        max_tokens=dice.choice((64, 128, 512)),
        blocks=None if plenty else dice.choice((8, 14)),
        states=32 if plenty else dice.choice((1, 3, 6)),
        prompt_log_probs_gb=0.1 if plenty else dice.choice((2000, 5000, 20000)) / 2**30,
        host_gb=0.0 if plenty else dice.choice((0.0, 0.0004, 0.02)),
    )
    for _request in range(18):
        context = prompt(dice.randrange(2), 240)
        cut = dice.choice((1, 2, 3)) * BLOCK + dice.choice((-2, -1, 0, 0, 1, 2, 17))
        tokens = context[:cut] + random_tokens(dice.choice((1, 2, 20, BLOCK - 1, BLOCK)), seed=dice.randrange(6))
        asks: dict[str, Any] = {"top_n_logprobs": dice.choice((0, 0, 1, 3))}
        if dice.random() < 0.25:
            asks |= {"skip_prompt_log_probs": True}
        options: dict[str, Any] = {"cache_salt": dice.choice((None, None, None, "a"))}
        if dice.random() < 0.1:
            options |= dice.choice(({"cache_read": False}, {"cache_write": False}))
        asked = traffic.add(tokens, dice.choice((0, 1, 1, 3, 40)), cache=options, **asks)
        if dice.random() < 0.7:
            traffic.step(dice.randrange(1, 6))
        chance = dice.random()
        if chance < 0.05:
            traffic.engine.invalidate()
        elif chance < 0.1 and traffic.engine.abort_request(asked):
            del traffic.asked[asked]
    traffic.run()
    traffic.finished = {number: traffic.finished[number] for number in traffic.asked}
    return traffic


@pytest.mark.parametrize("seed", RANDOM)
def test_random_traffic(tiny, reference, seed):
    traffic = random_traffic(tiny, seed)
    traffic.check(reference)
    stats = traffic.context.prefix_stats()
    assert stats.scores_bytes_used <= stats.scores_bytes_budget
    if seed % 2 == 0:
        asked_for_prompt = [number for number, params in traffic.asked.items() if not params.skip_prompt_log_probs]
        assert any(traffic.finished[number].num_cached_tokens for number in asked_for_prompt)


# -- mutants -------------------------------------------------------------------------------------------------------------


def _log_probs_one_position_early(original: Any) -> Any:
    def part(self: Scores, start: int, end: int) -> Scores:
        right = original(self, start, end)
        return right._replace(log_probs=np.roll(right.log_probs, -1))

    return part


def _logits_of_another_boundary(original: Any) -> Any:
    def next_logits(self: ScoreTable, key: bytes) -> Kept | None:
        own = original(self, key)
        others = (logits for other, logits in self._next_logits.items() if other != key)
        return own if own is None else next(others, own)

    return next_logits


MUTANTS = {
    "logits of the position before": (
        scores.ScoredPrompts,
        "_first_tokens",
        lambda original: lambda self: {request_id: first - 1 for request_id, first in original(self).items()},
    ),
    "block shifted by one": (Scores, "part", _log_probs_one_position_early),
    "logits of another boundary": (ScoreTable, "next_logits", _logits_of_another_boundary),
    "fewer likeliest tokens than asked for": (
        ScoreTable,
        "block",
        lambda original: lambda self, key, top_n: original(self, key, 0),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(tiny, reference, name, monkeypatch):
    owner, method, mutate = MUTANTS[name]
    traffic = Traffic(tiny, "on")
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises((WrongLogProb, ValueError)):
        for number, cut in enumerate((*CUTS, *CUTS)):
            traffic.send(ending(cut, number), count=1, top_n_logprobs=1 + 2 * (number // len(CUTS)))
        traffic.check(reference)


def test_exact_engines_keep_log_probs_as_the_device_rounded_them(tiny, monkeypatch):
    """A log-softmax one unit in the last place below the host's, as a GPU's may be: cold prompts have its bits, and hits too."""

    def lower(logits):
        return torch.log_softmax(logits.float(), -1).nextafter(torch.tensor(-1e30))

    monkeypatch.setattr(context, "log_softmax", lower)
    harness = exact_harness(tiny)
    for number in range(3):
        harness.send(ending(2 * BLOCK, number), count=1, params={"skip_prompt_log_probs": False})
    assert [request.num_cached_tokens for request in harness.finished.values()] == [0, 2 * BLOCK, 2 * BLOCK]
    assert differing(harness, Alone(tiny)) == []
