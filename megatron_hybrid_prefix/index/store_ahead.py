"""`StoreAhead`: stores on the host what will be evicted next, while the device is busy.

The forward that evicts an entry waits until the entry is gathered, and the device waits while the CPU launches that. What the host
has already is only dropped. So once a forward is launched, as much is stored as was evicted since the last time: the KV that goes
next, the states that the eviction policy names next, and the KV that goes with them. It is a guess. What turns out to be used first
stays where it is, and what is evicted instead is stored then.

If there are few slots, the next states to go are those that the forward in flight writes. These can be stored, too: their copies run
after it, and their entries belong to nothing until it succeeds.

What is stored ahead is on the device as well, so it takes room from other entries on the host: at most one page in `AHEAD_PART`.
It keeps its room until the next time, or a full host would evict it before the device does. After that it is spare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from megatron_hybrid_prefix.index.host_tier import HostTier, is_probationary
from megatron_hybrid_prefix.index.requests import PlannedCheckpoint
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import DEVICE, BlockTransfer, Copy, EntryKind

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
        most = pages // of_state
        states = store.next_evicted_states(blocks=blocks, guesses=min(guesses, most), others=min(others, most))[:most]
        pages -= len(states) * of_state
        path = list(islice(store.next_evicted_kv(states), min(blocks, pages // of_kv)))
        pages -= len(path) * of_kv
        host.let_go_of_ahead()
        for node in states:  # first: they decide which KV is needed
            host.store_state(node)
            if node.host_slot != NO_SLOT:
                host.keep_ahead(node.host_slot)
        for node in path:
            if host.store_kv(node, stays=True):
                host.keep_ahead(node.host_block)
        cached = store.take_copies()
        others -= sum(not is_probationary(node) for node in states)
        for checkpoint, keys in _chosen(planned, host, guesses=guesses, others=others)[: pages // of_state]:
            host.store_planned(checkpoint.slot, keys)
        written = store.take_copies()
        # What makes room may be offered to a tier behind the host. That need not wait for the forward.
        offers = [copy for copy in written if isinstance(copy, BlockTransfer) and copy.source != DEVICE]
        return cached + offers, [copy for copy in written if copy not in offers]


def _chosen(planned: Iterable[Planned], host: HostTier, *, guesses: int, others: int) -> list[Planned]:
    """What is stored of the states in flight: none that is stored when it is published, or that no node will have.

    Args:
        planned: The states.
        host: The host tier.
        guesses: At most so many guesses. As many were evicted, and any of these may be worth the least.
        others: At most so many others. So many were evicted, but are not found among the cached ones.
    """
    kinds: tuple[list[Planned], list[Planned]] = [], []
    for checkpoint, keys in planned:
        if checkpoint.reason != CheckpointReason.VERIFY and not host.stores_published(checkpoint.reason):
            kinds[checkpoint.reason == CheckpointReason.INTERVAL].append((checkpoint, keys))
    return [*kinds[False][: max(0, others)], *kinds[True][:guesses]]
