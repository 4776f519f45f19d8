"""Accounting of checkpoint slots: free, reserved, published, retired. Nothing else hands out slots.

A slot's way: ``free -> reserved -> published -> free``. A reserved slot is being written by a forward in flight and is
owned by one plan; a published one is never written again and belongs to one node of the prefix tree. Pins count the
admitted requests whose first forward still has to read a published slot: a pinned slot that leaves the tree (the
weights changed) is *retired* and becomes free with its last unpin.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from megatron_hybrid_prefix.errors import CacheCorruptionError

NO_SLOT = -1


class SlotState(IntEnum):
    """What a slot is used for."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2
    RETIRED = 3


class SlotPool:
    """Checkpoint slots ``first_slot .. first_slot + slots - 1``; ids below belong to live requests (megatron's).

    Args:
        slots: How many there are; 0 is legal (nothing is ever kept).
        first_slot: Id of the first one.

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
        """All slots become free, whatever they were."""
        self._state = bytearray(self.total_slots)
        self._pins = array("i", bytes(4 * self.total_slots))
        # A stack with the lowest id on top: ids come out in ascending order at first, the same on every rank.
        self._free = list(range(self.first_slot + self.total_slots - 1, self.first_slot - 1, -1))

    @property
    def free_slots(self) -> int:
        """How many can be reserved without evicting."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """Reserved, published or retired."""
        return self.total_slots - len(self._free)

    def state(self, slot: int) -> SlotState:
        """What ``slot`` is used for."""
        return SlotState(self._state[self._index(slot)])

    def pins(self, slot: int) -> int:
        """How many admitted requests still have to read ``slot``."""
        return self._pins[self._index(slot)]

    def reserve(self) -> int | None:
        """A slot to be written by the coming forward, or None when none is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot - self.first_slot] = SlotState.RESERVED
        return slot

    def publish(self, slot: int) -> None:
        """The forward that wrote the reserved ``slot`` succeeded."""
        self._move(slot, SlotState.RESERVED, SlotState.PUBLISHED)

    def abandon(self, slot: int) -> None:
        """The reserved ``slot`` was not written, or not wanted any more."""
        self._move(slot, SlotState.RESERVED, SlotState.FREE)
        self._free.append(slot)

    def pin(self, slot: int) -> None:
        """A request that was admitted will read the published ``slot`` in its first forward."""
        index = self._index(slot)
        if self._state[index] != SlotState.PUBLISHED:
            raise CacheCorruptionError(f"slot {slot} is pinned while {self.state(slot).name}")
        self._pins[index] += 1

    def unpin(self, slot: int) -> None:
        """That forward is done, or will not come."""
        index = self._index(slot)
        if self._pins[index] < 1:
            raise CacheCorruptionError(f"slot {slot} is unpinned more often than pinned")
        self._pins[index] -= 1
        if self._pins[index] == 0 and self._state[index] == SlotState.RETIRED:
            self._move(slot, SlotState.RETIRED, SlotState.FREE)
            self._free.append(slot)

    def retire(self, slot: int) -> None:
        """The published ``slot`` left the prefix tree: free at once, or with its last unpin."""
        if self._pins[self._index(slot)]:
            self._move(slot, SlotState.PUBLISHED, SlotState.RETIRED)
        else:
            self._move(slot, SlotState.PUBLISHED, SlotState.FREE)
            self._free.append(slot)

    def slots_in(self, state: SlotState) -> list[int]:
        """Ids of the slots in ``state``, ascending; O(slots)."""
        return [self.first_slot + index for index, value in enumerate(self._state) if value == state]

    def check(self) -> None:
        """Raises CacheCorruptionError unless slots are conserved and only published or retired ones are pinned."""
        if sorted(self._free) != self.slots_in(SlotState.FREE):
            raise CacheCorruptionError("the list of free slots and their states differ")
        for index, pins in enumerate(self._pins):
            state = self._state[index]
            if pins < 0 or (pins and state not in (SlotState.PUBLISHED, SlotState.RETIRED)):
                raise CacheCorruptionError(f"slot {self.first_slot + index}: {pins} pins while {SlotState(state).name}")
            if not pins and state == SlotState.RETIRED:
                raise CacheCorruptionError(f"slot {self.first_slot + index} is retired and pinned by nobody: leaked")

    def _index(self, slot: int) -> int:
        index = slot - self.first_slot
        if not 0 <= index < self.total_slots:
            raise CacheCorruptionError(f"slot {slot} is no checkpoint slot")
        return index

    def _move(self, slot: int, source: SlotState, target: SlotState) -> None:
        index = self._index(slot)
        if self._state[index] != source:
            raise CacheCorruptionError(f"slot {slot} is {self.state(slot).name}, expected {source.name}")
        self._state[index] = target
