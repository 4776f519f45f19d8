"""`HostEntries`: the entries of the host: their pages, their pins, and which of them states need."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag


class HostEntries(TierIndex[Node]):
    """Allocates pages ``0 .. total_pages - 1`` to entries. An entry is a KV block or a state.

    Nodes of the prefix tree say which entries are theirs (``host_block``, ``host_slot``).

    Args:
        total_pages: Number of pages.
        pages_of: Pages per entry, by kind.
        eviction: Ranks the states.
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
        # Freed pages are used last: a load that was given up may still be read into them.
        self._free = deque(range(self.total_pages))
        self._pages: dict[int, tuple[int, ...]] = {}  # by entry
        self._next_entry = 0
        self._tags: dict[int, Tag] = {}
        self._payloads: dict[int, Any] = {}
        self._pins: dict[int, int] = {}
        self._private: set[int] = set()

    def __contains__(self, entry: int) -> bool:
        """Whether the entry still exists."""
        return entry in self._pages

    def has_kv(self, node: Node) -> bool:
        return node.host_block != NO_BLOCK

    def is_pinned(self, node: Node, *, kv: bool) -> bool:
        """A load or a preempted request needs a pinned entry."""
        return (node.host_block if kv else node.host_slot) in self._pins

    def is_copy(self, node: Node) -> bool:
        return node.block_id != NO_BLOCK

    def note_copy(self, node: Node) -> None:
        """The device has the node's state now."""
        self._copies[node] = None
        self._copies.move_to_end(node)

    def drop_state(self, node: Node) -> None:
        super().drop_state(node)
        self._copies.pop(node, None)

    def next_state(
        self, may_go: Callable[[Node], bool] = lambda node: True, *, guesses_only: bool = False
    ) -> Node | None:
        """All guesses go first, whatever their value, and then the states that the device has, too."""
        found = super().next_state(may_go, guesses_only=True)
        if found is not None or guesses_only:
            return found
        gone = []
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
        return len(self._pages) - len(self._private) - len(self.states)

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def has_room(self, kind: EntryKind) -> bool:
        """Whether there are pages for one more entry of this kind."""
        return self.pages_of[kind] <= len(self._free)

    def add(self, tag: Tag) -> int:
        """Allocates an entry. The caller checks `has_room`."""
        count, take = self.pages_of[tag.kind], self._free.popleft
        entry = self._next_entry
        self._next_entry += 1
        self._pages[entry] = tuple([take() for _ in range(count)])
        self._tags[entry] = tag
        return entry

    def remove(self, entry: int) -> None:
        """Frees the entry, even if it is pinned."""
        del self._tags[entry]
        self._free.extend(self._pages.pop(entry))
        self._payloads.pop(entry, None)
        self._pins.pop(entry, None)
        self._private.discard(entry)

    def pages(self, entry: int) -> tuple[int, ...]:
        """Pages of the entry."""
        return self._pages[entry]

    def tag(self, entry: int) -> Tag:
        """Tag of the entry."""
        return self._tags[entry]

    def payload(self, entry: int) -> Any:
        """Extra data stored with the entry (the routing of a KV block), or None."""
        return self._payloads.get(entry)

    def keep_payload(self, entry: int, payload: Any) -> None:
        """Sets the entry's `payload`. None: no change."""
        if payload is not None:
            self._payloads[entry] = payload

    def pin(self, entries: Iterable[int]) -> None:
        """Pins the entries. Each pin needs one `unpin`."""
        for entry in entries:
            self._pins[entry] = self._pins.get(entry, 0) + 1

    def unpin(self, entries: Iterable[int]) -> None:
        """Reverts one `pin` of each entry. Skips entries that were removed since."""
        for entry in entries:
            pins = self._pins.get(entry, 0) - 1
            if pins > 0:
                self._pins[entry] = pins
            elif pins == 0:
                del self._pins[entry]

    def pins(self) -> dict[int, int]:
        """Number of pins of each pinned entry."""
        return dict(self._pins)

    def make_private(self, entry: int) -> None:
        """Marks the entry as private: it belongs to one preempted request, not to a node of the prefix tree."""
        self._private.add(entry)

    def private(self) -> list[int]:
        """Private entries, ascending."""
        return sorted(self._private)

    def check(self, of_nodes: Iterable[int]) -> None:
        """Checks that no page is lost, and that every entry belongs to a node or is private.

        Args:
            of_nodes: Entries of the nodes of the prefix tree.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        pages = [page for entry in self._pages.values() for page in entry]
        if sorted([*pages, *self._free]) != list(range(self.total_pages)):
            raise CacheCorruptionError("a page on the host was lost, or has two owners")
        if sorted([*of_nodes, *self._private]) != sorted(self._pages):
            raise CacheCorruptionError("the entries on the host differ from those of the tree and preempted requests")
        if not set(self._pins) <= set(self._pages) or any(pins < 1 for pins in self._pins.values()):
            raise CacheCorruptionError("a pinned entry on the host was removed")
        for entry, held in self._pages.items():
            if len(held) != self.pages_of[self._tags[entry].kind]:
                raise CacheCorruptionError(f"{self._tags[entry]} has the wrong number of pages: {len(held)}")
