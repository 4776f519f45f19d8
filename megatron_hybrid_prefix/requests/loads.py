"""`Loads`: requests that load KV and a state from the host, and preempted requests that are swapped out to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.book import LiveRequest, Load, LoadSource, RequestBook
from megatron_hybrid_prefix.requests.matcher import Match, Matcher
from megatron_hybrid_prefix.tiers.device import DeviceTier
from megatron_hybrid_prefix.tiers.host import HostEntry
from megatron_hybrid_prefix.tiers.units import HOST, SHARED, EntryKind, LoadOver, LoadState, Tag


def source_below(device: DeviceTier, match: Match) -> LoadSource | None:
    """Where a request with this match can resume from below the device. None: nowhere, or computing is faster than loading."""
    blocks, block_tokens = match.loadable_blocks, device.settings.block_tokens
    saved_tokens = blocks * block_tokens - match.resume_tokens
    if not blocks or not device.host.is_worth_loading(blocks - len(match.path), saved_tokens):
        return None
    return LoadSource(keys=match.chain.keys[:blocks], depth_tokens=blocks * block_tokens)


def room_for(
    device: DeviceTier, match: Match, source: LoadSource | None, needed: int
) -> tuple[Sequence[Node], Sequence[Node]] | None:
    """Whether there is room for a request, with its load if there is a ``source``.

    Held blocks keep pages from being emptied for states. If there is no room for that reason, the
    request shares only what it skips.

    Args:
        device: The device.
        match: The request's match, which is up to date.
        source: What it loads.
        needed: Its blocks, if a load has no more.

    Returns:
        Nodes on the device that the request skips. And nodes after those it skips that it shares; it computes their tokens again.
        None: there is no room.
    """
    path: Sequence[Node] = match.path
    held = len(path)
    if source is not None:
        path, held = device.tree.path(source.keys), -(-source.depth_tokens // device.settings.block_tokens)
        needed = max(needed, held)
    # A path has no gaps: after a loaded block, the request shares nothing.
    cached = device.tree.path(match.chain.keys[held:needed]) if match.read and len(path) == held else []
    for beyond in (cached, []):
        if device.has_room(
            needed - len(path) - len(beyond),
            [*path, *beyond],
            slots=device.slots_per_request + (source is not None),
            source_slot=match.source_slot if source is None else None,
        ):
            return path, beyond
    return None


class Loads:
    """Begins and ends loads, and swaps requests out (``cache.loads``). Pins the host entries that a load needs.

    Args:
        device: The cached blocks and states, and the tiers below. If the host has no room, nothing is ever loaded.
        requests: All requests, their loads and what is swapped out.
        matcher: Refreshes stale matches.

    Attributes:
        fetches: What the tier behind the host brings to it for waiting requests, by request id.
    """

    def __init__(self, device: DeviceTier, requests: RequestBook, matcher: Matcher) -> None:
        self._device, self._requests, self._matcher, self._stats = device, requests, matcher, device.stats
        self._host, self._slots = device.host, device.slots
        self._block_tokens = device.settings.block_tokens
        self.fetches = requests.fetches
        self._ids = count()

    # -- begin ---------------------------------------------------------------------------------------------------------

    def use_rate(self, page_tokens: float) -> None:
        """See `HostTier.page_tokens`."""
        self._host.page_tokens = page_tokens

    def source(self, request_id: int, match: Match) -> LoadSource | None:
        """Where the request can resume from with a load. None: nowhere. Changes nothing."""
        left = self._requests.swapped_out.get(request_id)
        if left is None:
            return source_below(self._device, match)
        fits = match.chain.keys[: len(left.keys)] == left.keys and left.depth_tokens <= match.limit_tokens
        fits = fits and match.read and match.resume_at is None and all(entry.pages for entry in left.pinned)
        return left if fits else None

    def begin(self, request_id: int, source: LoadSource, path: Sequence[Node]) -> Load | None:
        """Pins what a request loads, and takes a slot for the state. Pass its blocks to `copy`.

        Args:
            request_id: The request.
            source: What it loads.
            path: Its first blocks, which are on the device. They are shared.

        Returns:
            The load. None, and nothing changed on the device: a tier has no room for it.
        """
        pinned = source.pinned if source.private else self._host.gather(source.keys, len(path))
        if pinned is None:
            return None
        slot = self._device.take_slot(live=bool(source.private))
        if slot is None:
            if not source.private:
                self._host.unpin(pinned)
            return None
        self._requests.swapped_out.pop(request_id, None)
        load = self._new_load(request_id, pinned, source, slot=slot)
        self._end_fetch(request_id)
        return load

    def copy(self, load: Load, shared_blocks: int, block_ids: Sequence[int]) -> None:
        """Queues the copies of a load.

        Args:
            load: From `begin`.
            shared_blocks: Number of leading blocks that are on the device.
            block_ids: The blocks after them.
        """
        # Of a preempted request the entries of shared blocks are pinned, too.
        entries = (*load.pinned[shared_blocks:], *load.private) if load.private else load.pinned
        for entry, block_id in zip(entries[:-1], block_ids, strict=False):
            self._host.load(entry, block_id, load.load_id)
        self._host.load(entries[-1], load.slot, load.load_id)

    def fetch(self, request_id: int, match: Match) -> Load | None:
        """Has the tier behind the host bring what a waiting request needs of it. Takes room on the host only.

        `admit` loads it from there. Call `drop_fetch` if the request ends before.

        Returns:
            The fetch, to be ended with `end_fetch`. None: there is nothing to be brought, or no room on the host.
        """
        match = self._matcher.fresh(match)
        source = self.source(request_id, match)
        if source is None or source.private or not self._host.behind.takes:
            return None
        entries = self._host.gather(source.keys, len(self._device.tree.path(source.keys)))
        if entries is None:
            return None
        if not any(entry.is_coming for entry in entries):
            self._host.unpin(entries)
            return None
        fetch = self.fetches[request_id] = self._new_load(request_id, entries, source)
        return fetch

    def _new_load(
        self, request_id: int, pinned: tuple[HostEntry, ...], source: LoadSource, *, slot: int = NO_SLOT
    ) -> Load:
        coming = tuple(entry for entry in pinned if entry.is_coming)
        return Load(
            load_id=next(self._ids),
            request_id=request_id,
            state=LoadState.FETCHING if coming else LoadState.COPYING,
            depth_tokens=source.depth_tokens,
            pinned=pinned,
            private=source.private,
            coming=coming,
            slot=slot,
        )

    # -- end a load ----------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, state: LoadState = LoadState.GIVEN_UP, *, kept: bool = False) -> None:
        """Ends the request's load, if it has one.

        Args:
            live: The request.
            state: Its new state, unless it has ended already.
            kept: Whether the loaded state stays on the device.
        """
        load = live.load
        if load is None:
            return
        if load.state in (LoadState.FETCHING, LoadState.COPYING):
            load.state = state
            if state is LoadState.GIVEN_UP:
                self._stats.count_fallback(state)
        live.load = None
        self._device.copies.append(LoadOver(load.load_id))
        blocks = load.depth_tokens // self._block_tokens
        node = live.path[blocks - 1] if kept and not load.private and blocks <= len(live.path) else None
        if node is not None and node.slot == NO_SLOT and node in self._host.of_states:
            self._device.restore(node, load.slot)
        else:
            self._slots.abandon(load.slot)
        self._host.unpin(load.pinned)
        if load.private:
            self._host.remove_private(load.private)

    def fail(self, live: LiveRequest) -> None:
        """Ends a load whose data was wrong or did not arrive, and drops its entries."""
        load = live.load
        assert load is not None
        if load.state in (LoadState.MISSING, LoadState.LATE):
            self._count_missing(load)
            self.end(live)
            for entry in load.coming:
                self._host.remove_wrong(entry)
            return
        load.state = LoadState.FAILED
        self._stats.count_fallback(load.state)
        fetched = [entry.tag for entry in load.coming if entry.pages]
        self.end(live)
        self._stats.tiers[HOST].failed += len(load.pinned)
        for entry in load.pinned:
            self._host.remove_wrong(entry)
        if fetched:
            self._stats.tiers[SHARED].failed += len(fetched)
            self._host.behind.remove(fetched)

    def end_fetch(self, load: Load, state: LoadState) -> None:
        """The entries that a load or a fetch waits for have arrived on the host, on all ranks. Or not.

        If they have not, the forward of a load runs, and the load fails (`fail`). A fetch is dropped.

        Args:
            load: A load or a fetch, which fetches.
            state: COPYING if all has arrived; else MISSING or LATE.
        """
        load.state = state
        if state is LoadState.COPYING:
            for entry in load.coming:
                entry.is_coming = False
        elif self.fetches.get(load.request_id) is load:
            self._count_missing(load)
            self.drop_fetch(load.request_id)
            for entry in load.coming:
                self._host.remove_wrong(entry)

    def drop_fetch(self, request_id: int) -> None:
        """The request does not wait for its fetch any more. What arrives stays on the host."""
        fetch = self._end_fetch(request_id)
        if fetch is not None and fetch.state is LoadState.FETCHING:
            fetch.state = LoadState.GIVEN_UP
            self._stats.count_fallback(fetch.state)

    def _end_fetch(self, request_id: int) -> Load | None:
        fetch = self.fetches.pop(request_id, None)
        if fetch is not None:
            self._host.unpin(fetch.pinned)
            self._device.copies.append(LoadOver(fetch.load_id))
        return fetch

    def _count_missing(self, load: Load) -> None:
        for reason in (load.state, LoadState.GIVEN_UP):
            self._stats.count_fallback(reason)
        self._stats.tiers[SHARED].failed += sum(bool(entry.pages) for entry in load.coming)

    # -- swap out ------------------------------------------------------------------------------------------------------

    def swap_out(self, request_id: int, depth_tokens: int, live_slot: int) -> bool:
        """Keeps what a preempted request has computed on the host. The caller releases the request next.

        Args:
            request_id: A live request.
            depth_tokens: Tokens that the request has computed.
            live_slot: Slot of the state after them.

        Returns:
            False if there is not enough room for all of it, or if the request shares blocks that it has not computed yet
            (in the middle of its prompt); then nothing changed.
        """
        live, host = self._requests[request_id], self._host
        blocks = -(-depth_tokens // self._block_tokens)
        if not live.write or live.plans or not len(live.path) <= blocks <= len(live.block_ids):
            return False
        key, epoch = f"request {request_id}".encode(), self._device.tree.epoch
        private: list[HostEntry] = []
        pinned: list[HostEntry] = []

        def keep(kind: EntryKind, device_id: int) -> bool:
            entry = host.store_private(device_id, Tag(kind, key, depth_tokens, epoch))
            if entry is not None:
                private.append(entry)
            return entry is not None

        def keep_node(node: Node) -> bool:
            if not host.store_kv(node, forced=True):
                return False
            pinned.append(host.kv[node])
            host.pin(pinned[-1:])
            return True

        kept = (
            keep(EntryKind.LIVE, live_slot)
            and all(keep(EntryKind.KV, block_id) for block_id in live.block_ids[len(live.path) : blocks])
            and all(keep_node(node) for node in reversed(live.path))
        )
        if not kept:
            host.unpin(pinned)
            host.remove_private(private)
            return False
        self.drop_swapped_out(request_id)
        self._requests.swapped_out[request_id] = LoadSource(
            keys=[node.key for node in live.path],
            depth_tokens=depth_tokens,
            pinned=tuple(reversed(pinned)),
            private=(*private[1:], private[0]),
        )
        self._stats.tiers[HOST].preempted += 1
        return True

    def drop_swapped_out(self, request_id: int) -> None:
        """Drops what the request left with `swap_out`, if anything."""
        left = self._requests.swapped_out.pop(request_id, None)
        if left is not None:
            self._host.unpin(left.pinned)
            self._host.remove_private(left.private)
