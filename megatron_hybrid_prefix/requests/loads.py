"""`Loads`: requests that load KV and a state from the host, and preempted requests that are swapped out to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.book import LiveRequest, RequestBook, SwappedOut, let_go
from megatron_hybrid_prefix.requests.matcher import Match, Matcher
from megatron_hybrid_prefix.tiers.device import DeviceTier
from megatron_hybrid_prefix.tiers.host import HostEntry
from megatron_hybrid_prefix.tiers.units import HOST, SHARED, EntryKind, Load, LoadState, Tag


class Loads:
    """Begins and ends loads, and swaps requests out (``cache.loads``). Pins the host entries that a load needs.

    Args:
        device: The cached blocks and states, and the tiers below. If the host has no room, nothing is ever loaded.
        requests: All requests, their loads and what is swapped out.
        matcher: Refreshes stale matches.
    """

    def __init__(self, device: DeviceTier, requests: RequestBook, matcher: Matcher) -> None:
        self._device, self._requests, self._matcher, self._stats = device, requests, matcher, device.stats
        self._host, self._blocks, self._slots = device.host, device.blocks, device.slots
        self._block_tokens = device.settings.block_tokens
        self._next_id = 0

    def loads_elsewhere(self, match: Match) -> bool:
        """Whether another request is already loading the state that this match would load."""
        if not match.loadable_blocks:
            return False
        node = self._device.tree.get(match.chain.keys[match.loadable_blocks - 1])
        entry = None if node is None else self._host.of_states.get(node)
        return entry is not None and any(entry in load.pinned for load in self._requests.loads)

    @property
    def waiting_blocks(self) -> int:
        """KV blocks that only waiting requests hold."""
        waiting = self._waiting
        if not waiting:
            return 0
        holds = Counter(block_id for live in waiting for block_id in live.block_ids)
        held_alone = sum(self._blocks.ref_count(block_id) == held for block_id, held in holds.items())
        pages = self._slots.pages_of([live.load.slot for live in waiting if live.load is not None])
        return held_alone + pages * self._device.pages.page_blocks

    @property
    def _waiting(self) -> list[LiveRequest]:
        """Requests that hold a load and are not admitted yet, oldest load first."""
        loads = self._requests.loads
        return [self._requests.live[load.request_id] for load in loads if load.is_running and not load.admitted]

    # -- begin a load ------------------------------------------------------------------------------------------------

    def begin_load_back(
        self, request_id: int, match: Match, *, write: bool = True, reserved_blocks: int = 0
    ) -> Match | None:
        """Allocates blocks and a slot for what the prompt can reuse from the host, and queues the copies.

        A request that was swapped out continues where it stopped.

        The request holds them from now on. Pass it to `HybridPrefixCache.admit` with the returned match, or to
        `HybridPrefixCache.release`. The loaded blocks become matchable when the request's first forward is published.

        Args:
            request_id: Not the id of a live request.
            match: From `HybridPrefixCache.match`.
            write: As for `HybridPrefixCache.admit`.
            reserved_blocks: Blocks that must stay available for running requests.

        Returns:
            The match to admit the request with. None, and nothing changed, if the host has nothing deeper than the
            device, or if there are too few blocks or no slot.
        """
        if request_id in self._requests.live:
            return None
        match, left = self._matcher.fresh(match), self._requests.swapped_out.get(request_id)
        depth_tokens, shared = match.loadable_blocks * self._block_tokens, []
        if left is not None:
            if not self._continues(left, match):
                self.drop_swapped_out(request_id)
                return None
            depth_tokens = left.depth_tokens
        elif not depth_tokens:
            return None
        keys = match.chain.keys[: match.loadable_blocks] if left is None else left.keys
        shared = self._device.tree.path(keys)
        blocks = -(-depth_tokens // self._block_tokens) - len(shared)
        if not self._device.has_room(blocks + reserved_blocks, shared, slots=1):
            return None
        entries = self._host.gather(keys, len(shared)) if left is None else (*left.pinned[len(shared) :], *left.private)
        if entries is None:
            return None
        # Share before allocating: eviction must not take what this request needs.
        block_ids = self._blocks.share(shared)
        slot = self._device.take_slot()
        if slot is None:
            self._blocks.release(block_ids, shared)
            if left is None:
                self._host.unpin(entries)
            return None
        block_ids += self._device.take_blocks(blocks)
        coming = tuple(entry for entry in entries if entry.is_coming)
        load = Load(
            load_id=self._next_id,
            request_id=request_id,
            state=LoadState.FETCHING if coming else LoadState.ASKED,
            depth_tokens=depth_tokens,
            pinned=entries if left is None else left.pinned,
            swapped_out=left,
            coming=coming,
            slot=slot,
            pages=sum(len(entry.pages) for entry in entries),
        )
        self._next_id += 1
        for entry, block_id in zip(entries[:-1], block_ids[len(shared) :], strict=True):
            load.payloads[block_id] = self._host.load(entry, block_id, load)
        self._host.load(entries[-1], slot, load)
        usable_blocks = min(match.kv_depth_blocks, match.limit_tokens // self._block_tokens)
        loaded = dataclasses.replace(
            match,
            path=tuple(shared),
            resume_tokens=depth_tokens,
            source_slot=slot,
            lost_tokens_no_state=max(0, usable_blocks * self._block_tokens - depth_tokens),
            loadable_blocks=0,
            load=load,
            loaded_blocks=tuple(block_ids),
            lost_tokens_elsewhere=0,
        )
        write = write and match.chain.epoch == self._device.tree.epoch
        self._requests.live[request_id] = LiveRequest.of(request_id, loaded, block_ids, self._block_tokens, write=write)
        self._requests.loads.append(load)
        self._requests.swapped_out.pop(request_id, None)
        return loaded

    def _continues(self, left: SwappedOut, match: Match) -> bool:
        """Whether the prompt of ``match`` goes on from what a preempted request left, and all of that is still there."""
        fits = tuple(match.chain.keys[: len(left.keys)]) == left.keys and left.depth_tokens <= match.limit_tokens
        return fits and match.read and match.resume_at is None and all(entry.pages for entry in left.pinned)

    # -- end a load ----------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, state: LoadState = LoadState.GIVEN_UP, *, kept: bool = False) -> None:
        """Ends the request's load, if it has one.

        A swapped-out request that was never admitted stays swapped out.

        Args:
            live: The request.
            state: Its new state, unless it has ended already.
            kept: Whether the loaded state stays on the device.
        """
        load = live.load
        if load is None:
            return
        if load.is_running:
            load.state = state
        if not load.admitted:
            self._stats.count_fallback(LoadState.GIVEN_UP)
        live.load = None
        self._requests.loads.remove(load)
        blocks = load.depth_tokens // self._block_tokens
        node = live.path[blocks - 1] if kept and load.swapped_out is None and blocks <= len(live.path) else None
        if node is not None and node.slot == NO_SLOT and node in self._host.of_states:
            self._device.restore(node, load.slot)
        else:
            self._slots.abandon(load.slot)
        if load.swapped_out is None:
            self._host.unpin(load.pinned)
        else:
            self._requests.swapped_out[load.request_id] = load.swapped_out
            if load.admitted:
                self.drop_swapped_out(load.request_id)

    def fail(self, live: LiveRequest) -> None:
        """Ends the load of an admitted request whose data was wrong or did not arrive, and drops its entries."""
        load = live.load
        assert load is not None
        if load.state in (LoadState.MISSING, LoadState.LATE):
            self._stats.count_fallback(LoadState.GIVEN_UP)
            self._drop_coming(live, load)
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
        """The entries of a load have arrived on the host, on all ranks. Or not: then the load is given up.

        If its request is admitted by then, its forward runs, and its load fails (`fail`).

        Args:
            load: A load that fetches.
            state: COPYING if all has arrived; else MISSING or LATE.
        """
        load.state = state
        if state is LoadState.COPYING:
            for entry in load.coming:
                entry.is_coming = False
        elif not load.admitted:
            self._drop_coming(self._requests.live[load.request_id], load)

    def _drop_coming(self, live: LiveRequest, load: Load) -> None:
        """Ends a load whose entries did not arrive, and drops these."""
        coming = [entry for entry in load.coming if entry.pages]
        self._stats.count_fallback(load.state)
        self._stats.tiers[SHARED].failed += len(coming)
        if load.admitted:
            self.end(live)
        else:
            self._give_up(live)
        for entry in coming:
            self._host.remove_wrong(entry)

    def give_up(self) -> bool:
        """Releases all requests that hold a load and are not admitted. Returns False if there were none."""
        waiting = self._waiting
        for live in waiting:
            self._give_up(live)
        return bool(waiting)

    def make_room(self, count: int) -> bool:
        """Makes ``count`` blocks available for running requests. Waiting requests give up their loads, newest first.

        Returns:
            False if there are too few blocks even so; then nothing changed.
        """
        available = self._blocks.available_blocks
        if count <= available:
            return True
        waiting = self._waiting
        if not waiting or count > available + self.waiting_blocks:
            return False
        while waiting and count > self._blocks.available_blocks:
            self._give_up(waiting.pop())
        return True

    def _give_up(self, live: LiveRequest) -> None:
        del self._requests.live[live.request_id]
        self.end(live)
        let_go(live, self._device)

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
        tag = partial(
            Tag, key=f"request {request_id}".encode(), depth_tokens=depth_tokens, epoch=self._device.tree.epoch
        )
        private: list[HostEntry] = []
        pinned: list[HostEntry] = []

        def keep(kind: EntryKind, device_id: int) -> bool:
            entry = host.store_private(kind, device_id, tag(kind=kind))
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
            keep(EntryKind.STATE, live_slot)
            and all(keep(EntryKind.KV, block_id) for block_id in live.block_ids[len(live.path) : blocks])
            and all(keep_node(node) for node in reversed(live.path))
        )
        if not kept:
            host.unpin(pinned)
            host.remove_private(private)
            return False
        self.drop_swapped_out(request_id)
        self._requests.swapped_out[request_id] = SwappedOut(
            depth_tokens=depth_tokens,
            keys=tuple(node.key for node in live.path),
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
