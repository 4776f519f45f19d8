"""`HostTier`: which KV blocks and states are on the host, in which pages, and which are evicted when pages are needed.

Nodes of the prefix tree say where their copies are (``host_block``, ``host_slot``). KV blocks and states share one pool
of pages. When it is full, the next KV victim and the next state victim are compared, and the one unused for longer is
evicted. This file only decides: it queues the copies as `BlockTransfer`, and ``tiers/arena.py`` carries them out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.host_entries import HostEntries
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import TierBehind
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, Copy, EntryKind, Tag


def is_probationary(node: Node) -> bool:
    """Whether the node's state is an interval checkpoint that no request has resumed from."""
    return node.reason == CheckpointReason.INTERVAL and not node.used


class HostTier:
    """Index of the host tier.

    Args:
        tree: The prefix tree.
        pages: Pages of the arena, ids 0 .. pages - 1.
        kv_pages: Pages per KV block.
        state_pages: Pages per state.
        block_tokens: Tokens per block.
        eviction: Ranks the states on the host.
        state_share: Share of the pages that states may use, 0 to 1; KV uses the rest. None: both share all pages.
        stats: Counts the moves.
        write_through: Whether KV and states are stored as soon as they are published.
        behind: The tier behind the host. It is offered what is evicted here, or (a `SharedTier`) what is stored here.

    Attributes:
        entries: Pages and pins of all entries.
        transfers: Queued copies, to be carried out in this order.
        routing_of: Returns the routing of a KV block on the device, which is stored with the block; None if it has
            none.
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        pages: int,
        kv_pages: int,
        state_pages: int,
        block_tokens: int,
        eviction: EvictionPolicy[Node],
        stats: PrefixStats,
        state_share: float | None = None,
        write_through: bool = False,
        behind: TierBehind | None = None,
    ) -> None:
        self._tree = tree
        self.entries = HostEntries(pages, {EntryKind.KV: kv_pages, EntryKind.STATE: state_pages}, state_share)
        self._block_tokens = block_tokens
        self._eviction = eviction
        self._stats = stats
        self._figures = stats.tiers[HOST]
        self.write_through = write_through
        self.behind = behind
        self._early = behind is not None and behind.shared
        # Entries that are being read from behind. All ranks agree on which arrived, see `settle`.
        self._fetching: set[int] = set()
        self.transfers: list[Copy] = []
        self.routing_of: Callable[[int], Any] = lambda block_id: None
        self.reset()

    def reset(self) -> None:
        """Drops everything. The caller empties the tree.

        Queued copies stay: live requests may need what moves on the device. Only offers to the tier behind are dropped.
        """
        self.entries.reset()
        self._kv: OrderedDict[Node, int] = OrderedDict()  # time of last use, least recently used first
        self._state_used: dict[Node, int] = {}
        self._clock = 0
        self._fetching.clear()
        self._eviction.clear()
        if self.behind is not None:
            name = self.behind.name
            self.transfers[:] = [
                copy for copy in self.transfers if not isinstance(copy, BlockTransfer) or copy.target != name
            ]

    # -- depth ---------------------------------------------------------------------------------------------------------

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`."""
        get = self._tree.get
        for key in keys[first:] if first else keys:
            node = get(key)
            if node is None or node.host_block == NO_BLOCK:
                break
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`."""
        get = self._tree.get
        while limit > after:
            node = get(keys[limit - 1])
            if node is not None and node.host_slot != NO_SLOT:
                break
            limit -= 1
        return max(after, limit)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def store_kv(self, node: Node) -> bool:
        """Stores the node's KV block, before it leaves the device. Returns False if there is no room."""
        if node.host_block == NO_BLOCK:
            entry = self._store(EntryKind.KV, node.block_id, self._tag(EntryKind.KV, node))
            if entry is None:
                return False
            node.host_block = entry
            self._tree.version += 1
        self.entries.keep_payload(node.host_block, self.routing_of(node.block_id))
        self._touch_kv(node)
        return True

    def store_state(self, node: Node) -> bool:
        """Stores the node's state, before it leaves the device. Returns False if there is no room.

        A probationary state only gets free pages, or pages of other probationary states.
        """
        is_new = node.host_slot == NO_SLOT
        if is_new:
            entry = self._store(
                EntryKind.STATE, node.slot, self._tag(EntryKind.STATE, node), probationary=is_probationary(node)
            )
            if entry is None:
                return False
            node.host_slot = entry
            self._eviction.added(node)
            self._tree.version += 1
            if node.used:
                self._eviction.used(node)
        self._state_used[node] = self._tick()
        if is_new:
            self._write_down(node)
        return True

    def store_answer(self, node: Node) -> None:
        """A request ended, and this is the last state of its answer. The next turn of the conversation resumes from it.

        A shared tier gets it if it saves a load's worth of tokens beyond the state before it.
        """
        if self.behind is None or not self._early or node.private or node.host_slot != NO_SLOT:
            return
        before = node.parent
        while before is not None and (before.host_slot == NO_SLOT or is_probationary(before)):
            before = before.parent
        saved_blocks = node.depth_blocks - (0 if before is None else before.depth_blocks)
        if saved_blocks >= self.behind.least_blocks:
            self.store_state(node)

    def stores_published(self, reason: CheckpointReason) -> bool:
        """Whether a state that was just computed is stored at once, not only when the device evicts it.

        A decode state is not: it is copied to its slot later, and soon replaced by the next one. See `store_answer`.
        """
        if reason == CheckpointReason.DECODE:
            return False
        return self.write_through or (self._early and reason != CheckpointReason.INTERVAL)

    def store_private(self, kind: EntryKind, device_id: int, tag: Tag) -> int | None:
        """Stores an entry of one preempted request until it is removed. Returns the entry; None if there is no room."""
        entry = self._store(kind, device_id, tag)
        if entry is not None:
            self.entries.make_private(entry)
            if kind == EntryKind.KV:
                self.entries.keep_payload(entry, self.routing_of(device_id))
        return entry

    # -- from the tier behind ------------------------------------------------------------------------------------------

    def gather(self, keys: Sequence[bytes], first: int) -> tuple[tuple[int, ...], tuple[Tag, ...]] | None:
        """Pins the KV of ``keys[first:]`` and the state at their end on the host. Fetches what only the tier behind
        has.

        Args:
            keys: Keys of the first blocks of a prompt. The KV of each is in some tier, and so is the state at the end.
            first: Number of leading blocks that are on the device.

        Returns:
            The pinned entries (KV front first, the state last), and the tags of those that were fetched, now or for a
            load that still waits for them. None: there is not enough room. What was fetched until then stays on the host.
        """
        tree = self._tree
        nodes: list[Node] = []
        for key in keys:
            nodes.append(tree.get(key) or tree.insert(key, nodes[-1] if nodes else None, NO_BLOCK))
        kv, end = nodes[first:], nodes[-1]
        pinned = [node.host_block for node in kv if node.host_block != NO_BLOCK]
        pinned += [end.host_slot] if end.host_slot != NO_SLOT else []
        self.entries.pin(pinned)
        coming = [entry for entry in pinned if entry in self._fetching]
        fetched: list[int] = []
        missing = [(node, self._fetch_kv) for node in kv if node.host_block == NO_BLOCK]
        missing += [(end, self._fetch_state)] if end.host_slot == NO_SLOT else []
        for node, fetch in missing:
            entry = fetch(node)
            if entry is None:
                self.entries.unpin([*pinned, *fetched])
                tree.prune(end)
                return None
            self.entries.pin([entry])
            fetched.append(entry)
        if fetched:
            self.use(kv)
        return (*(node.host_block for node in kv), end.host_slot), tuple(map(self.entries.tag, [*coming, *fetched]))

    def settle(self, entries: Iterable[int]) -> None:
        """These entries have arrived, on all ranks."""
        self._fetching.difference_update(entries)

    def _fetch_kv(self, node: Node) -> int | None:
        entry = self._fetch(EntryKind.KV, node)
        if entry is not None:
            node.host_block = entry
            self._touch_kv(node)
            self._tree.version += 1
        return entry

    def _fetch_state(self, node: Node) -> int | None:
        entry = self._fetch(EntryKind.STATE, node)
        if entry is not None:
            node.host_slot = entry
            if node.reason is None:
                # The tier behind does not store the reason. Two prompts share this state now.
                node.reason = CheckpointReason.JUNCTION
            self._eviction.added(node)
            self._state_used[node] = self._tick()
            self._tree.version += 1
        return entry

    # -- back to the device --------------------------------------------------------------------------------------------

    def load(self, entry: int, device_id: int, load_id: int) -> Any:
        """Queues the copy of a pinned entry into a block or slot. Returns the entry's payload."""
        self.transfers.append(
            BlockTransfer(
                source=HOST,
                target=DEVICE,
                device_id=device_id,
                pages=self.entries.pages(entry),
                tag=self.entries.tag(entry),
                load_id=load_id,
            )
        )
        self._figures.loads += 1
        return self.entries.payload(entry)

    def use(self, path: Iterable[Node]) -> None:
        """Marks the KV of this path as used. Later its deepest block is evicted first."""
        for node in reversed(list(path)):
            self._touch_kv(node)

    def use_state(self, node: Node) -> None:
        """Marks the node's state as used, after a request resumed from it on any tier."""
        if self._early and node.host_slot == NO_SLOT and node.slot != NO_SLOT:
            self.store_state(node)  # it was a guess
        if node.host_slot != NO_SLOT:
            self._eviction.used(node)
            self._state_used[node] = self._tick()

    # -- drop ----------------------------------------------------------------------------------------------------------

    def drop_kv(self, node: Node) -> None:
        """Drops the node's KV from the host."""
        entry, node.host_block = node.host_block, NO_BLOCK
        del self._kv[node]
        self.entries.remove(entry)
        self._tree.prune(node)

    def drop_state(self, node: Node) -> None:
        """Drops the node's state from the host."""
        entry = node.host_slot
        self._eviction.removed(node)
        del self._state_used[node]
        self._tree.drop_host_state(node)
        self.entries.remove(entry)
        self._tree.prune(node)

    def drop(self, entry: int) -> None:
        """Drops an entry whose load failed. Does nothing if it is gone."""
        if entry not in self.entries:
            return
        tag = self.entries.tag(entry)
        node = self._tree.get(tag.key)
        if node is None:
            return
        self._fetching.discard(entry)
        if tag.kind == EntryKind.KV and node.host_block == entry:
            self.drop_kv(node)
        elif tag.kind == EntryKind.STATE and node.host_slot == entry:
            self.drop_state(node)

    @property
    def kv_entries(self) -> int:
        """Number of KV blocks on the host."""
        return len(self._kv)

    @property
    def state_entries(self) -> int:
        """Number of states on the host."""
        return len(self._state_used)

    def check(self) -> None:
        """Checks that tree, eviction policy and entries agree.

        Raises:
            CacheCorruptionError: They do not.
        """
        kv = {node.host_block: node for node in self._tree if node.host_block != NO_BLOCK}
        states = {node.host_slot: node for node in self._tree if node.host_slot != NO_SLOT}
        self.entries.check([*kv, *states])
        if set(self._kv) != set(kv.values()) or set(self._state_used) != set(states.values()):
            raise CacheCorruptionError("an entry on the host is missing from the eviction order")
        if set(self._eviction) != set(states.values()):
            raise CacheCorruptionError("the eviction policy and the states on the host differ")
        for nodes, kind in ((kv, EntryKind.KV), (states, EntryKind.STATE)):
            for entry, node in nodes.items():
                tag = self.entries.tag(entry)
                if (tag.kind, tag.key, tag.depth_tokens) != (kind, node.key, node.depth_blocks * self._block_tokens):
                    raise CacheCorruptionError(f"{node}: its entry on the host has the tag {tag}")

    # -- internal ------------------------------------------------------------------------------------------------------

    def _tag(self, kind: EntryKind, node: Node) -> Tag:
        return Tag(
            kind=kind,
            key=node.key,
            depth_tokens=node.depth_blocks * self._block_tokens,
            epoch=self._tree.epoch,
            parent=b"" if node.parent is None else node.parent.key,
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch_kv(self, node: Node) -> None:
        if node.host_block != NO_BLOCK:
            self._kv[node] = self._tick()
            self._kv.move_to_end(node)

    def _store(self, kind: EntryKind, device_id: int, tag: Tag, *, probationary: bool = False) -> int | None:
        entry = self._new_entry(kind, tag, probationary=probationary)
        if entry is not None:
            self.transfers.append(
                BlockTransfer(source=DEVICE, target=HOST, device_id=device_id, pages=self.entries.pages(entry), tag=tag)
            )
            self._figures.stores += 1
        return entry

    def _fetch(self, kind: EntryKind, node: Node) -> int | None:
        assert self.behind is not None
        tag = self._tag(kind, node)
        entry = self._new_entry(kind, tag)
        if entry is not None:
            pages = self.entries.pages(entry)
            self.transfers.append(BlockTransfer(source=self.behind.name, target=HOST, pages=pages, tag=tag))
            if self.behind.shared:
                self._fetching.add(entry)
            self._stats.tiers[self.behind.name].loads += 1
        return entry

    def _write_down(self, node: Node) -> None:
        """Offers a state that was just stored, after the KV before it, to a shared tier.

        What is on the host depends on nothing that differs between ranks. So KV is stored here even if it is behind.
        """
        if self.behind is None or not self._early:
            return
        if node.private or is_probationary(node) or node.depth_blocks < self.behind.least_blocks:
            return
        path: list[Node] = []
        above: Node | None = node
        while above is not None:
            path.append(above)
            above = above.parent
        for block in reversed(path):
            if block.host_block != NO_BLOCK or (block.block_id != NO_BLOCK and self.store_kv(block)):
                self._offer(block.host_block)
        if node.host_slot != NO_SLOT:  # the KV may have taken its place
            self._offer(node.host_slot)

    def _offer(self, entry: int) -> None:
        """Offers an entry to the tier behind.

        A KV block with a payload is not offered, because the payload cannot go with it.
        """
        tag = self.entries.tag(entry)
        if self.behind is None or self.entries.payload(entry) is not None or self.behind.contains(tag.kind, tag.key):
            return
        pages = self.entries.pages(entry)
        self.transfers.append(BlockTransfer(source=HOST, target=self.behind.name, pages=pages, tag=tag))
        self._stats.tiers[self.behind.name].stores += 1

    def _new_entry(self, kind: EntryKind, tag: Tag, *, probationary: bool = False) -> int | None:
        if not self._make_room(kind, probationary=probationary):
            self._figures.full += not probationary
            return None
        return self.entries.add(tag)

    def _make_room(self, kind: EntryKind, *, probationary: bool) -> bool:
        is_pinned = self.entries.is_pinned
        while not self.entries.has_room(kind):
            state = self._eviction.victim(lambda node: not is_pinned(node.host_slot), probationary_only=probationary)
            kv = None if probationary else next((node for node in self._kv if not is_pinned(node.host_block)), None)
            if self.entries.are_divided:
                kv, state = (kv, None) if kind == EntryKind.KV else (None, state)
            if state is not None and (kv is None or is_probationary(state) or self._state_used[state] < self._kv[kv]):
                if not self._early:
                    self._offer(state.host_slot)
                self.drop_state(state)
            elif kv is not None:
                if not self._early:
                    self._offer(kv.host_block)
                self.drop_kv(kv)
            else:
                return False
            self._figures.evictions += 1
        return True
