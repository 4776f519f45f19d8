"""What each tier evicts, in order, against lists and a search through all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.lab.replay import CacheServer
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.host import HostTier
from tests.core import test_stateful
from tests.core.naive_memory import needed
from tests.harness.trace_helpers import BLOCK, made_up

EVICTED: Counter[str] = Counter()


class Naive:
    """The KV that a tier evicts next: a list, and a search for everything else."""

    def __init__(self, cache: HybridPrefixCache, index: TierIndex[Node], *, host: bool) -> None:
        self.cache, self.index, self.host = cache, index, host
        self.queue: list[Node] = []

    def has_kv(self, node: Node) -> bool:
        if self.host:
            return node in self.cache._device.host.kv
        return node.block_id != NO_BLOCK and not self.cache._device.blocks.ref_count(node.block_id)

    def look(self) -> None:
        """What is unneeded since the last look goes last; of it, the deepest goes first."""
        of_states, queued = needed(self.index.states), set(self.queue)
        here = {node for node in self.cache.nodes() if self.has_kv(node)}
        copies = {node for node in here if self.host and node.block_id != NO_BLOCK}
        self.queue = [node for node in self.queue if node in here and (node not in of_states or node in copies)]
        self.queue += sorted(here - of_states - queued, key=lambda node: -node.depth_blocks)

    def also_on_device(self, path: Sequence[Node]) -> None:
        """What the device has got goes last; of it, the deepest goes first."""
        self.look()  # what came before goes before
        got = [node for node in reversed(path) if self.has_kv(node)]
        self.queue = [node for node in self.queue if node not in got] + got

    def next_kv(self) -> Node | None:
        pinned = [node for node, entry in self.cache._device.host.kv.items() if entry.pins] if self.host else []
        return next((node for node in self.queue if node not in pinned), None)


@pytest.fixture
def compared(monkeypatch):
    """Each answer of `TierIndex.next_kv` is compared. What it names is evicted, so the sequences are the same."""
    EVICTED.clear()
    tiers: dict[TierIndex[Node], Naive] = {}
    init, next_kv, original = HybridPrefixCache.__init__, TierIndex.next_kv, HostTier.also_on_device

    def made(self: HybridPrefixCache, *args: Any, **options: Any) -> None:
        tiers.clear()
        init(self, *args, **options)
        tiers[self._device.blocks] = Naive(self, self._device.blocks, host=False)
        tiers[self._device.host] = Naive(self, self._device.host, host=True)

    def asked(self: TierIndex[Node]) -> Node | None:
        for naive in tiers.values():
            naive.look()
        found = next_kv(self)
        assert found is tiers[self].next_kv()
        EVICTED[type(self).__name__] += found is not None
        return found

    def also_on_device(self: HostTier, path: Sequence[Node]) -> None:
        original(self, path)
        tiers[self].also_on_device(path)

    def and_look(method: Any) -> Any:
        def called(self: Any, *args: Any, **options: Any) -> Any:
            result = method(self, *args, **options)
            for naive in tiers.values():
                naive.look()
            return result

        return called

    monkeypatch.setattr(HybridPrefixCache, "__init__", made)
    monkeypatch.setattr(TierIndex, "next_kv", asked)
    monkeypatch.setattr(HostTier, "also_on_device", also_on_device)
    # What happens between two evictions has an order, too.
    for name in ("share", "release", "take", "_replace"):
        monkeypatch.setattr(KVBlocks, name, and_look(getattr(KVBlocks, name)))
    monkeypatch.setattr(HostTier, "_add", and_look(HostTier._add))
    monkeypatch.setattr(TierIndex, "drop_state", and_look(TierIndex.drop_state))


def serve(kind: str, eviction: str, requests: int = 120) -> None:
    """A made-up trace in a memory that is much too small, and a host that is, too."""
    host = {"host_pages": 180, "host_state_pages": 4}
    sizes = {"kv_blocks": 120, "page_blocks": 4}
    server = CacheServer(block_tokens=BLOCK, eviction_policy=eviction, **sizes, **host)
    for request in made_up(kind, requests).requests:
        server.serve(request)
        server._cache.check_integrity()


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_a_made_up_trace(compared, kind, eviction):
    serve(kind, eviction)
    assert EVICTED["KVBlocks"] > 200 and EVICTED["HostTier"] > 100, EVICTED


def test_random_traffic(compared, monkeypatch):
    # A withdrawal drops many states between two looks; the order of the KV that only they needed is not compared.
    monkeypatch.setitem(test_stateful.WEIGHTS, test_stateful.CacheMachine.withdraw, 0)
    for seed in range(30):
        test_stateful.run_seed(seed, 120)
    assert EVICTED["KVBlocks"] > 100 and EVICTED["HostTier"] > 10, EVICTED


def queued_first(self: TierIndex[Node], node: Node, *, first: bool = False) -> None:
    self.unneeded[node] = None
    self.unneeded.move_to_end(node, first)


def queued_once(self: TierIndex[Node], node: Node, *, first: bool = False) -> None:
    self.unneeded.setdefault(node)


def all_let_go(self: KVBlocks, node: Node) -> None:
    self._pages.hold(node.block_id, -1)
    self.cached_blocks += 1
    self.note_kv(node)


MUTANTS = {
    "the latest goes first": (TierIndex, "note_kv", queued_first),
    "what is used again keeps its place": (TierIndex, "note_kv", queued_once),
    "needed KV goes": (KVBlocks, "_let_go", all_let_go),
    "KV stays though its state has gone": (TierIndex, "_unneed", lambda self, node: None),
    "what the device has, too, stays": (HostTier, "is_copy", lambda self, node: False),
    "a pinned block goes": (HostTier, "is_pinned", lambda self, node, kv: False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(compared, monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    try:
        serve("chat", "recompute_cost")
    except (AssertionError, CacheCorruptionError, LookupError):
        return
    test_stateful.fail_unless_a_seed_fails()
