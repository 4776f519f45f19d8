"""`StoreAhead`: stores on the host what will be evicted next, while the device is busy.

The forward that evicts an entry waits until the entry is gathered, and the device waits while the CPU launches that. What the host
has already is only dropped. So once a forward is launched and published, as much is stored as was evicted since the last time: the KV
that goes next, the states that the eviction policy names next, and the KV that goes with them. It is a guess. What turns out to be
used first stays where it is, and what is evicted instead is stored then.

If there are few slots, the next states to go are those that the forward in flight writes. Their copies run after it.

What is stored ahead is on the device as well, so it takes room from other entries on the host: at most one page in `AHEAD_PART`.
It keeps its room until the next time, or a full host would evict it before the device does. After that it is spare.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import DEVICE, BlockTransfer, Copy, EntryKind

AHEAD_PART = 16

type Place = tuple[EntryKind, int]
"""A KV block or a slot."""


class StoreAhead:
    """See the top of this file.

    Args:
        store: The cached blocks and states.
        stats: Counts evictions.
    """

    def __init__(self, store: PrefixStore, stats: PrefixStats) -> None:
        self._store, self._stats = store, stats
        self._before = (0, 0, 0)  # evicted until the last `run`: KV blocks, guesses, other states

    def run(self, written: Collection[Place]) -> tuple[list[Copy], list[Copy]]:
        """Stores what will be evicted next. It stays on the device, too.

        Args:
            written: What the forward in flight writes.

        Returns:
            Copies that need not wait for that forward, and those that must: of what it writes, of what was queued before, and those
            that come after one of these. None if what is queued must come before the next forward, and not after this one: all stays
            queued then.
        """
        store = self._store
        queued = [copy for copy in store.copies if isinstance(copy, BlockTransfer)]
        if len(queued) < len(store.copies):  # the others are within the device
            return [], []
        # What is queued for a tier behind differs between ranks, if their tiers do. What is stored must not.
        self._store_next()
        if not all(map(self._may_wait, queued)):
            return [], []
        now: list[Copy] = []
        later: list[Copy] = [*queued]
        pages = {page for copy in queued for page in copy.pages}
        offers_wait = False
        for copy in store.take_copies()[len(queued) :]:
            assert isinstance(copy, BlockTransfer)
            is_offer = copy.source != DEVICE
            is_written = not is_offer and (copy.tag.kind, copy.device_id) in written
            # A page gets its copies in their order, and so does a tier behind: a state after the KV before it.
            if is_written or (is_offer and offers_wait) or not pages.isdisjoint(copy.pages):
                later.append(copy)
                pages.update(copy.pages)
                offers_wait = offers_wait or is_offer
            else:
                now.append(copy)
        return now, later

    def _may_wait(self, copy: BlockTransfer) -> bool:
        """Whether a queued copy may be carried out after the forward in flight.

        Not what the CPU copies to a tier behind: it would wait for the forward, and the sampling of its tokens for the CPU.
        """
        host = self._store.host
        return copy.source == DEVICE or (host is not None and host.behind is not None and host.behind.shared)

    def _store_next(self) -> None:
        store, stats, host = self._store, self._stats, self._store.host
        guesses = store.checkpoints.evicted_guesses
        before, self._before = self._before, (stats.kv_evictions, guesses, stats.evictions - guesses)
        if host is None or self._before == before:
            return
        blocks, guesses, others = (now - then for now, then in zip(self._before, before, strict=True))
        of_kv, of_state = host.entries.pages_of[EntryKind.KV], host.entries.pages_of[EntryKind.STATE]
        pages = host.entries.total_pages // AHEAD_PART
        most = pages // of_state
        states = store.next_evicted_states(blocks=blocks, guesses=min(guesses, most), others=min(others, most))[:most]
        pages -= len(states) * of_state
        path = list(islice(store.next_evicted_kv(states), min(blocks, pages // of_kv)))
        host.let_go_of_ahead()
        for node in states:  # first: they decide which KV is needed
            host.store_state(node, stays=True)
            if node.host_slot != NO_SLOT:
                host.keep_ahead(node.host_slot)
        for node in path:
            if host.store_kv(node, stays=True):
                host.keep_ahead(node.host_block)
