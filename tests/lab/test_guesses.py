"""Guesses never cost reuse: what is kept for those who asked is what would be kept without guesses, or it is paid for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.requests import StepPlan
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.lab.replay import CacheServer
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest
from megatron_hybrid_prefix.policy.recompute_cost import _Known
from tests.harness.selection import mostly_slow
from tests.harness.trace_helpers import BLOCK, KINDS, made_up

SLOTS = {"kv_blocks": 200_000, "page_blocks": 100_000, "page_states": 24, "state_slots": 24, "live_states": False}
MEMORY = {"kv_blocks": 480, "page_blocks": 6}
HOST = SLOTS | {"host_pages": 900, "host_kv_pages": 1, "host_state_pages": 12}


class Both:
    """The same requests with guesses and without."""

    def __init__(self, sizes: dict[str, Any], eviction: str = "recompute_cost") -> None:
        self.with_guesses, self.without = (
            CacheServer(block_tokens=BLOCK, eviction_policy=eviction, retention_interval_tokens=interval, **sizes)
            for interval in (None, 0)
        )
        self.reused = self.reused_without = self.most_lent = 0

    def serve(self, request: TraceRequest) -> None:
        self.reused += self.with_guesses.serve(request) or 0
        self.reused_without += self.without.serve(request) or 0
        self.most_lent = max(self.most_lent, len(self.with_guesses._cache._store.blocks.lent))

    def serve_all(self, trace: Trace, *, same_states: bool = False) -> Both:
        for number, request in enumerate(trace.requests):
            self.serve(request)
            if same_states:
                assert kept(self.with_guesses) == kept(self.without), number
            if number % 50 == 0:
                self.with_guesses._cache.check_integrity()
        return self


def kept(server: CacheServer) -> set[bytes]:
    """Keys of the states that somebody asked for, lent ones included."""
    return {node.key for node, is_no_guess in server._cache._store.blocks.states.items() if is_no_guess}


def pairs(count: int, gap: int = 60, seed: int = 0) -> Trace:
    """Most prompts come twice with another question, and no prompt a third time: only a guess helps the second one."""
    rng = random.Random(seed)
    numbers: dict[tuple[int, ...], int] = {}
    waiting: list[tuple[int, int, int]] = []

    def prompts() -> Iterator[list[bytes]]:
        for number in range(count):
            if waiting and waiting[0][0] <= number and rng.random() < 0.7:
                _, document, blocks = waiting.pop(0)
            else:
                document, blocks = number, rng.randint(4, 30)
                waiting.append((number + rng.randint(10, 2 * gap), document, blocks))
                waiting.sort()
            names = [(document, block) for block in range(blocks)]
            names += [(document, number, block) for block in range(rng.randrange(4))]
            yield [numbers.setdefault(name, len(numbers)).to_bytes(16) for name in names]

    requests = [TraceRequest(keys=keys, prompt_tokens=len(keys) * BLOCK + 1, timestamp=0) for keys in prompts()]
    return Trace(format="mooncake", block_tokens=BLOCK, requests=tuple(requests))


@pytest.mark.parametrize("sizes", [SLOTS, MEMORY], ids=["unlimited KV", "one memory"])
@pytest.mark.parametrize("kind", [*mostly_slow(KINDS, "popular"), "pairs"])
def test_the_same_states_are_kept_as_without_guesses(kind, sizes):
    trace = pairs(600) if kind == "pairs" else made_up(kind, 600)
    both = Both(sizes).serve_all(trace, same_states=True)
    assert both.reused >= 0.998 * both.reused_without


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize("sizes", [SLOTS, HOST], ids=["slots", "host"])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "scan"))
def test_no_less_is_reused(kind, sizes, eviction):
    both = Both(sizes, eviction).serve_all(made_up(kind, 600))
    assert both.reused >= 0.998 * both.reused_without


def test_states_are_lent_where_guesses_earn_it():
    both = Both(MEMORY | {"kv_blocks": 2_400}).serve_all(pairs(1_200), same_states=True)
    assert both.most_lent > 5 and both.reused > 1.2 * both.reused_without > 0


def side_by_side(seed: int) -> int:
    """Forwards side by side, some of requests that do not read the cache. Returns how many states were lent at a time."""
    rng, lent = random.Random(seed), 0
    sizes = {"kv_blocks": rng.choice([60, 90, 140]), "page_blocks": rng.choice([1, 2, 3])}
    cache = HybridPrefixCache(CacheSettings(block_tokens=4, page_states=rng.choice([1, 1, 3]), secret=b"test", **sizes))
    plans: list[StepPlan] = []

    def settle() -> None:
        for plan in plans:
            (cache.publish if rng.random() > 0.05 else cache.abandon)(plan)
            cache.release(plan.request_id)
        plans.clear()

    for number in range(1_000):
        document = max(0, number // 6 - rng.choice([0, 0, 1, 2, 5, 9]))
        blocks = random.Random(document).randint(4, 16)
        tokens = [10_000 * document + position for position in range(4 * blocks)]
        tokens += [10**8 + 100 * number + position for position in range(4 * rng.randrange(3) + 1)]
        match = cache.match(cache.chain(tokens), read=rng.random() > 0.15)
        if not cache.can_admit(match):
            settle()
            match = cache.match(match.chain, read=match.read)
        admission = cache.admit(number, match)
        assert admission is not None
        plans.append(cache.plan(number, admission.resume_tokens, len(tokens)))
        lent = max(lent, len(cache._store.blocks.lent))
        if rng.random() < 0.4:
            settle()
        if number % 10 == 0:
            cache.check_integrity()
    return lent


def test_a_request_that_does_not_read_computes_a_lent_state_again():
    """It does not hold the KV of that state, so others may evict both while its forward runs."""
    sizes = {"kv_blocks": 40, "page_blocks": 2}
    cache = HybridPrefixCache(CacheSettings(block_tokens=4, retention_interval_tokens=0, **sizes))
    prompt = list(range(41))

    def plan(request_id: int, tokens: list[int], *, read: bool = True) -> StepPlan | None:
        match = cache.match(cache.chain(tokens), read=read)
        assert cache.can_admit(match)
        admission = cache.admit(request_id, match)
        return None if admission is None else cache.plan(request_id, admission.resume_tokens, len(tokens))

    cache.publish(plan(1, prompt))
    cache.release(1)
    store = cache._store
    (tail,) = store.blocks.states
    store.slots.retire(store.checkpoints._evicted(tail, for_guess=True))
    assert tail in store.blocks.lent
    again = plan(2, prompt, read=False)
    assert len(again.checkpoints) == 1 and plan(3, list(range(1000, 1000 + 4 * (store.blocks.available_blocks - 3))))
    cache.publish(again)
    cache.check_integrity()


def test_memory_pressure_fails_no_request_whatever_is_lent():
    assert max(map(side_by_side, range(12))) > 5


def _ticking(self: _Known, state: Any) -> None:
    self._tick()
    _used(self, state)


_used = _Known.used
MUTANTS = {
    "a guess that is used moves the clock": (_Known, "used", _ticking),
    "lent states have no share in the memory": (PrefixStore, "_lent_blocks", lambda self: 0),
    "guesses count, but not what was lent for them": (KVBlocks, "spare_guesses", property(lambda self: self.guesses)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        Both(MEMORY | {"kv_blocks": 2_400}).serve_all(pairs(1_200), same_states=True)
