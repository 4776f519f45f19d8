"""`HostLoads`: requests that get from the host what they resume from, and what preempted requests have left there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.matcher import Match
from megatron_hybrid_prefix.index.requests import LiveRequest, Load, Retracted
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import NO_BLOCK, NO_SLOT, Node
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers.units import Kind, Tag


class HostLoads:
    """See the module. The entries on the host that are needed for it are pinned there.

    Args:
        host: The tier; None: there is none, and nothing is ever loaded.
        store: Makes room on the device.
        blocks: KV blocks of the device.
        slots: Checkpoint slots of the device.
        stats: Counts.
        block_tokens: Tokens of a KV block.
    """

    def __init__(
        self,
        host: HostTier | None,
        *,
        store: PrefixStore,
        blocks: KVBlocks,
        slots: SlotPool,
        stats: PrefixStats,
        block_tokens: int,
    ) -> None:
        self._host, self._store, self._blocks, self._slots, self._stats = host, store, blocks, slots, stats
        self._block_tokens = block_tokens
        self._requests: dict[int, LiveRequest] = {}  # by load id
        self._left: dict[int, Retracted] = {}  # by request id
        self._next_id = 0

    def __contains__(self, load_id: int) -> bool:
        """Whether a request, admitted or not, still needs what this load brings."""
        return load_id in self._requests

    @property
    def waiting(self) -> list[LiveRequest]:
        """Requests that hold a load and are not admitted yet, in the order in which they began."""
        return [live for live in self._requests.values() if live.is_loading]

    @property
    def waiting_blocks(self) -> int:
        """Blocks that only they hold."""
        if not self._requests:
            return 0
        holds = Counter(block_id for live in self.waiting for block_id in live.block_ids)
        return sum(self._blocks.holders(block_id) == held for block_id, held in holds.items())

    @property
    def left(self) -> dict[int, Retracted]:
        """What requests left when they were preempted, by request; not to be changed."""
        return self._left

    def loads_elsewhere(self, match: Match) -> bool:
        """Whether a request is loading what one with this match would load."""
        path = match.loadable_path
        return self._host is not None and bool(path) and self._host.is_pinned(path[-1].host_slot)

    # -- begin ---------------------------------------------------------------------------------------------------------

    def begin(self, request_id: int, match: Match, *, write: bool, leave_blocks: int) -> LiveRequest | None:
        """Takes blocks and a slot for what the match finds on the host, and queues the moves.

        Args:
            request_id: Of no live request.
            match: Up to date.
            write: Whether what the request computes may be cached.
            leave_blocks: So many blocks have to be left.

        Returns:
            The request, which holds its load; None (and nothing changed) where the host has no more than the device, or
            where there are not enough blocks, or no slot.
        """
        path = match.loadable_path
        if self._host is None or not path:
            return None
        shared, rest = _split_by_device(path)
        return self._begin(
            request_id,
            match,
            shared=shared,
            kv_entries=[node.host_block for node in rest],
            state_entry=path[-1].host_slot,
            pinned=(*(node.host_block for node in rest), path[-1].host_slot),
            resume_tokens=len(path) * self._block_tokens,
            write=write,
            leave_blocks=leave_blocks,
        )

    def begin_resume(self, request_id: int, match: Match, *, write: bool, leave_blocks: int) -> LiveRequest | None:
        """`begin` for a request that left something with `leave`. If that is not of the match's prompt it is dropped."""
        left, host = self._left.get(request_id), self._host
        if left is None:
            return None
        assert host is not None
        keys = match.chain.keys[: len(left.path)]
        fits = left.depth_tokens <= match.limit_tokens and keys == [node.key for node in left.path]
        if not fits or not match.read or not all(host.holds(entry) for entry in left.pinned):
            self.drop(request_id)
            return None
        shared, _ = _split_by_device(left.path)
        live = self._begin(
            request_id,
            match,
            shared=shared,
            kv_entries=[*left.pinned[len(shared) :], *left.kv_entries],
            state_entry=left.state_entry,
            pinned=left.pinned,
            left=left,
            resume_tokens=left.depth_tokens,
            write=write,
            leave_blocks=leave_blocks,
        )
        if live is not None:
            host.unpin(left.pinned)  # the load pins them, too
            del self._left[request_id]
        return live

    def _begin(
        self,
        request_id: int,
        match: Match,
        *,
        shared: Sequence[Node],
        kv_entries: Sequence[int],
        state_entry: int,
        pinned: tuple[int, ...],
        left: Retracted | None = None,
        resume_tokens: int,
        write: bool,
        leave_blocks: int,
    ) -> LiveRequest | None:
        host = self._host
        assert host is not None
        if len(kv_entries) + leave_blocks > self._blocks.available_blocks - self._blocks.unheld(shared):
            return None
        # Held and pinned before anything is taken: making room must not evict what this request needs.
        block_ids = self._blocks.share(shared)
        host.pin(pinned)
        slot = self._store.take_slot()
        if slot is None:
            host.unpin(pinned)
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
            loadable_path=(),
            load_id=load_id,
            loaded_blocks=tuple(block_ids),
        )
        live = self._requests[load_id] = LiveRequest(
            request_id=request_id,
            chain=match.chain.copy(),
            prompt_tokens=match.chain.tokens,
            write=write,
            block_ids=block_ids,
            path=list(shared),
            boundaries=(),
            computed_tokens=resume_tokens,
            planned_tokens=resume_tokens,
            pinned_slot=None,
        )
        live.load = Load(
            load_id=load_id,
            pinned=pinned,
            slot=slot,
            left=left,
            pages=len(kv_entries) * host.pages(Kind.KV) + host.pages(Kind.STATE),
            match=loaded,
            payloads=payloads,
        )
        return live

    # -- end -----------------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, *, kept: bool) -> None:
        """The request needs its load, if any, no more: what was loaded stays on the device if it shall be ``kept``.

        A preempted request that never started keeps what it had left.
        """
        load, host = live.load, self._host
        if load is None:
            return
        assert host is not None
        if not load.admitted:
            self._stats.count_fallback("host_load_given_up")
        live.load = None
        del self._requests[load.load_id]
        blocks = load.match.resume_tokens // self._block_tokens
        node = live.path[blocks - 1] if kept and load.left is None and blocks <= len(live.path) else None
        if node is not None and node.slot == NO_SLOT and node.host_slot != NO_SLOT:
            self._store.restore_state(node, load.slot)
        else:
            self._slots.abandon(load.slot)
        if kept:
            host.use(live.path[:blocks])
        if load.left is not None and not load.admitted:
            self._left[live.request_id] = load.left
            return
        host.unpin(load.pinned)
        for entry in load.private:
            host.free_private(entry)

    def fail(self, live: LiveRequest) -> None:
        """What was loaded is not what had been stored: its entries are not used again."""
        load, host = live.load, self._host
        assert load is not None and host is not None
        self._stats.count_fallback("host_load_failed")
        self.end(live, kept=False)
        for entry in load.pinned:
            host.drop(entry)

    # -- what preempted requests leave ---------------------------------------------------------------------------------

    def leave(self, live: LiveRequest, depth_tokens: int, live_slot: int) -> bool:
        """What the request has computed is kept on the host until it goes on, or it is dropped.

        Args:
            live: About to be released.
            depth_tokens: Tokens that it has computed.
            live_slot: Where the state after them is.

        Returns:
            Whether there was room for all of it; otherwise nothing changed.
        """
        host = self._host
        blocks = -(-depth_tokens // self._block_tokens)
        if host is None or not live.write or live.plans or blocks > len(live.block_ids):
            return False
        name, epoch = f"request {live.request_id}".encode(), self._store.epoch
        pinned: list[int] = []
        private: list[int] = []

        def keep(kind: Kind, device_id: int) -> bool:
            tag = Tag(kind=kind, key=name, depth_tokens=depth_tokens, epoch=epoch)
            entry = host.store_private(kind, device_id, tag)
            if entry is not None:
                private.append(entry)
            return entry is not None

        def keep_node(node: Node) -> bool:
            stored = host.store_kv(node, epoch)
            if stored:
                pinned.append(node.host_block)
                host.pin(pinned[-1:])
            return stored

        own_blocks = live.block_ids[len(live.path) : blocks]
        kept = (
            keep(Kind.STATE, live_slot)
            and all(keep(Kind.KV, block_id) for block_id in own_blocks)
            and all(keep_node(node) for node in reversed(live.path))
        )
        if not kept:
            host.unpin(pinned)
            for entry in private:
                host.free_private(entry)
            return False
        self.drop(live.request_id)
        self._left[live.request_id] = Retracted(
            depth_tokens=depth_tokens,
            path=tuple(live.path),
            pinned=tuple(reversed(pinned)),
            kv_entries=tuple(private[1:]),
            state_entry=private[0],
        )
        self._stats.host_preempted += 1
        return True

    def drop(self, request_id: int) -> None:
        """What the request left, if anything, is not needed any more."""
        left = self._left.pop(request_id, None)
        if left is not None:
            assert self._host is not None
            self._host.unpin(left.pinned)
            for entry in left.private:
                self._host.free_private(entry)

    # -- all -----------------------------------------------------------------------------------------------------------

    def invalidate(self, requests: Iterable[LiveRequest]) -> None:
        """All that is on the host is about to go; loads of admitted ``requests`` have nothing there any more."""
        self._left.clear()
        for live in requests:
            if live.load is not None:
                live.load.pinned, live.load.left = (), None

    def reset(self) -> None:
        """Forgets everything."""
        self._requests.clear()
        self._left.clear()


def _split_by_device(path: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """The front of the path, whose KV is on the device, and the rest."""
    count = len(path)
    while count and path[count - 1].block_id == NO_BLOCK:
        count -= 1
    return path[:count], path[count:]
