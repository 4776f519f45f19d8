"""`HostEntries`: entries on the host by number, the pages that they are in, and who needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag


class HostEntries:
    """Pages ``0 .. total_pages - 1``, and the entries in them.

    Args:
        total_pages: How many there are.
        pages_of: Pages that an entry takes, by kind.
        state_share: Part of the pages that states may take, 0 to 1, the rest is for KV; None: by use.
    """

    def __init__(self, total_pages: int, pages_of: Mapping[EntryKind, int], state_share: float | None) -> None:
        self.total_pages = total_pages
        self.pages_of = pages_of
        self._most_pages: dict[EntryKind, int] | None = None
        if state_share is not None:
            states = round(total_pages * state_share)
            self._most_pages = {EntryKind.KV: total_pages - states, EntryKind.STATE: states}
        self.reset()

    def reset(self) -> None:
        """All pages are free, whoever needs what is in them."""
        self._free = list(range(self.total_pages - 1, -1, -1))  # a stack, lowest first: entries lie in a row at first
        self._pages: dict[int, tuple[int, ...]] = {}  # by entry
        self._next_entry = 0
        self._used_pages = {EntryKind.KV: 0, EntryKind.STATE: 0}
        self._tags: dict[int, Tag] = {}
        self._payloads: dict[int, Any] = {}
        self._pins: dict[int, int] = {}
        self._private: set[int] = set()

    def __contains__(self, entry: int) -> bool:
        """Whether the entry was not dropped."""
        return entry in self._pages

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def are_divided(self) -> bool:
        """Whether KV and states have pages of their own each."""
        return self._most_pages is not None

    def has_room(self, kind: EntryKind) -> bool:
        """Whether there are pages for one more entry."""
        count = self.pages_of[kind]
        fits = self._most_pages is None or self._used_pages[kind] + count <= self._most_pages[kind]
        return fits and count <= len(self._free)

    def add(self, tag: Tag) -> int:
        """A new entry; there must be room."""
        count = self.pages_of[tag.kind]
        pages = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        entry, self._next_entry = self._next_entry, self._next_entry + 1
        self._pages[entry], self._tags[entry] = pages, tag
        self._used_pages[tag.kind] += count
        return entry

    def remove(self, entry: int) -> None:
        """The entry's pages are free, whoever pinned it."""
        pages = self._pages.pop(entry)
        self._used_pages[self._tags.pop(entry).kind] -= len(pages)
        self._free += reversed(pages)
        self._payloads.pop(entry, None)
        self._pins.pop(entry, None)
        self._private.discard(entry)

    def pages(self, entry: int) -> tuple[int, ...]:
        """Where the entry is."""
        return self._pages[entry]

    def tag(self, entry: int) -> Tag:
        """What the entry holds."""
        return self._tags[entry]

    def payload(self, entry: int) -> Any:
        """What belongs to the entry beside its bytes, or None."""
        return self._payloads.get(entry)

    def keep_payload(self, entry: int, payload: Any) -> None:
        """See `payload`; None keeps what was there."""
        if payload is not None:
            self._payloads[entry] = payload

    def is_pinned(self, entry: int) -> bool:
        """Whether a load, or a preempted request, needs the entry."""
        return entry in self._pins

    def pin(self, entries: Iterable[int]) -> None:
        """These entries stay until they are unpinned as often."""
        for entry in entries:
            self._pins[entry] = self._pins.get(entry, 0) + 1

    def unpin(self, entries: Iterable[int]) -> None:
        """See `pin`. Entries that were dropped meanwhile are passed over."""
        for entry in entries:
            pins = self._pins.get(entry, 0) - 1
            if pins > 0:
                self._pins[entry] = pins
            elif pins == 0:
                del self._pins[entry]

    def pins(self) -> dict[int, int]:
        """How often each pinned entry is pinned."""
        return dict(self._pins)

    def make_private(self, entry: int) -> None:
        """The entry belongs to no node of the prefix tree, but to who made it."""
        self._private.add(entry)

    def private(self) -> list[int]:
        """Entries of no node, ascending."""
        return sorted(self._private)

    def check(self, of_nodes: Iterable[int]) -> None:
        """Raises CacheCorruptionError unless pages are conserved, and every entry is a node's or private.

        Args:
            of_nodes: Entries of the nodes of the prefix tree.
        """
        pages = [page for entry in self._pages.values() for page in entry]
        if sorted([*pages, *self._free]) != list(range(self.total_pages)):
            raise CacheCorruptionError("pages on the host were lost, or have two owners")
        if sorted([*of_nodes, *self._private]) != sorted(self._pages):
            raise CacheCorruptionError("entries on the host and those that the tree knows differ")
        if not set(self._pins) <= set(self._pages) or any(pins < 1 for pins in self._pins.values()):
            raise CacheCorruptionError("a pinned entry on the host is gone")
        used = dict.fromkeys(EntryKind, 0)
        for entry, held in self._pages.items():
            used[self._tags[entry].kind] += len(held)
            if len(held) != self.pages_of[self._tags[entry].kind]:
                raise CacheCorruptionError(f"{self._tags[entry]}: {len(held)} pages on the host")
        if used != self._used_pages:
            raise CacheCorruptionError(f"pages by kind {used}, counted {self._used_pages}")
