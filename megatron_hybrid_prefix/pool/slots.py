"""Accounting of slots of states: free, reserved, published, retired, live. Only this file allocates slots.

A slot goes ``free -> reserved -> published -> free``:

- A *reserved* slot is for a forward that is not launched yet, or not published. One plan owns it.
- Nothing that is launched after its publication writes to a *published* slot. It belongs to one node of the prefix tree.
- Pins count the admitted requests whose first forward reads a published slot, and is not published yet. A pinned slot that leaves the
  tree (because the weights changed) is *retired*: its last unpin frees it.

`PageSlots` are the slots of a memory that states share with KV blocks (``pages.py``). A running request's state is in such
a slot, too: ``free -> reserved -> live -> free``. `SlotPool` has a number of slots and no memory, for a replay without an engine.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.pages import Buckets, Pages

NO_SLOT = -1


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2
    RETIRED = 3
    LIVE = 4


class SlotPool:
    """Slots ``first_slot .. first_slot + slots - 1``; lower ids are the engine's own.

    Args:
        slots: Number of slots. With 0 nothing is ever kept.
        first_slot: Id of the first slot.
        most_cached: Most slots of cached states; None: all.

    Raises:
        ValueError: A count is negative.

    Attributes:
        total_slots: Number of slots.
        first_slot: See Args.
        most_cached: Most slots that are reserved, published or retired.
        live_slots: Slots of running requests.
        stuck_pages: Pages with a slot that cannot become free by eviction: reserved, live, pinned or retired.
    """

    live_slots = stuck_pages = 0

    def __init__(self, slots: int, first_slot: int = 0, most_cached: int | None = None) -> None:
        if slots < 0 or first_slot < 0 or (most_cached or 0) < 0:
            raise ValueError(
                f"state_slots={slots if most_cached is None else most_cached}, first_state_slot={first_slot}: must be 0 or more"
            )
        self.total_slots = slots
        self.first_slot = first_slot
        self.most_cached = slots if most_cached is None else min(slots, most_cached)
        self.reset()

    def reset(self) -> None:
        """Free all slots."""
        self._state = bytearray(self.total_slots)
        self._pins = array("i", bytes(4 * self.total_slots))
        # A stack with the lowest id on top: ids come out in ascending order at first, the same on every rank.
        self._free = list(range(self.first_slot + self.total_slots - 1, self.first_slot - 1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that can be reserved without evicting."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """Slots in use."""
        return self.total_slots - len(self._free)

    @property
    def cached_slots(self) -> int:
        """Slots that are reserved, published or retired."""
        return self.used_slots - self.live_slots

    @property
    def is_full(self) -> bool:
        """Whether one more state may be cached only in place of another."""
        return self.cached_slots >= self.most_cached

    def is_loose(self, slot: int) -> bool:
        """Whether the published ``slot`` is in a page that eviction can free."""
        return not self.pins(slot)

    def pages_of(self, slots: Sequence[int]) -> int:
        """Pages that only these slots keep from being freed by eviction."""
        return 0

    def state(self, slot: int) -> SlotState:
        """State of ``slot``."""
        return SlotState(self._state[self._index(slot)])

    def pins(self, slot: int) -> int:
        """Number of admitted requests that still have to read ``slot``."""
        return self._pins[self._index(slot)]

    def reserve(self) -> int | None:
        """Reserve a slot for the next forward to write; None if no slot is free."""
        slot = self._take()
        if slot is not None:
            self._state[slot - self.first_slot] = SlotState.RESERVED
        return slot

    def publish(self, slot: int) -> None:
        """Publish the reserved ``slot``: the forward that writes it is launched."""
        self._move(slot, SlotState.RESERVED, SlotState.PUBLISHED)

    def abandon(self, slot: int) -> None:
        """Free the reserved ``slot``: it was not written, or is no longer needed."""
        self._move(slot, SlotState.RESERVED, SlotState.FREE)
        self._put_back(slot)

    def pin(self, slot: int) -> None:
        """Pin the published ``slot``: an admitted request reads it in its first forward."""
        index = self._index(slot)
        if self._state[index] != SlotState.PUBLISHED:
            raise CacheCorruptionError(f"slot {slot} is pinned while {self.state(slot).name}")
        self._pins[index] += 1

    def unpin(self, slot: int) -> None:
        """Undo one `pin`: that forward is launched, or will not run."""
        index = self._index(slot)
        if self._pins[index] < 1:
            raise CacheCorruptionError(f"slot {slot} is unpinned more often than pinned")
        self._pins[index] -= 1
        if self._pins[index] == 0 and self._state[index] == SlotState.RETIRED:
            self._move(slot, SlotState.RETIRED, SlotState.FREE)
            self._put_back(slot)

    def retire(self, slot: int) -> None:
        """Free the published ``slot``, which left the prefix tree; a pinned slot becomes free with its last unpin."""
        if self._pins[self._index(slot)]:
            self._move(slot, SlotState.PUBLISHED, SlotState.RETIRED)
        else:
            self._move(slot, SlotState.PUBLISHED, SlotState.FREE)
            self._put_back(slot)

    def reserve_again(self, slot: int) -> int | None:
        """Retire the published ``slot``, and reserve it at once. None if it is pinned. No other slot is free."""
        if self._pins[self._index(slot)]:
            self.retire(slot)
            return None
        self._move(slot, SlotState.PUBLISHED, SlotState.RESERVED)
        return slot

    def slots_in(self, state: SlotState) -> list[int]:
        """Ids of the slots in ``state``, ascending; O(slots)."""
        return [self.first_slot + index for index, value in enumerate(self._state) if value == state]

    def check(self) -> None:
        """Raises CacheCorruptionError if a slot is lost, or if its pins do not fit its state."""
        if sorted(self._free) != self.slots_in(SlotState.FREE):
            raise CacheCorruptionError("the list of free slots and their states differ")
        self._check_pins()

    def _check_pins(self) -> None:
        for index, pins in enumerate(self._pins):
            state = self._state[index]
            if pins < 0 or (pins and state not in (SlotState.PUBLISHED, SlotState.RETIRED)):
                raise CacheCorruptionError(f"slot {self.first_slot + index}: {pins} pins while {SlotState(state).name}")
            if not pins and state == SlotState.RETIRED:
                raise CacheCorruptionError(f"slot {self.first_slot + index} leaked: it is retired and has no pin")

    def _take(self) -> int | None:
        """Takes a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def _put_back(self, slot: int) -> None:
        """The slot is free."""
        self._free.append(slot)

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


class PageSlots(SlotPool):
    """Slots of shared pages: those of page p follow ``first_slot + p * page_states``.

    A page whose slots are all free belongs to KV, or is empty.

    Args:
        pages: The shared pages.
        first_slot: Id of the first page's first slot.
        most_cached: Most slots of cached states; None: as many as fit.
    """

    def __init__(self, pages: Pages, first_slot: int = 0, most_cached: int | None = None) -> None:
        self._pages, self._size = pages, pages.page_states
        super().__init__(len(pages) * self._size, first_slot, most_cached)

    def reset(self) -> None:
        """Frees all slots. The caller resets the pages."""
        self._state = bytearray(self.total_slots)
        self._pins = array("i", bytes(4 * self.total_slots))
        self._places: dict[int, list[int]] = {}  # by page that holds states: its free slots, from 0
        self._open = Buckets(len(self._pages), self._size)  # these pages by free slots
        self._stuck = array("i", bytes(4 * len(self._pages)))  # slots that eviction cannot free, by page
        self._used = self.stuck_pages = self.live_slots = 0

    @property
    def free_slots(self) -> int:
        """Slots that can be reserved without eviction or moves: those of one page, as only one is looked for."""
        page = self._open.fullest(self._is_open)
        return len(self._places[page]) if page is not None else self._size * (self._pages.empty_page is not None)

    @property
    def used_slots(self) -> int:
        """Slots in use, with live ones."""
        return self._used

    def is_loose(self, slot: int) -> bool:
        return not self._stuck[self._index(slot) // self._size]

    def pages_of(self, slots: Sequence[int]) -> int:
        counts = Counter(self._index(slot) // self._size for slot in slots)
        return sum(self._stuck[page] == count for page, count in counts.items())

    def reserve(self) -> int | None:
        """None if no page has a free slot and none is empty."""
        slot = super().reserve()
        if slot is not None:
            self._stick(slot, 1)
        return slot

    def reserve_again(self, slot: int) -> int | None:
        reserved = super().reserve_again(slot)
        if reserved is not None:
            self._stick(slot, 1)
        return reserved

    def publish(self, slot: int) -> None:
        super().publish(slot)
        self._stick(slot, -1)

    def abandon(self, slot: int) -> None:
        self._stick(slot, -1)
        super().abandon(slot)

    def pin(self, slot: int) -> None:
        super().pin(slot)
        if self.pins(slot) == 1:
            self._stick(slot, 1)

    def unpin(self, slot: int) -> None:
        if self.pins(slot) == 1:
            self._stick(slot, -1)
        super().unpin(slot)

    def make_live(self, slot: int) -> None:
        """Gives the reserved ``slot`` to a running request."""
        self._move(slot, SlotState.RESERVED, SlotState.LIVE)
        self.live_slots += 1

    def end_live(self, slot: int) -> None:
        """Frees the slot of a request that ended."""
        self._move(slot, SlotState.LIVE, SlotState.FREE)
        self.live_slots -= 1
        self._stick(slot, -1)
        self._put_back(slot)

    def check(self) -> None:
        stuck = array("i", bytes(4 * len(self._pages)))
        for index, (state, pins) in enumerate(zip(self._state, self._pins, strict=True)):
            stuck[index // self._size] += bool(pins) or state in (SlotState.RESERVED, SlotState.LIVE)
        if stuck != self._stuck or self.stuck_pages != sum(map(bool, stuck)):
            raise CacheCorruptionError(f"{sum(map(bool, stuck))} pages cannot be evicted, counted {self.stuck_pages}")
        counts = (self._used, self.live_slots)
        found = self.total_slots - self._state.count(SlotState.FREE), self._state.count(SlotState.LIVE)
        if counts != found:
            raise CacheCorruptionError(f"slots in use, live slots: counted {counts}, are {found}")
        for page in range(len(self._pages)):
            ids = range(page * self._size, (page + 1) * self._size)
            free = [index for index in ids if self._state[index] == SlotState.FREE]
            is_state = len(free) < self._size
            if self._pages.is_state(page) != is_state or sorted(self._places.get(page, ids)) != (free or []):
                raise CacheCorruptionError(f"page {page}: its states and its slots in use differ")
        self._check_pins()

    def _stick(self, slot: int, count: int) -> None:
        """``count`` more slots of the page of this slot cannot become free by eviction."""
        page = self._index(slot) // self._size
        before = self._stuck[page]
        self._stuck[page] = before + count
        self.stuck_pages += (before + count > 0) - (before > 0)

    def _take(self) -> int | None:
        page = self._open.fullest(self._is_open)
        if page is None:
            page = self._pages.empty_page
            if page is None:
                return None
            self._pages.give_to_state(page)
            # A stack with the lowest id on top.
            self._places[page] = list(range((page + 1) * self._size - 1, page * self._size - 1, -1))
        index = self._places[page].pop()
        self._list(page)
        self._used += 1
        return self.first_slot + index

    def _put_back(self, slot: int) -> None:
        index = self._index(slot)
        page = index // self._size
        places = self._places[page]
        places.append(index)
        self._used -= 1
        if len(places) == self._size:
            del self._places[page]
            self._pages.take_from_state(page)
        else:
            self._list(page)

    def _list(self, page: int) -> None:
        if free := len(self._places[page]):
            self._open.push(page, free)

    def _is_open(self, page: int, free: int) -> bool:
        return len(self._places.get(page, ())) == free
