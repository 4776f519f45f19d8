"""Slot accounting."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.slots import SlotPool, SlotState


def test_the_way_of_a_slot():
    pool = SlotPool(3, first_slot=10)
    assert [pool.reserve(), pool.reserve(), pool.reserve(), pool.reserve()] == [10, 11, 12, None]
    pool.publish(10)
    pool.abandon(11)
    pool.check()
    assert (pool.free_slots, pool.used_slots) == (1, 2)
    assert [pool.state(slot) for slot in (10, 11, 12)] == [SlotState.PUBLISHED, SlotState.FREE, SlotState.RESERVED]
    pool.retire(10)
    assert {pool.reserve(), pool.reserve()} == {10, 11}
    pool.check()


def test_a_pinned_slot_is_free_only_with_its_last_unpin():
    pool = SlotPool(1)
    slot = pool.reserve()
    assert slot == 0
    pool.publish(slot)
    pool.pin(slot)
    pool.pin(slot)
    pool.retire(slot)
    assert pool.state(slot) == SlotState.RETIRED and pool.reserve() is None
    pool.unpin(slot)
    assert pool.reserve() is None
    pool.check()
    pool.unpin(slot)
    assert pool.reserve() == slot
    pool.check()


def test_no_slots_is_legal():
    pool = SlotPool(0, first_slot=4)
    assert pool.reserve() is None and pool.used_slots == 0
    pool.check()
    pool.reset()
    with pytest.raises(ValueError):
        SlotPool(-1)


@pytest.mark.parametrize("verb", ["publish", "abandon", "retire", "pin", "unpin"])
def test_a_wrong_move_is_corruption(verb):
    pool = SlotPool(2, first_slot=1)
    for slot in (0, 1, 3):  # a live slot, a free one, none at all
        with pytest.raises(CacheCorruptionError):
            getattr(pool, verb)(slot)


def test_published_twice_abandoned_twice():
    pool = SlotPool(2)
    first, second = pool.reserve(), pool.reserve()
    pool.publish(first)
    pool.abandon(second)
    for move in (pool.publish, pool.abandon):
        for slot in (first, second):
            with pytest.raises(CacheCorruptionError):
                move(slot)
    pool.retire(first)
    with pytest.raises(CacheCorruptionError):
        pool.retire(first)
    pool.check()


def test_check_finds_what_is_wrong():
    for break_it in (
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._state.__setitem__(1, SlotState.RESERVED),
        lambda pool: pool._pins.__setitem__(1, 1),
        lambda pool: pool._state.__setitem__(0, SlotState.RETIRED),
    ):
        pool = SlotPool(2)
        pool.publish(pool.reserve())
        pool.check()
        break_it(pool)
        with pytest.raises(CacheCorruptionError):
            pool.check()
