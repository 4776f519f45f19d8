"""Accounting of checkpoint slots: free, reserved, published, retired. Only `SlotPool` allocates slots.

A slot goes ``free -> reserved -> published -> free``:

- A *reserved* slot is for a forward that is not launched yet, or not published. One plan owns it.
- Nothing that is launched after its publication writes to a *published* slot. It belongs to one node of the prefix tree.
- Pins count the admitted requests whose first forward reads a published slot, and is not published yet. A pinned slot that leaves the
  tree (because the weights changed) is *retired*: its last unpin frees it.

`PageSlots` are the slots of a memory that states share with KV blocks (``pages.py``). A running request's state is in such
a slot, too: ``free -> live -> free``.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.pages import Pages

NO_SLOT = -1


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2
    RETIRED = 3
    LIVE = 4


class SlotPool:
    """Checkpoint slots ``first_slot .. first_slot + slots - 1``; lower ids are live slots of running requests.

    Args:
        slots: Number of slots. With 0 nothing is ever kept.
        first_slot: Id of the first slot.

    Raises:
        ValueError: A count is negative.
    """

    def __init__(self, slots: int, first_slot: int = 0) -> None:
        if slots < 0 or first_slot < 0:
            raise ValueError(f"slots={slots}, first_slot={first_slot}: must be 0 or more")
        self.total_slots = slots
        self.first_slot = first_slot
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
        """Slots that are reserved, published or retired."""
        return self.total_slots - len(self._free)

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
    """Slots of shared pages: slot ``first_slot + p`` is page p. A free slot is a page whose KV blocks are all free.

    Args:
        pages: The shared pages.
        first_slot: Id of the first page's slot.

    Attributes:
        stuck_slots: Slots that cannot become free by eviction: reserved, live, pinned and retired ones.
    """

    def __init__(self, pages: Pages, first_slot: int = 0) -> None:
        self._pages = pages
        super().__init__(len(pages), first_slot)

    def reset(self) -> None:
        """Frees all slots. The caller resets the pages."""
        self._state = bytearray(self.total_slots)
        self._pins = array("i", bytes(4 * self.total_slots))
        self.stuck_slots = 0

    @property
    def free_slots(self) -> int:
        """Slots that get a page without eviction or moves: 1 or 0, as only one page is looked for."""
        return int(self._pages.empty_page is not None)

    @property
    def used_slots(self) -> int:
        """Slots in use, with live ones."""
        return self._pages.state_pages

    @property
    def live_slots(self) -> int:
        """Slots of running requests; O(slots)."""
        return self._state.count(SlotState.LIVE)

    def reserve(self) -> int | None:
        """See SlotPool; None if no page is empty."""
        slot = super().reserve()
        self.stuck_slots += slot is not None
        return slot

    def reserve_again(self, slot: int) -> int | None:
        """See SlotPool."""
        reserved = super().reserve_again(slot)
        self.stuck_slots += reserved is not None
        return reserved

    def publish(self, slot: int) -> None:
        """See SlotPool."""
        super().publish(slot)
        self.stuck_slots -= 1

    def abandon(self, slot: int) -> None:
        """See SlotPool."""
        super().abandon(slot)
        self.stuck_slots -= 1

    def pin(self, slot: int) -> None:
        """See SlotPool."""
        super().pin(slot)
        self.stuck_slots += self.pins(slot) == 1

    def unpin(self, slot: int) -> None:
        """See SlotPool."""
        super().unpin(slot)
        self.stuck_slots -= self.pins(slot) == 0

    def make_live(self, slot: int) -> None:
        """Gives the reserved ``slot`` to a running request."""
        self._move(slot, SlotState.RESERVED, SlotState.LIVE)

    def end_live(self, slot: int) -> None:
        """Frees the slot of a request that ended."""
        self._move(slot, SlotState.LIVE, SlotState.FREE)
        self._put_back(slot)
        self.stuck_slots -= 1

    def check(self) -> None:
        """See SlotPool."""
        used = [page for page in range(self.total_slots) if self._pages.is_state(page)]
        if used != [page for page, state in enumerate(self._state) if state != SlotState.FREE]:
            raise CacheCorruptionError("the pages of states and the slots in use differ")
        self._check_pins()
        stuck = sum(
            bool(pins) or state in (SlotState.RESERVED, SlotState.LIVE)
            for state, pins in zip(self._state, self._pins, strict=True)
        )
        if stuck != self.stuck_slots:
            raise CacheCorruptionError(f"{stuck} slots cannot be evicted, counted {self.stuck_slots}")

    def _take(self) -> int | None:
        page = self._pages.empty_page
        if page is None:
            return None
        self._pages.give_to_state(page)
        return self.first_slot + page

    def _put_back(self, slot: int) -> None:
        self._pages.take_from_state(slot - self.first_slot)
