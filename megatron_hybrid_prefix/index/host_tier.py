"""`HostTier`: which KV blocks and states are on the host, and how they get there and back.

KV blocks and states share one pool of pages. ``policy/needs.py`` says which go first when pages are needed.
This file only decides: it queues the copies as `BlockTransfer`, and ``transfers/mover.py`` carries them out.

A state stays on the host only while its KV is on the host or on the device. A state that is worth less than all that is
stored is not stored, unless there is a tier below, to which it gets through the host. KV that no state on the host needs only gets
free pages, or those of other unneeded KV.

This file is longer than 400 lines because what is stored, loaded and dropped changes the same counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.host_entries import HostEntries
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import is_guess
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, BlockTransfer, Copy, EntryKind, Tag


class HostTier:
    """Index of the host tier.

    Args:
        tree: The prefix tree.
        settings: Those of the cache.
        eviction: Ranks the states on the host.
        stats: Counts the moves.

    Attributes:
        entries: All entries, and what goes first.
        behind: The tier below the host, or None. It is offered the entries that are stored here.
        transfers: Queued copies, to be carried out in this order.
    """

    def __init__(
        self, tree: PrefixTree, settings: CacheSettings, eviction: EvictionPolicy[Node], stats: PrefixStats
    ) -> None:
        self._tree, self._stats, self._figures = tree, stats, stats.tiers[HOST]
        pages_of = {EntryKind.KV: settings.host_kv_pages, EntryKind.STATE: settings.host_state_pages}
        self.entries = HostEntries(settings.host_pages, pages_of, eviction)
        self._block_tokens = settings.block_tokens
        self._routing_of = settings.routing_of or (lambda block_id: None)
        self.behind = settings.behind
        # Entries that are being read from the tier below. All ranks agree on which arrived, see `settle`.
        self._fetching: set[int] = set()
        self.transfers: list[Copy] = []
        self.reset()

    def reset(self) -> None:
        """Drops everything. The caller empties the tree.

        Queued copies stay: live requests may need what moves on the device. Only offers to the tier below are dropped.
        """
        self.entries.reset()
        self._fetching.clear()
        self.transfers[:] = [
            copy for copy in self.transfers if not isinstance(copy, BlockTransfer) or copy.target != SHARED
        ]

    # -- depth ---------------------------------------------------------------------------------------------------------

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        get = self._tree.get
        for key in keys[first:] if first else keys:
            node = get(key)
            if node is None or node.host_block == NO_BLOCK:
                break
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        get = self._tree.get
        while limit > after:
            node = get(keys[limit - 1])
            if node is not None and node.host_slot != NO_SLOT:
                break
            limit -= 1
        return max(after, limit)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def store_kv(self, node: Node, *, forced: bool = False) -> bool:
        """Stores the node's KV block, before it leaves the device.

        Args:
            node: Its KV is on the device.
            forced: Store it even if no state on the host needs it.

        Returns:
            False if there is no room, or not for KV that no state needs.
        """
        if node.host_block == NO_BLOCK:
            # States go for it only until those that need it have gone.
            if not self._make_room(
                EntryKind.KV, lambda: (forced or node in self.entries.users) and self._evict_state()
            ):
                if not forced and node.host_slot != NO_SLOT and not self.entries.is_pinned(node, kv=False):
                    self.drop_state(node)  # it cannot be reached without its KV
                return False
            self._put_kv(node, self._store(node.block_id, self._tag(EntryKind.KV, node)))
        elif node in self.entries.users and not forced:
            self.entries.drop_kv(node)  # the only copy soon
        payload = self._routing_of(node.block_id)
        if payload is not None:
            self.entries[node.host_block].payload = payload
        return True

    def store_state(self, node: Node) -> bool:
        """Stores the node's state, before it leaves the device.

        Args:
            node: Its state is on the device.

        Returns:
            False if it is a guess, or if all that is stored is worth more.
        """
        if node.host_slot != NO_SLOT:
            return True
        if is_guess(node):
            return False
        # First, so that its value is compared with the others', and its KV is not evicted for it.
        self.entries.add_state(node)
        if node.used:
            self.entries.use_state(node)
        incoming = node if self.behind is None else None  # the way to the tier below is through the host
        if not self._make_room(EntryKind.STATE, lambda: self._evict_state(incoming)):
            self.entries.drop_state(node)
            return False
        self._put_state(node, self._store(node.slot, self._tag(EntryKind.STATE, node)))
        self._write_down(node)
        return True

    def also_on_device(self, path: Sequence[Node]) -> None:
        """The device has the KV of this path now. The host can lose its copies, the deepest block first."""
        for node in reversed(path):
            if node.host_block != NO_BLOCK:
                self.entries.note_kv(node)

    def state_also_on_device(self, node: Node) -> None:
        """The device has the node's state now."""
        if node.host_slot != NO_SLOT:
            self.entries.note_copy(node)

    def store_answer(self, node: Node) -> None:
        """A request ended, and this is the last state of its answer. The next turn of the conversation resumes from it.

        The tier below gets it if it saves a load's worth of tokens beyond the state before it.
        """
        if self.behind is None or node.private or node.host_slot != NO_SLOT:
            return
        before = node.parent
        while before is not None and before.host_slot == NO_SLOT:
            before = before.parent
        saved_blocks = node.depth_blocks - (0 if before is None else before.depth_blocks)
        if saved_blocks >= self.behind.least_blocks:
            self.store_state(node)
            self.state_also_on_device(node)

    def stores_published(self, reason: CheckpointReason) -> bool:
        """Whether a state that was just computed is stored at once, for the tier below, not only when the device evicts it.

        A decode state is not: it is copied to its slot later, and soon replaced by the next one. See `store_answer`.
        """
        return self.behind is not None and reason not in (CheckpointReason.DECODE, CheckpointReason.INTERVAL)

    def store_private(self, kind: EntryKind, device_id: int, tag: Tag) -> int | None:
        """Stores an entry of one preempted request until it is removed. Returns the entry; None if there is no room."""
        if not self._make_room(kind):
            return None
        entry = self._store(device_id, tag)
        self.entries.private.add(entry)
        if kind == EntryKind.KV:
            self.entries[entry].payload = self._routing_of(device_id)
        return entry

    # -- from the tier below ------------------------------------------------------------------------------------------

    def gather(self, keys: Sequence[bytes], first: int) -> tuple[int, ...] | None:
        """Pins the KV of ``keys[first:]`` and the state at their end on the host. Fetches what only the tier below
        has.

        Args:
            keys: Keys of the first blocks of a prompt. The KV of each is in some tier, and so is the state at the end.
            first: Number of leading blocks that are on the device.

        Returns:
            The pinned entries, KV front first, the state last. None: there is not enough room. What was fetched until then
            stays on the host.
        """
        tree = self._tree
        nodes: list[Node] = []
        for key in keys:
            nodes.append(tree.get(key) or tree.insert(key, nodes[-1] if nodes else None, NO_BLOCK))
        kv, end = nodes[first:], nodes[-1]
        pinned = [node.host_block for node in kv if node.host_block != NO_BLOCK]
        pinned += [end.host_slot] if end.host_slot != NO_SLOT else []
        self.entries.pin(pinned)
        fetched: list[int] = []
        missing = [(EntryKind.KV, node) for node in kv if node.host_block == NO_BLOCK]
        missing += [(EntryKind.STATE, end)] if end.host_slot == NO_SLOT else []
        end.children += 1  # what is evicted for room may be the last below the path, which must stay in the tree
        for kind, node in missing:
            entry = self._fetch(kind, node)
            if entry is None:
                break
            self.entries.pin([entry])
            fetched.append(entry)
        end.children -= 1
        if len(fetched) < len(missing):
            self.entries.unpin([*pinned, *fetched])
            tree.prune(end)
            return None
        return (*(node.host_block for node in kv), end.host_slot)

    def coming(self, entries: Iterable[int]) -> tuple[int, ...]:
        """Those of these entries that are being read from the tier below."""
        return tuple(entry for entry in entries if entry in self._fetching)

    def settle(self, entries: Iterable[int]) -> None:
        """These entries have arrived, on all ranks."""
        self._fetching.difference_update(entries)

    def _fetch(self, kind: EntryKind, node: Node) -> int | None:
        """Allocates an entry, and queues its read from the tier below. None: there is no room."""
        if not self._make_room(kind):
            return None
        tag = self._tag(kind, node)
        entry = self.entries.add(tag)
        self.transfers.append(BlockTransfer(SHARED, HOST, self.entries[entry].pages, tag))
        self._fetching.add(entry)
        self._stats.tiers[SHARED].loads += 1
        if kind == EntryKind.KV:
            self._put_kv(node, entry)
            return entry
        if node.reason is None:
            # The tier below does not store the reason. Two prompts share this state now.
            node.reason = CheckpointReason.JUNCTION
        self.entries.add_state(node)
        self._put_state(node, entry)
        return entry

    # -- back to the device --------------------------------------------------------------------------------------------

    def load(self, entry: int, device_id: int, load_id: int) -> Any:
        """Queues the copy of a pinned entry into a block or slot. Returns the entry's payload."""
        stored = self.entries[entry]
        self.transfers.append(BlockTransfer(HOST, DEVICE, stored.pages, stored.tag, device_id, load_id))
        self._figures.loads += 1
        return stored.payload

    def use_state(self, node: Node) -> None:
        """Marks the node's state as used, after a request resumed from it on any tier."""
        if self.behind is not None and node.host_slot == NO_SLOT and node.slot != NO_SLOT and not is_guess(node):
            self.store_state(node)  # it was a guess
            self.state_also_on_device(node)
        if node.host_slot != NO_SLOT:
            self.entries.use_state(node)

    # -- drop ----------------------------------------------------------------------------------------------------------

    def drop_kv(self, node: Node) -> None:
        """Drops the node's KV from the host, and with it a state at its end that no request can reach then."""
        entry, node.host_block = node.host_block, NO_BLOCK
        self.entries.drop_kv(node)
        self.entries.remove(entry)
        if node.host_slot != NO_SLOT and node.block_id == NO_BLOCK and not self.entries.is_pinned(node, kv=False):
            self.drop_state(node)
        else:
            self._tree.prune(node)

    def drop_state(self, node: Node) -> None:
        """Drops the node's state from the host. KV that only it needed is unneeded then."""
        entry = node.host_slot
        self.entries.drop_state(node)
        self._tree.drop_host_state(node)
        self.entries.remove(entry)
        self._tree.prune(node)

    def take_back(self, keys: Collection[bytes]) -> None:
        """Takes back what was offered to the tier below under these keys since the last copies were taken."""
        self.transfers[:] = [
            copy
            for copy in self.transfers
            if not (isinstance(copy, BlockTransfer) and copy.target == SHARED and copy.tag.key in keys)
        ]

    def drop(self, entry: int) -> None:
        """Drops an entry whose load failed. Does nothing if it is gone."""
        if entry not in self.entries:
            return
        tag = self.entries[entry].tag
        node = self._tree.get(tag.key)
        if node is None:
            return
        self._fetching.discard(entry)
        if tag.kind == EntryKind.KV and node.host_block == entry:
            self.drop_kv(node)
        elif tag.kind == EntryKind.STATE and node.host_slot == entry:
            self.drop_state(node)

    def check(self) -> None:
        """Checks that tree, eviction policy and entries agree. Raises CacheCorruptionError if not."""
        kv = {node.host_block: node for node in self._tree if node.host_block != NO_BLOCK}
        states = {node.host_slot: node for node in self._tree if node.host_slot != NO_SLOT}
        self.entries.check([*kv, *states])
        self.entries.check_needs(self._tree)
        if self.entries.states != set(states.values()):
            raise CacheCorruptionError("the states on the host and those that are counted differ")
        for nodes, kind in ((kv, EntryKind.KV), (states, EntryKind.STATE)):
            for entry, node in nodes.items():
                tag = self.entries[entry].tag
                if (tag.kind, tag.key, tag.depth_tokens) != (kind, node.key, node.depth_blocks * self._block_tokens):
                    raise CacheCorruptionError(f"{node}: its entry on the host has the tag {tag}")

    # -- internal ------------------------------------------------------------------------------------------------------

    def _tag(self, kind: EntryKind, node: Node) -> Tag:
        parent = b"" if node.parent is None else node.parent.key
        return Tag(kind, node.key, node.depth_blocks * self._block_tokens, self._tree.epoch, parent)

    def _put_kv(self, node: Node, entry: int) -> None:
        node.host_block = entry
        if node not in self.entries.users:  # else it is about to leave the device, or `also_on_device` follows
            self.entries.note_kv(node)
        self._tree.version += 1

    def _put_state(self, node: Node, entry: int) -> None:
        """The entry has the node's state, which is counted already."""
        node.host_slot = entry
        self._tree.version += 1

    def _store(self, device_id: int, tag: Tag) -> int:
        entry = self.entries.add(tag)
        self.transfers.append(BlockTransfer(DEVICE, HOST, self.entries[entry].pages, tag, device_id))
        self._figures.stores += 1
        return entry

    def _write_down(self, node: Node) -> None:
        """Offers a state that was just stored, after the KV before it, to the tier below.

        The host's entries depend on nothing that differs between ranks. So KV is stored here even if the tier below has it.
        """
        if self.behind is None or node.private or node.depth_blocks < self.behind.least_blocks:
            return
        path: list[Node] = []
        above: Node | None = node
        while above is not None:
            path.append(above)
            above = above.parent
        state = [node.host_slot]
        self.entries.pin(state)  # its KV must not take its place
        for block in reversed(path):
            if block.host_block != NO_BLOCK or (block.block_id != NO_BLOCK and self.store_kv(block)):
                self._offer(block.host_block)
        self.also_on_device([block for block in reversed(path) if block.block_id != NO_BLOCK])
        self.entries.unpin(state)
        self._offer(node.host_slot)

    def _offer(self, entry: int) -> None:
        """Offers an entry to the tier below.

        A KV block with a payload is not offered, because the payload cannot go with it.
        """
        stored = self.entries[entry]
        if self.behind is None or stored.payload is not None or self.behind.contains(stored.tag.kind, stored.tag.key):
            return
        self.transfers.append(BlockTransfer(HOST, SHARED, stored.pages, stored.tag))
        self._stats.tiers[SHARED].stores += 1

    # -- what is evicted -----------------------------------------------------------------------------------------------

    def _make_room(self, kind: EntryKind, evict_state: Callable[[], bool] | None = None) -> bool:
        """Evicts until an entry fits: unneeded KV, then states. False: all that is left is pinned, or worth more.

        Args:
            kind: Of the entry.
            evict_state: Evicts one of the states that may go for it. None: any.
        """
        while not self.entries.has_room(kind):
            if not self._evict_kv() and not (evict_state or self._evict_state)():
                return False
        return True

    def _evict_kv(self) -> bool:
        """Evicts an unneeded KV block. False: there is none."""
        found = self.entries.next_kv()
        if found is None:
            return False
        self.drop_kv(found)
        self._figures.evictions += 1
        return True

    def _evict_state(self, incoming: Node | None = None) -> bool:
        """Evicts a state.

        Args:
            incoming: A state that is to be stored.

        Returns:
            False if there is none to evict, or if the one to evict is ``incoming``.
        """
        state = self.entries.next_state(lambda node: node is incoming or node.host_slot != NO_SLOT)
        if state is None or state is incoming:
            self._figures.full += 1
            return False
        self.drop_state(state)
        self._figures.evictions += 1
        return True
