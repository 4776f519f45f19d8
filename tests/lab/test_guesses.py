"""Guesses never cost reuse: other states are kept, ranked and evicted as without guesses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.lab.replay import CacheServer
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.device import DeviceTier
from tests.harness.selection import mostly_slow
from tests.harness.trace_helpers import BLOCK, KINDS, made_up

MEMORY = {"kv_blocks": 480, "page_blocks": 6}
SIZES = {
    "unlimited KV": {
        "kv_blocks": 200_000,
        "page_blocks": 100_000,
        "page_states": 24,
        "state_slots": 24,
        "live_states": False,
    },
    "one memory": MEMORY,
    "host": MEMORY | {"host_pages": 900, "host_kv_pages": 1, "host_state_pages": 12},
}


def values(server: CacheServer) -> dict[bytes, float]:
    """The value of each state that is no guess."""
    policy = server._cache._device.blocks.eviction
    return {node.key: policy.value(node) if hasattr(policy, "value") else number for number, node in enumerate(policy)}


def replay_both(kind: str, sizes: str, eviction: str) -> tuple[int, int]:
    """Tokens that are reused with guesses, and without. Checks that after each request the same states have the same values."""
    both = [
        CacheServer(block_tokens=BLOCK, eviction_policy=eviction, retention_interval_tokens=interval, **SIZES[sizes])
        for interval in (None, 0)
    ]
    reused = [0, 0]
    for number, request in enumerate(made_up(kind, 600).requests):
        for at, server in enumerate(both):
            number, tokens = server.begin(request)
            server.end(number)
            reused[at] += tokens
        assert values(both[0]) == values(both[1]), number
        if number % 100 == 0:
            both[0]._cache.check_integrity()
    return reused[0], reused[1]


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "chat", "popular"))
def test_the_same_states_have_the_same_values_as_without_guesses_and_no_less_is_reused(kind, sizes, eviction):
    with_guesses, without = replay_both(kind, sizes, eviction)
    assert with_guesses >= without


def _ticking(self: KVBlocks, node: Node) -> None:
    _add_state(self, node)
    if node in self.guesses:
        self.eviction._known._tick()


def _evicting(self: DeviceTier, path: Sequence[Node]) -> int | None:
    return self.take_slot()


_add_state = KVBlocks.add_state
MUTANTS = {
    "a guess moves the clock": (KVBlocks, "add_state", _ticking),
    "a guess is ranked, and needs KV": (KVBlocks, "add_state", TierIndex.add_state),
    "a guess evicts": (DeviceTier, "take_guess_slot", _evicting),
    "a guess does not go first": (KVBlocks, "next_guess", lambda self, *args: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        replay_both("chat", "one memory", "recompute_cost")
