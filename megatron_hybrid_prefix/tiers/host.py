"""`HostTier`: the tier below the device. Which KV blocks and states are on the host, and how they get there and back.

KV blocks and states share one pool of pages. ``policy/needs.py`` says which go first when pages are needed.
This file only decides: it queues the copies as `BlockTransfer`, and the mover carries them out.

A state stays on the host only while its KV is on the host or on the device. A state that is worth less than all that is
stored is not stored, unless there is a tier below, to which it gets through the host. KV that no state on the host needs only gets
free pages, or those of other unneeded KV.

This file is longer than 400 lines because what is stored, loaded and dropped changes the same counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import TierIndex, is_guess
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.behind import END_OF_CHAIN
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, BlockTransfer, Copy, EntryKind, Tag


@dataclass(slots=True, eq=False)
class HostEntry:
    """A KV block or a state on the host.

    Attributes:
        tag: Name of its content.
        pages: Its pages, in the order of the bytes; none: it has left the host.
        pins: Loads and preempted requests that need it.
        is_coming: It is being read from the tier below. All ranks agree on whether it has arrived (`Loads.end_fetch`).
    """

    tag: Tag
    pages: tuple[int, ...]
    pins: int = 0
    is_coming: bool = False

    @property
    def read(self) -> BlockTransfer:
        """The transfer that brings it from the tier below."""
        return BlockTransfer(SHARED, HOST, self.pages, self.tag)


def host_pages_of(settings: CacheSettings) -> dict[EntryKind, int]:
    """Pages of an entry by kind."""
    sizes = settings.host_state_pages
    live, kept = (sizes, sizes) if isinstance(sizes, int) else sizes
    return {EntryKind.KV: settings.host_kv_pages, EntryKind.STATE: kept, EntryKind.LIVE: live}


class HostTier(TierIndex[Node]):
    """Entries on the host, in pages ``0 .. host_pages - 1``. Without pages it ends the chain: it has nothing and takes nothing.

    Args:
        tree: The prefix tree.
        settings: Those of the cache.
        eviction: Ranks the states on the host.
        stats: Counts the moves.
        copies: Copies are queued here, to be carried out in this order.

    Attributes:
        total_pages, pages_of: Number of pages, and pages of an entry by kind.
        free: Free pages. Freed ones are used last: a load that was given up may still be read into them.
        kv: Entries of KV blocks, by node.
        of_states: Entries of states, by node.
        private: Entries of no node: each belongs to one preempted request.
        on_both: States that the device has, too, longest ago first.
        behind: The tier below. It is offered the entries that are stored here.
        page_tokens: Tokens that are computed in the time in which a page is loaded. A load that saves less than it costs is not
            begun. The same on all ranks, and a power of two; 0: every load is worth it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        settings: CacheSettings,
        eviction: EvictionPolicy[Node],
        stats: PrefixStats,
        copies: list[Copy],
    ) -> None:
        super().__init__(eviction)
        self._tree, self._stats, self._figures, self._copies = tree, stats, stats.tiers[HOST], copies
        self.total_pages = settings.host_pages
        self.pages_of = host_pages_of(settings)
        self._block_tokens = settings.block_tokens
        self.behind = settings.behind or END_OF_CHAIN
        self.page_tokens = 0.0
        self.kv: dict[Node, HostEntry] = {}
        self.of_states: dict[Node, HostEntry] = {}
        self.private: set[HostEntry] = set()
        self.on_both: OrderedDict[Node, None] = OrderedDict()
        self.reset()

    def reset(self) -> None:
        """Drops everything, even pinned entries. The caller empties the tree.

        Queued copies stay: live requests may need what moves on the device. Only offers to the tier below are dropped.
        """
        self.clear()
        self.on_both.clear()
        for entry in self.entries():
            entry.pages = ()
        for entries in (self.kv, self.of_states, self.private):
            entries.clear()
        self.free = deque(range(self.total_pages))
        self.take_back()

    def entries(self) -> list[HostEntry]:
        """All entries."""
        return [*self.kv.values(), *self.of_states.values(), *self.private]

    # -- find ----------------------------------------------------------------------------------------------------------

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        get, kv = self._tree.get, self.kv
        for key in keys[first:] if first else keys:
            if get(key) not in kv:
                break
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        get, states = self._tree.get, self.of_states
        while limit > after and get(keys[limit - 1]) not in states:
            limit -= 1
        return max(after, limit)

    def is_worth_loading(self, kv_blocks: int, saved_tokens: int) -> bool:
        """Whether so many KV blocks and a state take less time to load than these tokens to compute."""
        pages = self.pages_of[EntryKind.STATE] + kv_blocks * self.pages_of[EntryKind.KV]
        return saved_tokens >= pages * self.page_tokens

    # -- to the host ---------------------------------------------------------------------------------------------------

    def store_kv(self, node: Node, *, forced: bool = False) -> bool:
        """Stores the node's KV block, before it leaves the device.

        Args:
            node: Its KV is on the device.
            forced: Store it even if no state on the host needs it.

        Returns:
            False if there is no room, or not for KV that no state needs.
        """
        if not self.total_pages:
            return False
        entry = self.kv.get(node)
        if entry is None:
            # States go for it only until those that need it have gone.
            if not self._make_room(EntryKind.KV, lambda: (forced or node in self.users) and self._evict_state()):
                if not forced and node in self.of_states and not self.is_pinned(node, kv=False):
                    self.remove(EntryKind.STATE, node)  # it cannot be reached without its KV
                return False
            entry = self._put(node, self._store(node.block_id, self._tag(EntryKind.KV, node)))
        elif node in self.users and not forced:
            self.drop_kv(node)  # the only copy soon
        return True

    def store_state(self, node: Node) -> bool:
        """Stores the node's state, before it leaves the device.

        Args:
            node: Its state is on the device.

        Returns:
            False if it is a guess, or if all that is stored is worth more.
        """
        if node in self.of_states:
            return True
        if not self.total_pages or is_guess(node):
            return False
        # First, so that its value is compared with the others', and its KV is not evicted for it.
        self.add_state(node)
        if node.used:
            super().use_state(node)
        incoming = None if self.behind.takes else node  # the way to the tier below is through the host
        if not self._make_room(EntryKind.STATE, lambda: self._evict_state(incoming)):
            self.drop_state(node)
            return False
        self._put(node, self._store(node.slot, self._tag(EntryKind.STATE, node)))
        self._write_down(node)
        return True

    def also_on_device(self, path: Sequence[Node]) -> None:
        """The device has the KV of this path now. The host can lose its copies, the deepest block first."""
        if self.kv:
            for node in reversed(path):
                if node in self.kv:
                    self.note_kv(node)

    def state_also_on_device(self, node: Node) -> None:
        """The device has the node's state now."""
        if node in self.of_states:
            self.on_both[node] = None
            self.on_both.move_to_end(node)

    def store_answer(self, node: Node) -> None:
        """A request ended, and this is the last state of its answer. The next turn of the conversation resumes from it.

        The tier below gets it if it saves a load's worth of tokens beyond the state before it.
        """
        if not self.behind.takes or node.private or node in self.of_states:
            return
        before = node.parent
        while before is not None and before not in self.of_states:
            before = before.parent
        if node.depth_blocks - (0 if before is None else before.depth_blocks) >= self.behind.least_blocks:
            self._store_early(node)

    def state_published(self, node: Node, reason: CheckpointReason) -> None:
        """A state that was just computed is stored at once, for the tier below, not only when the device evicts it.

        A decode state is not: it is copied to its slot later, and soon replaced by the next one. See `store_answer`.
        """
        if self.behind.takes and reason not in (CheckpointReason.DECODE, CheckpointReason.INTERVAL):
            self._store_early(node)

    def _store_early(self, node: Node) -> None:
        self.store_state(node)
        self.state_also_on_device(node)

    def store_private(self, device_id: int, tag: Tag) -> HostEntry | None:
        """Stores an entry of one preempted request until it is removed. Returns the entry; None if there is no room."""
        if not self._make_room(tag.kind):
            return None
        entry = self._store(device_id, tag)
        self.private.add(entry)
        return entry

    # -- from the tier below ------------------------------------------------------------------------------------------

    def gather(self, keys: Sequence[bytes], first: int) -> tuple[HostEntry, ...] | None:
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
        end = nodes[-1]
        wanted = [*((EntryKind.KV, node) for node in nodes[first:]), (EntryKind.STATE, end)]
        pinned = [entry for kind, node in wanted if (entry := self._of(kind).get(node)) is not None]
        self.pin(pinned)
        end.refs += 1  # what is evicted for room may be the last below the path, which must stay in the tree
        for kind, node in wanted:
            if node not in self._of(kind):
                entry = self._fetch(kind, node)
                if entry is None:
                    break
                self.pin([entry])
                pinned.append(entry)
        end.refs -= 1
        if len(pinned) < len(wanted):
            self.unpin(pinned)
            tree.prune(end)
            return None
        return tuple(self._of(kind)[node] for kind, node in wanted)

    def _fetch(self, kind: EntryKind, node: Node) -> HostEntry | None:
        """Allocates an entry, and queues its read from the tier below. None: there is no room."""
        if not self._make_room(kind):
            return None
        entry = self._add(self._tag(kind, node))
        self._copies.append(entry.read)
        entry.is_coming = True
        self._stats.tiers[SHARED].loads += 1
        if kind == EntryKind.STATE:
            if node.reason is None:
                # The tier below does not store the reason. Two prompts share this state now.
                node.reason = CheckpointReason.JUNCTION
            self.add_state(node)
        return self._put(node, entry)

    # -- back to the device --------------------------------------------------------------------------------------------

    def load(self, entry: HostEntry, device_id: int, load_id: int) -> None:
        """Queues the copy of a pinned entry into a block or slot."""
        self._copies.append(BlockTransfer(HOST, DEVICE, entry.pages, entry.tag, device_id, load_id, entry.is_coming))
        self._figures.loads += 1

    def use_state(self, node: Node) -> None:
        """Marks the node's state as used, after a request resumed from it on any tier."""
        if self.behind.takes and node not in self.of_states and node.slot != NO_SLOT and not is_guess(node):
            self._store_early(node)  # it was a guess
        if node in self.of_states:
            super().use_state(node)

    def pin(self, entries: Iterable[HostEntry]) -> None:
        """Pins the entries. Each pin needs one `unpin`."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Iterable[HostEntry]) -> None:
        """Reverts one `pin` of each entry."""
        for entry in entries:
            entry.pins -= 1

    # -- drop ----------------------------------------------------------------------------------------------------------

    def remove(self, kind: EntryKind, node: Node) -> None:
        """Drops the node's KV or its state. With KV goes a state at its end that no request can reach then."""
        self._free_pages(self._of(kind).pop(node))
        node.refs -= 1
        if kind == EntryKind.KV:
            self.drop_kv(node)
            if node in self.of_states and node.block_id == NO_BLOCK and not self.is_pinned(node, kv=False):
                self.remove(EntryKind.STATE, node)
                return
        else:
            self.drop_state(node)
            if node.slot == NO_SLOT:
                self._tree.state_left(node)
        self._tree.prune(node)

    def remove_private(self, entries: Iterable[HostEntry]) -> None:
        """Drops entries of a preempted request."""
        for entry in entries:
            self.private.discard(entry)
            self._free_pages(entry)

    def remove_wrong(self, entry: HostEntry) -> None:
        """Drops an entry whose load failed. Does nothing if it is gone."""
        node = self._tree.get(entry.tag.key)
        if node is not None and self._of(entry.tag.kind).get(node) is entry:
            entry.is_coming = False
            self.remove(entry.tag.kind, node)

    def take_back(self, keys: Collection[bytes] | None = None) -> None:
        """Takes back what was offered to the tier below since the last copies were taken: under these keys, or all of it."""
        self._copies[:] = [
            copy
            for copy in self._copies
            if not (
                isinstance(copy, BlockTransfer) and copy.target == SHARED and (keys is None or copy.tag.key in keys)
            )
        ]

    # -- what goes first: see `TierIndex` ------------------------------------------------------------------------------

    def has_kv(self, node: Node) -> bool:
        return node in self.kv

    def is_pinned(self, node: Node, *, kv: bool) -> bool:
        """A load or a preempted request needs a pinned entry."""
        entry = (self.kv if kv else self.of_states).get(node)
        return entry is not None and entry.pins > 0

    def is_copy(self, node: Node) -> bool:
        return node.block_id != NO_BLOCK

    def drop_state(self, node: Node) -> None:
        super().drop_state(node)
        self.on_both.pop(node, None)

    def next_state(self, may_go: Callable[[Node], bool] = lambda node: True) -> Node | None:
        """States that the device has, too, go first, whatever their value."""
        found = next((node for node in self.on_both if not self.is_pinned(node, kv=False)), None)
        return found or super().next_state(may_go)

    def _make_room(self, kind: EntryKind, evict_state: Callable[[], bool] | None = None) -> bool:
        """Evicts until an entry fits: unneeded KV, then states. False: all that is left is pinned, or worth more.

        Args:
            kind: Of the entry.
            evict_state: Evicts one of the states that may go for it. None: any.
        """
        if self.pages_of[kind] > self.total_pages:
            return False
        while self.pages_of[kind] > len(self.free):
            found = self.next_kv()
            if found is not None:
                self.remove(EntryKind.KV, found)
                self._figures.evictions += 1
            elif not (evict_state or self._evict_state)():
                return False
        return True

    def _evict_state(self, incoming: Node | None = None) -> bool:
        """Evicts a state.

        Args:
            incoming: A state that is to be stored.

        Returns:
            False if there is none to evict, or if the one to evict is ``incoming``.
        """
        state = self.next_state(lambda node: node is incoming or node in self.of_states)
        if state is None or state is incoming:
            self._figures.full += bool(self.total_pages)
            return False
        self.remove(EntryKind.STATE, state)
        self._figures.evictions += 1
        return True

    # -- internal ------------------------------------------------------------------------------------------------------

    def _of(self, kind: EntryKind) -> dict[Node, HostEntry]:
        return self.kv if kind == EntryKind.KV else self.of_states

    def _tag(self, kind: EntryKind, node: Node) -> Tag:
        parent = b"" if node.parent is None else node.parent.key
        return Tag(kind, node.key, node.depth_blocks * self._block_tokens, self._tree.epoch, parent)

    def _add(self, tag: Tag) -> HostEntry:
        """Allocates an entry, for which there is room."""
        take = self.free.popleft
        return HostEntry(tag, tuple([take() for _ in range(self.pages_of[tag.kind])]))

    def _store(self, device_id: int, tag: Tag) -> HostEntry:
        entry = self._add(tag)
        self._copies.append(BlockTransfer(DEVICE, HOST, entry.pages, tag, device_id))
        self._figures.stores += 1
        return entry

    def _put(self, node: Node, entry: HostEntry) -> HostEntry:
        """The entry has the node's KV, or its state, which is counted already."""
        self._of(entry.tag.kind)[node] = entry
        node.refs += 1
        # Else it is about to leave the device, or `also_on_device` follows.
        if entry.tag.kind == EntryKind.KV and node not in self.users:
            self.note_kv(node)
        self._tree.version += 1
        return entry

    def _free_pages(self, entry: HostEntry) -> None:
        self.free.extend(entry.pages)
        entry.pages = ()

    def _write_down(self, node: Node) -> None:
        """Offers a state that was just stored, after the KV before it, to the tier below.

        The host's entries depend on nothing that differs between ranks. So KV is stored here even if the tier below has it.
        """
        if node.private or node.depth_blocks < self.behind.least_blocks:
            return
        path: list[Node] = []
        above: Node | None = node
        while above is not None:
            path.append(above)
            above = above.parent
        state = self.of_states[node]
        self.pin([state])  # its KV must not take its place
        for block in reversed(path):
            if block in self.kv or (block.block_id != NO_BLOCK and self.store_kv(block)):
                self._offer(self.kv[block])
        self.also_on_device([block for block in reversed(path) if block.block_id != NO_BLOCK])
        self.unpin([state])
        self._offer(state)

    def _offer(self, entry: HostEntry) -> None:
        """Offers an entry to the tier below."""
        if not self.behind.contains(entry.tag.kind, entry.tag.key):
            self._copies.append(BlockTransfer(HOST, SHARED, entry.pages, entry.tag))
            self._stats.tiers[SHARED].stores += 1

    def check(self, pins: Counter[HostEntry], private: Collection[HostEntry]) -> None:
        """Checks that tree, eviction policy and entries agree.

        Args:
            pins: What loads and preempted requests pin. Entries that are gone were dropped after a failed load.
            private: What preempted requests own.

        Raises:
            CacheCorruptionError: They do not agree.
        """
        entries = self.entries()
        pages = [page for entry in entries for page in entry.pages]
        if sorted([*pages, *self.free]) != list(range(self.total_pages)):
            raise CacheCorruptionError("a page on the host was lost, or has two owners")
        if any(entry.pins != pins[entry] for entry in entries):
            raise CacheCorruptionError("the pins on the host differ from those of loads and preempted requests")
        if self.private != set(private):
            raise CacheCorruptionError("the private entries on the host differ from those of preempted requests")
        if any(node.slot == NO_SLOT or node not in self.of_states for node in self.on_both):
            raise CacheCorruptionError("a state counts as one of both tiers that one of them does not have")
        if self.states != self.of_states.keys():
            raise CacheCorruptionError("the states on the host and those that are counted differ")
        self.check_needs(self._tree)
        for kind in (EntryKind.KV, EntryKind.STATE):
            for node, entry in self._of(kind).items():
                tag, tokens = entry.tag, node.depth_blocks * self._block_tokens
                if (tag.kind, tag.key, tag.depth_tokens) != (kind, node.key, tokens):
                    raise CacheCorruptionError(f"{node}: its entry on the host has the tag {tag}")
        for entry in entries:
            if len(entry.pages) != self.pages_of[entry.tag.kind]:
                raise CacheCorruptionError(f"{entry.tag} has the wrong number of pages: {len(entry.pages)}")
