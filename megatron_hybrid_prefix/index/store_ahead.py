"""`StoreAhead`: stores on the host what will be evicted next, while the device is busy.

The forward that evicts an entry waits until the entry is gathered, and the device waits while the CPU launches that. What the host
has already is only dropped. So once a forward is launched, as much is stored as was evicted since the last time: the states that
the eviction policy names next, and the KV that goes with them. It is a guess. What turns out to be used first stays where it is, and
what is evicted instead is stored then.

If there are few slots, the next states to go are those that the forward in flight writes. These can be stored, too: their copies run
after it, and their entries belong to nothing until it succeeds.

What is stored ahead is on the device as well, so it takes room from other entries on the host: at most one page in `AHEAD_PART` at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from megatron_hybrid_prefix.index.host_tier import HostTier, is_probationary
from megatron_hybrid_prefix.index.requests import PlannedCheckpoint
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.tiers.units import Copy, EntryKind

AHEAD_PART = 16

type Planned = tuple[PlannedCheckpoint, Sequence[bytes]]
"""A state that a forward in flight writes, and the keys of all blocks before it."""


class StoreAhead:
    """See the top of this file.

    Args:
        store: The cached blocks and states.
        stats: Counts evictions.
    """

    def __init__(self, store: PrefixStore, stats: PrefixStats) -> None:
        self._store, self._stats = store, stats
        self._before = (0, 0, 0)  # evicted until the last `run`: KV blocks, guesses, other states

    def run(self, planned: Iterable[Planned]) -> tuple[list[Copy], list[Copy]]:
        """Stores what will be evicted next. It stays on the device, too.

        Args:
            planned: What the forward in flight writes.

        Returns:
            The copies of what is cached, and of what that forward writes. None while other copies are queued, which come first.
        """
        store, stats, host = self._store, self._stats, self._store.host
        guesses = store.checkpoints.evicted_guesses
        before, self._before = self._before, (stats.kv_evictions, guesses, stats.evictions - guesses)
        if host is None or store.copies or self._before == before:
            return [], []
        blocks, guesses, others = (now - then for now, then in zip(self._before, before, strict=True))
        of_kv, of_state = host.entries.pages_of[EntryKind.KV], host.entries.pages_of[EntryKind.STATE]
        pages = host.entries.total_pages // AHEAD_PART
        states = store.checkpoints.next_evicted(guesses=guesses, others=others)[: pages // of_state]
        pages -= len(states) * of_state
        path = list(islice(store.next_evicted_kv(states), min(blocks, pages // of_kv)))
        pages -= len(path) * of_kv
        for node in states:  # first: they decide which KV is needed
            host.store_state(node)
        for node in path:
            host.store_kv(node, stays=True)
        cached = self._take_copies()
        others -= sum(not is_probationary(node) for node in states)
        for checkpoint, keys in _chosen(planned, host, guesses=guesses, others=others)[: pages // of_state]:
            host.store_planned(checkpoint.slot, keys)
        self._are_spare(host, states, path)
        return cached, self._take_copies()

    def _are_spare(self, host: HostTier, states: Sequence[Node], path: Sequence[Node]) -> None:
        """What is on both tiers is spare on the host. Before all is stored, each would take the place of the one before it."""
        for node in reversed(states):
            host.state_also_on_device(node)
        host.also_on_device(path)

    def _take_copies(self) -> list[Copy]:
        copies = list(self._store.copies)
        self._store.copies.clear()
        return copies


def _chosen(planned: Iterable[Planned], host: HostTier, *, guesses: int, others: int) -> list[Planned]:
    """What is stored of the states in flight. Those that are stored when they are published are left to that.

    Args:
        planned: The states.
        host: The host tier.
        guesses: At most so many guesses. As many were evicted, and any of these may be worth the least.
        others: At most so many others. So many were evicted, but are not found among the cached ones.
    """
    kinds: tuple[list[Planned], list[Planned]] = [], []
    for checkpoint, keys in planned:
        if not host.stores_published(checkpoint.reason):
            kinds[checkpoint.reason == CheckpointReason.INTERVAL].append((checkpoint, keys))
    return [*kinds[False][:others], *kinds[True][:guesses]]
