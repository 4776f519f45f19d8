"""`Loads`: requests that load KV and a state from the host tier, and preempted requests that are swapped out to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_hybrid_prefix.index.matcher import Match, Matcher
from megatron_hybrid_prefix.index.requests import LiveRequest, Load, RequestBook, SwappedOut
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import HOST, EntryKind, Tag


class Loads:
    """Begins and ends loads, and swaps requests out (``cache.loads``). Pins the host entries that a load needs.

    Args:
        store: The cached blocks and states, and the host tier. Without a host tier nothing is ever loaded.
        requests: All requests, their loads and what is swapped out.
        matcher: Repeats matches that are out of date.
        stats: Counters.
        block_tokens: Tokens per KV block.

    Attributes:
        running: The request of each load that has not ended, by load id. Not to be changed.
        swapped_out: What preempted requests keep on the host, by request id. Not to be changed.
    """

    def __init__(
        self, store: PrefixStore, requests: RequestBook, matcher: Matcher, stats: PrefixStats, *, block_tokens: int
    ) -> None:
        self._store, self._requests, self._matcher, self._stats = store, requests, matcher, stats
        self._host, self._blocks, self._slots = store.host, store.blocks, store.slots
        self._block_tokens = block_tokens
        self.running, self.swapped_out = requests.loads, requests.swapped_out
        self._next_id = 0

    def loads_elsewhere(self, match: Match) -> bool:
        """Whether another request is already loading the state that this match would load."""
        if self._host is None or not match.loadable_blocks:
            return False
        node = self._store.tree.get(match.chain.keys[match.loadable_blocks - 1])
        if node is None:
            return False
        return any(live.load is not None and node.host_slot in live.load.pinned for live in self.running.values())

    @property
    def waiting_blocks(self) -> int:
        """KV blocks that only waiting requests hold."""
        if not self.running:
            return 0
        waiting = self._waiting
        holds = Counter(block_id for live in waiting for block_id in live.block_ids)
        held_alone = sum(self._blocks.ref_count(block_id) == held for block_id, held in holds.items())
        pages = self._slots.pages_of([live.load.slot for live in waiting if live.load is not None])
        return held_alone + pages * self._store.pages.page_blocks

    @property
    def _waiting(self) -> list[LiveRequest]:
        """Requests that hold a load and are not admitted yet, oldest load first."""
        return [live for live in self.running.values() if live.is_loading]

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
        if request_id in self.swapped_out:
            return self._begin_resume(request_id, match, write=write, reserved_blocks=reserved_blocks)
        match = self._matcher.fresh(match)
        if self._host is None or not match.loadable_blocks:
            return None
        keys = match.chain.keys[: match.loadable_blocks]
        shared = self._store.tree.path(keys)
        if not self._has_blocks(len(keys) - len(shared) + reserved_blocks, shared):
            return None
        found = self._host.gather(keys, len(shared))
        if found is None:
            return None
        entries, fetched = found
        loaded = self._begin(
            request_id,
            match,
            shared=shared,
            kv_entries=entries[:-1],
            state_entry=entries[-1],
            pinned=entries,
            fetched=fetched,
            resume_tokens=len(keys) * self._block_tokens,
            write=write,
            reserved_blocks=reserved_blocks,
        )
        self._host.entries.unpin(entries)  # the load pins them, too
        return loaded

    def _begin_resume(self, request_id: int, match: Match, *, write: bool, reserved_blocks: int) -> Match | None:
        """`begin_load_back` for a request that was swapped out. Drops what it left if that does not fit the prompt of ``match``."""
        left, host = self.swapped_out[request_id], self._host
        assert host is not None
        match = self._matcher.fresh(match)
        keys = match.chain.keys[: len(left.path)]
        fits = left.depth_tokens <= match.limit_tokens and keys == [node.key for node in left.path]
        fits = fits and match.resume_at is None
        if not fits or not match.read or not all(entry in host.entries for entry in left.pinned):
            self.drop_swapped_out(request_id)
            return None
        shared = self._store.tree.path(keys)
        loaded = self._begin(
            request_id,
            match,
            shared=shared,
            kv_entries=[*left.pinned[len(shared) :], *left.kv_entries],
            state_entry=left.state_entry,
            pinned=left.pinned,
            left=left,
            resume_tokens=left.depth_tokens,
            write=write,
            reserved_blocks=reserved_blocks,
        )
        if loaded is not None:
            host.entries.unpin(left.pinned)  # the load pins them, too
            del self.swapped_out[request_id]
        return loaded

    def _begin(
        self,
        request_id: int,
        match: Match,
        *,
        shared: Sequence[Node],
        kv_entries: Sequence[int],
        state_entry: int,
        pinned: tuple[int, ...],
        left: SwappedOut | None = None,
        fetched: tuple[Tag, ...] = (),
        resume_tokens: int,
        write: bool,
        reserved_blocks: int,
    ) -> Match | None:
        host = self._host
        assert host is not None
        if not self._has_blocks(len(kv_entries) + reserved_blocks, shared):
            return None
        # Share and pin before allocating: eviction must not take what this request needs.
        block_ids = self._blocks.share(shared)
        host.entries.pin(pinned)
        slot = self._store.checkpoints.take_slot()
        if slot is None:
            host.entries.unpin(pinned)
            self._blocks.release(block_ids, shared)
            return None
        block_ids += self._store.take_blocks(len(kv_entries))
        load_id, self._next_id = self._next_id, self._next_id + 1
        payloads: dict[int, Any] = {}
        for entry, block_id in zip(kv_entries, block_ids[len(shared) :], strict=True):
            payloads[block_id] = host.load(entry, block_id, load_id)
        host.load(state_entry, slot, load_id)
        usable_blocks = min(match.kv_depth_blocks, match.limit_tokens // self._block_tokens)
        loaded = dataclasses.replace(
            match,
            path=tuple(shared),
            resume_tokens=resume_tokens,
            source_slot=slot,
            lost_tokens_no_state=max(0, usable_blocks * self._block_tokens - resume_tokens),
            loadable_blocks=0,
            load_id=load_id,
            loaded_blocks=tuple(block_ids),
            lost_tokens_elsewhere=0,
        )
        live = LiveRequest(
            request_id=request_id,
            chain=match.chain.copy(),
            prompt_tokens=match.chain.tokens,
            write=write and match.chain.epoch == self._store.tree.epoch,
            block_ids=block_ids,
            path=list(shared),
            boundaries=(),
            computed_tokens=resume_tokens,
            planned_tokens=resume_tokens,
            # A request that was preempted inside a block may share the whole block.
            stored_tokens=max(resume_tokens, len(shared) * self._block_tokens),
            read=match.read,
            pinned_slot=None,
        )
        live.load = Load(
            load_id=load_id,
            pinned=pinned,
            slot=slot,
            left=left,
            pages=len(kv_entries) * host.entries.pages_of[EntryKind.KV] + host.entries.pages_of[EntryKind.STATE],
            match=loaded,
            payloads=payloads,
            fetched=fetched,
        )
        self._requests.live[request_id] = self.running[load_id] = live
        return loaded

    def _has_blocks(self, count: int, shared: Sequence[Node]) -> bool:
        return self._store.has_room(count, shared, slots=1)

    # -- end a load ----------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, *, kept: bool) -> None:
        """Ends the request's load, if it has one.

        A swapped-out request that was never admitted stays swapped out.

        Args:
            live: The request.
            kept: Whether the loaded state stays on the device.
        """
        load, host = live.load, self._host
        if load is None:
            return
        assert host is not None
        if not load.admitted:
            self._stats.count_fallback("host_load_given_up")
        live.load = None
        del self.running[load.load_id]
        blocks = load.match.resume_tokens // self._block_tokens
        node = live.path[blocks - 1] if kept and load.left is None and blocks <= len(live.path) else None
        if node is not None and node.slot == NO_SLOT and node.host_slot != NO_SLOT:
            self._store.checkpoints.restore(node, load.slot)
        else:
            self._slots.abandon(load.slot)
        if load.left is not None and not load.admitted:
            self.swapped_out[live.request_id] = load.left
            return
        host.entries.unpin(load.pinned)
        for entry in load.private:
            host.entries.remove(entry)

    def fail(self, live: LiveRequest) -> None:
        """Ends a load whose data was wrong or did not arrive, and drops its entries."""
        load, host = live.load, self._host
        assert load is not None and host is not None
        if load.not_fetched is not None:
            coming = self._coming(load)
            self._count_not_fetched(load.not_fetched, len(coming))
            self._stats.count_fallback("host_load_given_up")
            self.end(live, kept=False)
            for entry in coming:
                host.drop(entry)
            return
        self._stats.count_fallback("host_load_failed")
        self.end(live, kept=False)
        self._stats.tiers[HOST].failed += len(load.pinned)
        for entry in load.pinned:
            host.drop(entry)
        if load.fetched and host.behind is not None:
            self._stats.tiers[host.behind.name].failed += len(load.fetched)
            host.behind.remove(load.fetched)

    def end_fetch(self, request_id: int, failure: str | None) -> None:
        """What the request's load waited for has arrived on the host, on all ranks. Or not: then the load is given up.

        If the request is admitted by then, its forward runs, and its load fails (`not_fetched`, `fail`).

        Args:
            request_id: A request that holds a load.
            failure: Why it did not; None if it did.
        """
        live, host = self._requests[request_id], self._host
        assert live.load is not None and host is not None
        entries = self._coming(live.load)
        if failure is None:
            host.settle(entries)
        elif live.load.admitted:
            live.load.not_fetched = failure
        else:
            self._count_not_fetched(failure, len(entries))
            self._give_up(live)
            for entry in entries:
                host.drop(entry)

    def _coming(self, load: Load) -> list[int]:
        """The host entries of a load that come from the tier behind."""
        assert self._host is not None
        entries, tags = self._host.entries, set(load.fetched)
        return [entry for entry in load.pinned if entry in entries and entries.tag(entry) in tags]

    def _count_not_fetched(self, failure: str, entries: int) -> None:
        assert self._host is not None and self._host.behind is not None
        self._stats.count_fallback(failure)
        self._stats.tiers[self._host.behind.name].failed += entries

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
        self.end(live, kept=False)
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
        self.swapped_out[request_id] = SwappedOut(
            depth_tokens=depth_tokens,
            path=tuple(live.path),
            pinned=tuple(reversed(pinned)),
            kv_entries=tuple(private[1:]),
            state_entry=private[0],
        )
        self._stats.tiers[HOST].preempted += 1
        return True

    def drop_swapped_out(self, request_id: int) -> None:
        """Drops what the request left with `swap_out`, if anything."""
        left = self.swapped_out.pop(request_id, None)
        if left is not None:
            assert self._host is not None
            self._host.entries.unpin(left.pinned)
            for entry in left.private:
                self._host.entries.remove(entry)
