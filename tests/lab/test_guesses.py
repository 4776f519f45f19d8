"""Guesses never cost reuse: what is kept for those who asked is what would be kept without guesses, or it is paid for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.lab.replay import CacheServer, Policy
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest
from megatron_hybrid_prefix.policy.recompute_cost import _Known
from tests.harness.selection import mostly_slow
from tests.harness.trace_helpers import BLOCK, KINDS, made_up

SLOTS = {"kv_blocks": 100_000, "state_slots": 24}
TWO_BUDGETS = {"kv_blocks": 900, "state_slots": 48}
MEMORY = {"kv_blocks": 480, "page_blocks": 6, "page_states": 1, "state_slots": None}
HOST = SLOTS | {"host_pages": 900, "host_kv_pages": 1, "host_state_pages": 12}


class Both:
    """The same requests with guesses and without."""

    def __init__(self, sizes: dict[str, Any], eviction: str = "recompute_cost") -> None:
        self.with_guesses, self.without = (
            CacheServer(Policy(name=admission, eviction=eviction, admission=admission), BLOCK, sizes)
            for admission in ("adaptive", "asked")
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


@pytest.mark.parametrize("sizes", [SLOTS, TWO_BUDGETS, MEMORY], ids=["slots", "two budgets", "one memory"])
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
