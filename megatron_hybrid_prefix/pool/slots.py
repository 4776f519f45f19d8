"""Accounting of slots of states: free, reserved, published, retired, live. Only this file allocates slots.

A slot goes ``free -> reserved -> published -> free``:

- A *reserved* slot is for a forward that is not launched yet, or not published. One plan owns it.
- Nothing that is launched after its publication writes to a *published* slot. It belongs to one node of the prefix tree.
- Pins count the admitted requests whose first forward reads a published slot, and is not published yet. A pinned slot that leaves the
  tree (because the weights changed) is *retired*: its last unpin frees it.

Slots are in pages (``pages.py``), which states may share with KV blocks. A running request's state may be in such a slot, too:
``free -> reserved -> live -> free``.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.pages import PageHeap, Pages

NO_SLOT = -1
LIVE_SIZE = 0
"""Number of the size of live states."""


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2
    RETIRED = 3
    LIVE = 4


_FIXED = (SlotState.RESERVED, SlotState.LIVE)  # eviction cannot free such slots


class SlotPool:
    """Slots of pages: those of page p follow ``first_slot + p * page_slots``. Lower ids are the engine's own.

    A page whose slots are all free belongs to KV, or is empty. In another page slots of one size are in use; where there are two sizes, first
    come the slots of live states, then those of checkpoints.

    Args:
        pages: The pages.
        first_slot: Id of the first page's first slot.
        most_cached: Most slots of cached states; None: as many as fit.

    Raises:
        ValueError: A number is negative.

    Attributes:
        total_slots: Number of slots, of all sizes. With 0 nothing is ever kept.
        most_cached: Most slots that are reserved, published or retired.
        checkpoint_size: Number of the size of checkpoints: that of live states, `LIVE_SIZE`, or the one after.
        used_slots: Slots in use, with live ones.
        live_slots: Slots of running requests: live ones, and reserved ones of a size of their own.
        holes: Free slots in pages that have checkpoints; 0 if there is one size.
        stuck_pages: Pages with a slot that cannot become free by eviction: reserved, live, pinned or retired.
    """

    def __init__(self, pages: Pages, first_slot: int = 0, most_cached: int | None = None) -> None:
        if first_slot < 0 or (most_cached or 0) < 0:
            raise ValueError(f"state_slots={most_cached}, first_state_slot={first_slot}: must be 0 or more")
        self.pages, self._slots = pages, pages.page_slots
        self.total_slots = len(pages) * self._slots
        self.checkpoint_size = len(pages.page_sizes) - 1
        self.first_slot = first_slot
        most = len(pages) * pages.page_sizes[self.checkpoint_size]
        self.most_cached = most if most_cached is None else min(most, most_cached)
        self.reset()

    def reset(self) -> None:
        """Frees all slots. The caller resets the pages."""
        self._state = bytearray(self.total_slots)
        self._pins = array("i", bytes(4 * self.total_slots))
        self._places: dict[int, list[int]] = {}  # by page that holds states: its free slots of their size, from 0
        self._size_of = bytearray(len(self.pages))  # of these pages
        self._open = [PageHeap(most_first=False) for _ in self.pages.page_sizes]  # those of a size by free slots
        self._stuck = array("i", bytes(4 * len(self.pages)))  # slots that eviction cannot free, by page
        self.used_slots = self.live_slots = self.stuck_pages = self.holes = 0

    @property
    def cached_slots(self) -> int:
        """Slots that are reserved, published or retired."""
        return self.used_slots - self.live_slots

    @property
    def is_full(self) -> bool:
        """Whether one more state may be cached only in place of another."""
        return self.used_slots - self.live_slots >= self.most_cached

    def is_loose(self, slot: int) -> bool:
        """Whether the published ``slot`` is in a page that eviction can free."""
        return not self._stuck[self._index(slot) // self._slots]

    def state(self, slot: int) -> SlotState:
        """State of ``slot``."""
        return SlotState(self._state[self._index(slot)])

    def pins(self, slot: int) -> int:
        """Number of admitted requests that still have to read ``slot``."""
        return self._pins[self._index(slot)]

    def reserve(self, size: int) -> int | None:
        """Reserve a slot of a size for the next forward to write; None if no such page has a free slot and none is empty."""
        page = self._open[size].first(
            lambda page, free: len(self._places.get(page, ())) == free and self._size_of[page] == size
        )
        if page is None:
            page = self.pages.empty_page
            if page is None:
                return None
            self.pages.give_to_state(page)
            self._size_of[page] = size
            self._places[page] = list(reversed(self._ids(page)))  # a stack with the lowest id on top
            self.holes += len(self._places[page]) * (size > LIVE_SIZE)
        places = self._places[page]
        index = places.pop()
        self.holes -= size > LIVE_SIZE
        if places:
            self._open[size].push(page, len(places))
        self.used_slots += 1
        self.live_slots += size != self.checkpoint_size
        self._state[index] = SlotState.RESERVED
        self._stick(page, 1)
        return self.first_slot + index

    def publish(self, slot: int) -> None:
        """Publish the reserved ``slot``: the forward that writes it is launched."""
        self._move(slot, SlotState.RESERVED, SlotState.PUBLISHED)

    def abandon(self, slot: int) -> None:
        """Free the reserved ``slot``: it was not written, or is no longer needed."""
        self._move(slot, SlotState.RESERVED, SlotState.FREE)

    def pin(self, slot: int) -> None:
        """Pin the published ``slot``: an admitted request reads it in its first forward."""
        index = self._index(slot)
        if self._state[index] != SlotState.PUBLISHED:
            raise CacheCorruptionError(f"slot {slot} is pinned while {self.state(slot).name}")
        self._pins[index] += 1
        if self._pins[index] == 1:
            self._stick(index // self._slots, 1)

    def unpin(self, slot: int) -> None:
        """Undo one `pin`: that forward is launched, or will not run."""
        index = self._index(slot)
        if self._pins[index] < 1:
            raise CacheCorruptionError(f"slot {slot} is unpinned more often than pinned")
        self._pins[index] -= 1
        if self._pins[index]:
            return
        self._stick(index // self._slots, -1)
        if self._state[index] == SlotState.RETIRED:
            self._move(slot, SlotState.RETIRED, SlotState.FREE)

    def retire(self, slot: int) -> None:
        """Free the published ``slot``, which left the prefix tree; a pinned slot becomes free with its last unpin."""
        self._move(slot, SlotState.PUBLISHED, SlotState.RETIRED if self._pins[self._index(slot)] else SlotState.FREE)

    def reserve_again(self, slot: int) -> int | None:
        """Retire the published ``slot``, and reserve it at once. None if it is pinned. No other slot is free."""
        if self._pins[self._index(slot)]:
            self.retire(slot)
            return None
        self._move(slot, SlotState.PUBLISHED, SlotState.RESERVED)
        return slot

    def empty(self) -> list[tuple[int, int]]:
        """Empties a page of checkpoints that no request reads, into free slots of others, if these suffice. The caller carries out the moves.

        Of one size none is emptied: a page has few states then.

        Returns:
            Moves: (from slot, to slot).
        """
        size = self.checkpoint_size
        if size == LIVE_SIZE or self.holes < self.pages.page_sizes[size]:
            return []
        loose = [page for page in self._places if self._size_of[page] == size and not self._stuck[page]]
        if not loose:
            return []
        page = max(loose, key=lambda page: (len(self._places[page]), -page))
        sources = [self.first_slot + index for index in self._ids(page) if self._state[index] != SlotState.FREE]
        own = self._places.pop(page)  # so that none of its slots is reserved
        moves: list[tuple[int, int]] = []
        for source in sources:
            target = self.reserve(size)
            assert target is not None, "there were enough free slots"
            self.publish(target)
            moves.append((source, target))
        self._places[page] = own
        for source in sources:
            self.retire(source)
        return moves

    def make_live(self, slot: int) -> None:
        """Gives the reserved ``slot`` to a running request."""
        self._move(slot, SlotState.RESERVED, SlotState.LIVE)
        self.live_slots += self.checkpoint_size == LIVE_SIZE

    def end_live(self, slot: int) -> None:
        """Frees the slot of a request that ended."""
        self._move(slot, SlotState.LIVE, SlotState.FREE)
        self.live_slots -= self.checkpoint_size == LIVE_SIZE

    def slots_in(self, state: SlotState) -> list[int]:
        """Ids of the slots in ``state``, ascending; O(slots)."""
        return [self.first_slot + index for index, value in enumerate(self._state) if value == state]

    def check(self) -> None:
        """Raises CacheCorruptionError if a slot is lost, if its pins do not fit its state, or if a count is wrong."""
        stuck = array("i", bytes(4 * len(self.pages)))
        for index, (state, pins) in enumerate(zip(self._state, self._pins, strict=True)):
            stuck[index // self._slots] += bool(pins) or state in _FIXED
            if pins < 0 or (pins and state not in (SlotState.PUBLISHED, SlotState.RETIRED)):
                raise CacheCorruptionError(f"slot {self.first_slot + index}: {pins} pins while {SlotState(state).name}")
            if not pins and state == SlotState.RETIRED:
                raise CacheCorruptionError(f"slot {self.first_slot + index} leaked: it is retired and has no pin")
            is_wrong = self._size_of[index // self._slots] != self.checkpoint_size * (state != SlotState.LIVE)
            if is_wrong and state not in (SlotState.FREE, SlotState.RESERVED):
                raise CacheCorruptionError(
                    f"slot {self.first_slot + index} is {SlotState(state).name}, of a wrong size"
                )
        if stuck != self._stuck or self.stuck_pages != sum(map(bool, stuck)):
            raise CacheCorruptionError(f"{sum(map(bool, stuck))} pages cannot be evicted, counted {self.stuck_pages}")
        counts = (self.used_slots, self.live_slots, self.holes)
        used = [index for index, state in enumerate(self._state) if state != SlotState.FREE]
        others = [index for index in used if self._size_of[index // self._slots] != self.checkpoint_size]
        live = len(others) if others else self._state.count(SlotState.LIVE)
        holes = sum(len(places) for page, places in self._places.items() if self._size_of[page])
        if (found := (len(used), live, holes)) != counts:
            raise CacheCorruptionError(f"slots in use, live slots, holes: counted {counts}, are {found}")
        for page in range(len(self.pages)):
            ids, every = self._ids(page), range(page * self._slots, (page + 1) * self._slots)
            used = [index for index in every if self._state[index] != SlotState.FREE]
            free = [index for index in ids if index not in used]
            wrong = sorted(self._places.get(page, ids)) != free or not set(used) <= set(ids)
            if wrong or self.pages.is_state(page) != bool(used):
                raise CacheCorruptionError(f"page {page}: its states and its slots in use differ")

    def _stick(self, page: int, count: int) -> None:
        """``count`` more slots of the page cannot become free by eviction."""
        before = self._stuck[page]
        self._stuck[page] = before + count
        self.stuck_pages += (before + count > 0) - (before > 0)

    def _ids(self, page: int) -> range:
        """The page's slots of the size that it has, or had last, from 0."""
        size = self._size_of[page]
        first = page * self._slots + sum(self.pages.page_sizes[:size])
        return range(first, first + self.pages.page_sizes[size])

    def _index(self, slot: int) -> int:
        index = slot - self.first_slot
        if not 0 <= index < self.total_slots:
            raise CacheCorruptionError(f"slot {slot} is not a checkpoint slot")
        return index

    def _move(self, slot: int, source: SlotState, target: SlotState) -> None:
        index = self._index(slot)
        if self._state[index] != source:
            raise CacheCorruptionError(f"slot {slot} is {self.state(slot).name}, expected {source.name}")
        self._state[index] = target
        page = index // self._slots
        if (target in _FIXED) != (source in _FIXED):
            self._stick(page, 1 if target in _FIXED else -1)
        if target == SlotState.FREE:
            places = self._places[page]
            places.append(index)
            self.used_slots -= 1
            size = self._size_of[page]
            self.live_slots -= size != self.checkpoint_size
            self.holes += size > LIVE_SIZE
            if len(places) == self.pages.page_sizes[size]:
                self.holes -= len(places) * (size > LIVE_SIZE)
                del self._places[page]
                self.pages.take_from_state(page)
            else:
                self._open[size].push(page, len(places))
