"""`HostEntries`: the entries of the host: their pages, their pins, and which of them states need."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag


@dataclass(slots=True)
class HostEntry:
    """A KV block or a state on the host.

    Attributes:
        tag: Name of its content.
        pages: Its pages, in the order of the bytes.
        payload: Extra data stored with it (the routing of a KV block), or None.
        pins: Loads and preempted requests that need it.
    """

    tag: Tag
    pages: tuple[int, ...]
    payload: Any = None
    pins: int = 0


class HostEntries(TierIndex[Node]):
    """Allocates pages ``0 .. total_pages - 1`` to entries, which have numbers.

    Nodes of the prefix tree say which entries are theirs (``host_block``, ``host_slot``).

    Args:
        total_pages: Number of pages.
        pages_of: Pages per entry, by kind.
        eviction: Ranks the states.

    Attributes:
        free: Free pages. Freed ones are used last: a load that was given up may still be read into them.
        private: Entries of no node: each belongs to one preempted request.
    """

    def __init__(self, total_pages: int, pages_of: Mapping[EntryKind, int], eviction: EvictionPolicy[Node]) -> None:
        super().__init__(eviction)
        # States that the device has, too, longest ago first. States that it has lost are dropped when they come to the front.
        self._copies: OrderedDict[Node, None] = OrderedDict()
        self.total_pages = total_pages
        self.pages_of = pages_of
        self.reset()

    def reset(self) -> None:
        """Drops all entries, even pinned ones."""
        self.clear()
        self._copies.clear()
        self.free = deque(range(self.total_pages))
        self.private: set[int] = set()
        self._entries: dict[int, HostEntry] = {}
        self._next_entry = 0

    def __contains__(self, entry: int) -> bool:
        """Whether the entry still exists."""
        return entry in self._entries

    def __getitem__(self, entry: int) -> HostEntry:
        return self._entries[entry]

    def has_kv(self, node: Node) -> bool:
        return node.host_block != NO_BLOCK

    def is_pinned(self, node: Node, *, kv: bool) -> bool:
        """A load or a preempted request needs a pinned entry."""
        entry = self._entries.get(node.host_block if kv else node.host_slot)
        return entry is not None and entry.pins > 0

    def is_copy(self, node: Node) -> bool:
        return node.block_id != NO_BLOCK

    def note_copy(self, node: Node) -> None:
        """The device has the node's state now."""
        self._copies[node] = None
        self._copies.move_to_end(node)

    def drop_state(self, node: Node) -> None:
        super().drop_state(node)
        self._copies.pop(node, None)

    def next_state(self, may_go: Callable[[Node], bool] = lambda node: True) -> Node | None:
        """States that the device has, too, go first, whatever their value."""
        found, gone = None, []
        for node in self._copies:
            if node.slot == NO_SLOT:
                gone.append(node)
            elif not self.is_pinned(node, kv=False):
                found = node
                break
        for node in gone:
            del self._copies[node]
        return found or super().next_state(may_go)

    @property
    def kv_entries(self) -> int:
        """Number of KV blocks of nodes."""
        return len(self._entries) - len(self.private) - len(self.states)

    def has_room(self, kind: EntryKind) -> bool:
        """Whether there are pages for one more entry of this kind."""
        return self.pages_of[kind] <= len(self.free)

    def add(self, tag: Tag) -> int:
        """Allocates an entry. The caller checks `has_room`."""
        count, take = self.pages_of[tag.kind], self.free.popleft
        entry = self._next_entry
        self._next_entry += 1
        self._entries[entry] = HostEntry(tag, tuple([take() for _ in range(count)]))
        return entry

    def remove(self, entry: int) -> None:
        """Frees the entry, even if it is pinned."""
        self.free.extend(self._entries.pop(entry).pages)
        self.private.discard(entry)

    def pin(self, entries: Iterable[int]) -> None:
        """Pins the entries. Each pin needs one `unpin`."""
        for entry in entries:
            self._entries[entry].pins += 1

    def unpin(self, entries: Iterable[int]) -> None:
        """Reverts one `pin` of each entry. Skips entries that were removed since."""
        for entry in entries:
            if entry in self._entries:
                self._entries[entry].pins -= 1

    def pins(self) -> dict[int, int]:
        """Number of pins of each pinned entry."""
        return {number: entry.pins for number, entry in self._entries.items() if entry.pins}

    def check(self, of_nodes: Iterable[int]) -> None:
        """Checks that no page is lost, and that every entry belongs to a node or is private.

        Args:
            of_nodes: Entries of the nodes of the prefix tree.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        pages = [page for entry in self._entries.values() for page in entry.pages]
        if sorted([*pages, *self.free]) != list(range(self.total_pages)):
            raise CacheCorruptionError("a page on the host was lost, or has two owners")
        if sorted([*of_nodes, *self.private]) != sorted(self._entries):
            raise CacheCorruptionError("the entries on the host differ from those of the tree and preempted requests")
        for entry in self._entries.values():
            if len(entry.pages) != self.pages_of[entry.tag.kind]:
                raise CacheCorruptionError(f"{entry.tag} has the wrong number of pages: {len(entry.pages)}")
