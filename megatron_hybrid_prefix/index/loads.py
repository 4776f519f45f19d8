"""`Loads`: requests that load KV and a state from the host tier, and preempted requests that are swapped out to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

from megatron_hybrid_prefix.index.matcher import Match, Matcher
from megatron_hybrid_prefix.index.requests import LiveRequest, RequestBook
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import HOST, SHARED, EntryKind, Load, LoadOver, LoadState, Tag


class Loads:
    """Begins and ends loads, and swaps requests out (``cache.loads``). Pins the host entries that a load needs.

    Args:
        store: The cached blocks and states, and the host tier. Without a host tier nothing is ever loaded.
        requests: All requests, their loads and what is swapped out.
        matcher: Repeats matches that are out of date.
    """

    def __init__(self, store: PrefixStore, requests: RequestBook, matcher: Matcher) -> None:
        self._store, self._requests, self._matcher, self._stats = store, requests, matcher, store.stats
        self._host, self._blocks, self._slots = store.host, store.blocks, store.slots
        self._block_tokens = store.settings.block_tokens
        self._next_id = 0

    def _swapped_out(self, request_id: int) -> Load | None:
        """The blocks and the state that a preempted request keeps on the host."""
        of_request = (load for load in self._requests.loads if load.request_id == request_id)
        return next((load for load in of_request if load.state is LoadState.SWAPPED_OUT), None)

    def loads_elsewhere(self, match: Match) -> bool:
        """Whether another request is already loading the state that this match would load."""
        if self._host is None or not match.loadable_blocks:
            return False
        node = self._store.tree.get(match.chain.keys[match.loadable_blocks - 1])
        if node is None or node.host_slot == NO_SLOT:
            return False
        return any(
            node.host_slot in load.pinned for load in self._requests.loads if load.state is not LoadState.SWAPPED_OUT
        )

    @property
    def waiting_blocks(self) -> int:
        """KV blocks that only waiting requests hold."""
        waiting = self._waiting
        if not waiting:
            return 0
        holds = Counter(block_id for live in waiting for block_id in live.block_ids)
        held_alone = sum(self._blocks.ref_count(block_id) == held for block_id, held in holds.items())
        pages = self._slots.pages_of([live.load.slot for live in waiting if live.load is not None])
        return held_alone + pages * self._store.pages.page_blocks

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
        left = self._swapped_out(request_id)
        if left is not None:
            return self._begin_resume(left, match, write=write, reserved_blocks=reserved_blocks)
        match = self._matcher.fresh(match)
        if self._host is None or not match.loadable_blocks:
            return None
        keys = match.chain.keys[: match.loadable_blocks]
        shared = self._store.tree.path(keys)
        if not self._store.has_room(len(keys) - len(shared) + reserved_blocks, shared, slots=1):
            return None
        entries = self._host.gather(keys, len(shared))
        if entries is None:
            return None
        load = self._new_load(request_id, depth_tokens=len(keys) * self._block_tokens, pinned=entries)
        loaded = self._begin(load, match, entries, shared, write=write)
        if loaded is None:
            self._host.entries.unpin(entries)
        return loaded

    def _begin_resume(self, left: Load, match: Match, *, write: bool, reserved_blocks: int) -> Match | None:
        """`begin_load_back` for a request that was swapped out. Drops what it left if that does not fit the prompt of ``match``."""
        host = self._host
        assert host is not None
        match = self._matcher.fresh(match)
        keys = match.chain.keys[: len(left.keys)]
        fits = left.depth_tokens <= match.limit_tokens and tuple(keys) == left.keys
        fits = fits and match.resume_at is None
        if not fits or not match.read or not all(entry in host.entries for entry in left.pinned):
            self.drop_swapped_out(left.request_id)
            return None
        shared = self._store.tree.path(keys)
        entries = [*left.pinned[len(shared) :], *left.private]
        if not self._store.has_room(len(entries) - 1 + reserved_blocks, shared, slots=1):
            return None
        loaded = self._begin(self._left_again(left), match, entries, shared, write=write)
        if loaded is not None:
            self._requests.loads.remove(left)
        return loaded

    def _begin(
        self, load: Load, match: Match, entries: Sequence[int], shared: Sequence[Node], *, write: bool
    ) -> Match | None:
        """Begins a load whose entries are pinned, if there is a slot. There is room for its blocks.

        Args:
            load: The load.
            match: The match of its request.
            entries: Host entries to copy: KV after the ``shared`` blocks, then the state.
            shared: Nodes of blocks on the device.
            write: See `begin_load_back`.
        """
        host = self._host
        assert host is not None
        # Share before allocating: eviction must not take what this request needs.
        block_ids = self._blocks.share(shared)
        slot = self._store.checkpoints.take_slot()
        if slot is None:
            self._blocks.release(block_ids, shared)
            return None
        block_ids += self._store.take_blocks(len(entries) - 1)
        load.coming = host.coming(entries)
        load.state = LoadState.FETCHING if load.coming else LoadState.COPYING
        load.slot, load.pages = slot, sum(len(host.entries[entry].pages) for entry in entries)
        for entry, block_id in zip(entries[:-1], block_ids[len(shared) :], strict=True):
            load.payloads[block_id] = host.load(entry, block_id, load.load_id)
        host.load(entries[-1], slot, load.load_id)
        usable_blocks = min(match.kv_depth_blocks, match.limit_tokens // self._block_tokens)
        loaded = dataclasses.replace(
            match,
            path=tuple(shared),
            resume_tokens=load.depth_tokens,
            source_slot=slot,
            lost_tokens_no_state=max(0, usable_blocks * self._block_tokens - load.depth_tokens),
            loadable_blocks=0,
            load=load,
            loaded_blocks=tuple(block_ids),
            lost_tokens_elsewhere=0,
        )
        self._requests.live[load.request_id] = LiveRequest(
            request_id=load.request_id,
            chain=copy(match.chain),
            prompt_tokens=match.chain.tokens,
            write=write and match.chain.epoch == self._store.tree.epoch,
            block_ids=block_ids,
            path=list(shared),
            boundaries=(),
            computed_tokens=load.depth_tokens,
            planned_tokens=load.depth_tokens,
            # A request that was preempted inside a block may share the whole block.
            stored_tokens=max(load.depth_tokens, len(shared) * self._block_tokens),
            read=match.read,
            pinned_slot=None,
            load=load,
            uncounted=loaded,
        )
        self._requests.loads.append(load)
        return loaded

    def _new_load(self, request_id: int, **fields: Any) -> Load:
        self._next_id += 1
        return Load(load_id=self._next_id - 1, request_id=request_id, state=LoadState.COPYING, **fields)

    def _left_again(self, left: Load) -> Load:
        """A load of the same entries, which stay pinned."""
        return self._new_load(
            left.request_id,
            depth_tokens=left.depth_tokens,
            keys=left.keys,
            pinned=left.pinned,
            private=left.private,
        )

    # -- end a load ----------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, state: LoadState = LoadState.GIVEN_UP, *, kept: bool = False) -> None:
        """Ends the request's load, if it has one.

        A swapped-out request that was never admitted stays swapped out.

        Args:
            live: The request.
            state: Its new state, unless it has ended already.
            kept: Whether the loaded state stays on the device.
        """
        load, host = live.load, self._host
        if load is None:
            return
        assert host is not None
        if load.is_running:
            load.state = state
        if not load.admitted:
            self._stats.count_fallback(LoadState.GIVEN_UP)
        live.load = None
        self._requests.loads.remove(load)
        self._store.copies.append(LoadOver(load.load_id))
        blocks = load.depth_tokens // self._block_tokens
        node = live.path[blocks - 1] if kept and not load.private and blocks <= len(live.path) else None
        if node is not None and node.slot == NO_SLOT and node.host_slot != NO_SLOT:
            self._store.checkpoints.restore(node, load.slot)
        else:
            self._slots.abandon(load.slot)
        if load.private and not load.admitted:
            left = self._left_again(load)
            left.state = LoadState.SWAPPED_OUT
            self._requests.loads.append(left)
        else:
            self._let_entries_go(load)

    def _let_entries_go(self, load: Load) -> None:
        assert self._host is not None
        self._host.entries.unpin(load.pinned)
        for entry in load.private:
            self._host.entries.remove(entry)

    def fail(self, live: LiveRequest) -> None:
        """Ends the load of an admitted request whose data was wrong or did not arrive, and drops its entries."""
        load, host = live.load, self._host
        assert load is not None and host is not None
        if load.state in (LoadState.MISSING, LoadState.LATE):
            self._stats.count_fallback(LoadState.GIVEN_UP)
            self._drop_coming(live)
            return
        load.state = LoadState.FAILED
        self._stats.count_fallback(load.state)
        fetched = [host.entries[entry].tag for entry in load.coming if entry in host.entries]
        self.end(live)
        self._stats.tiers[HOST].failed += len(load.pinned)
        for entry in load.pinned:
            host.drop(entry)
        if fetched and host.behind is not None:
            self._stats.tiers[SHARED].failed += len(fetched)
            host.behind.remove(fetched)

    def end_fetch(self, load: Load, state: LoadState) -> None:
        """The entries of a load have arrived on the host, on all ranks. Or not: then the load is given up.

        If its request is admitted by then, its forward runs, and its load fails (`fail`).

        Args:
            load: A load that fetches.
            state: COPYING if all has arrived; else MISSING or LATE.
        """
        live, host = self._requests.live[load.request_id], self._host
        assert host is not None
        load.state = state
        if state is LoadState.COPYING:
            host.settle(load.coming)
        elif not load.admitted:
            self._drop_coming(live)

    def _drop_coming(self, live: LiveRequest) -> None:
        """Ends a load whose entries did not arrive, and drops these."""
        load, host = live.load, self._host
        assert load is not None and host is not None
        coming = [entry for entry in load.coming if entry in host.entries]
        self._stats.count_fallback(load.state)
        self._stats.tiers[SHARED].failed += len(coming)
        if load.admitted:
            self.end(live)
        else:
            self._give_up(live)
        for entry in coming:
            host.drop(entry)

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
        self._store.let_go(live)

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
        live = self._requests[request_id]
        host = self._host
        blocks = -(-depth_tokens // self._block_tokens)
        if host is None or not live.write or live.plans or not len(live.path) <= blocks <= len(live.block_ids):
            return False
        name, epoch = f"request {request_id}".encode(), self._store.tree.epoch
        pinned: list[int] = []
        private: list[int] = []

        def keep(kind: EntryKind, device_id: int) -> bool:
            tag = Tag(kind=kind, key=name, depth_tokens=depth_tokens, epoch=epoch)
            entry = host.store_private(kind, device_id, tag)
            if entry is not None:
                private.append(entry)
            return entry is not None

        def keep_node(node: Node) -> bool:
            stored = host.store_kv(node, forced=True)
            if stored:
                pinned.append(node.host_block)
                host.entries.pin(pinned[-1:])
            return stored

        own_blocks = live.block_ids[len(live.path) : blocks]
        kept = (
            keep(EntryKind.STATE, live_slot)
            and all(keep(EntryKind.KV, block_id) for block_id in own_blocks)
            and all(keep_node(node) for node in reversed(live.path))
        )
        if not kept:
            host.entries.unpin(pinned)
            for entry in private:
                host.entries.remove(entry)
            return False
        self.drop_swapped_out(request_id)
        left = self._new_load(
            request_id,
            depth_tokens=depth_tokens,
            keys=tuple(node.key for node in live.path),
            pinned=tuple(reversed(pinned)),
            private=(*private[1:], private[0]),
        )
        left.state = LoadState.SWAPPED_OUT
        self._requests.loads.append(left)
        self._stats.tiers[HOST].preempted += 1
        return True

    def drop_swapped_out(self, request_id: int) -> None:
        """Drops what the request left with `swap_out`, if anything."""
        left = self._swapped_out(request_id)
        if left is not None:
            self._requests.loads.remove(left)
            self._let_entries_go(left)
