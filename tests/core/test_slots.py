"""Slot accounting."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import SlotPool, SlotState

FIXED = (SlotState.RESERVED, SlotState.LIVE, SlotState.RETIRED)


def make(slots: int, first_slot: int = 0, *, states: int = 1) -> SlotPool:
    return SlotPool(Pages(2 * slots // states, 2, states), first_slot)


def test_no_slots_is_legal():
    pool = make(0, first_slot=4)
    assert pool.reserve() is None and pool.used_slots == 0
    pool.check()
    pool.reset()
    with pytest.raises(ValueError):
        make(-1)


@pytest.mark.parametrize("verb", ["publish", "abandon", "retire", "pin", "unpin"])
def test_a_wrong_move_is_corruption(verb):
    pool = make(4, first_slot=1)
    published, retired = pool.reserve(), pool.reserve()
    pool.publish(published)
    pool.publish(retired)
    pool.retire(retired)
    # One of the engine's, none at all, one that was abandoned; one that is published or retired already.
    pool.abandon(abandoned := pool.reserve())
    wrong = [0, 5, abandoned, retired] + [published] * (verb in ("publish", "abandon", "unpin"))
    for slot in wrong:
        with pytest.raises(CacheCorruptionError):
            getattr(pool, verb)(slot)


@pytest.mark.parametrize("states", [1, 2])
def test_check_finds_what_is_wrong(states):
    breaks = [
        lambda pool: pool._state.__setitem__(1, SlotState.RESERVED),
        lambda pool: pool._pins.__setitem__(1, 1),
        lambda pool: pool._state.__setitem__(0, SlotState.RETIRED),
        lambda pool: pool._places[0].append(0),
        lambda pool: pool._places.clear(),
        lambda pool: pool._stuck.__setitem__(0, 1),
        lambda pool: setattr(pool, "used_slots", 2),
        lambda pool: setattr(pool, "live_slots", 1),
        lambda pool: setattr(pool, "stuck_pages", 1),
        lambda pool: pool.pages.take_from_state(0),
    ]
    for break_it in breaks:
        pool = make(2, states=states)
        pool.publish(pool.reserve())
        pool.check()
        break_it(pool)
        with pytest.raises(CacheCorruptionError):
            pool.check()


@pytest.mark.parametrize("cap", [None, 0, 5])
@pytest.mark.parametrize("states", [1, 2, 5])
def test_slots_of_pages_against_the_obvious_count(states, cap):
    dice, size, count = random.Random(states), 3, 6
    pages = Pages(size * count + 2, size, states)
    pool = SlotPool(pages, 7, cap)
    blocks: list[int] = []
    for _ in range(3000):
        of = {state: pool.slots_in(state) for state in SlotState}
        used = [slot for state in SlotState if state for slot in of[state]]
        stuck = {(slot - 7) // states for slot in used if pool.state(slot) in FIXED or pool.pins(slot)}
        held = {(slot - 7) // states for slot in used}
        assert [pages.is_state(page) for page in range(count)] == [page in held for page in range(count)]
        assert (pool.stuck_pages, pool.live_slots, pool.used_slots) == (len(stuck), len(of[SlotState.LIVE]), len(used))
        assert pool.is_full == (len(used) - len(of[SlotState.LIVE]) >= (states * count if cap is None else cap))
        empty = [p for p in range(count) if p not in held and not {b for b in blocks if b // size == p}]
        for slot in of[SlotState.PUBLISHED]:
            page = (slot - 7) // states
            assert pool.is_loose(slot) == (page not in stuck)
        needs = {"publish": 1, "abandon": 1, "make_live": 1, "retire": 2, "pin": 2, "reserve_again": 2, "end_live": 4}
        what = dice.choice([*needs, "reserve", "reserve", "unpin", "take", "free"])
        if what == "reserve":
            assert (pool.reserve() is not None) == bool(empty or len(used) < states * len(held))
        elif what == "take" and pages.free_blocks:
            blocks += pages.take_blocks(dice.randint(1, min(4, pages.free_blocks)))
        elif what == "free" and blocks:
            pages.free(blocks.pop(dice.randrange(len(blocks))))
        elif what == "unpin" and (pinned := [slot for slot in used if pool.pins(slot)]):
            pool.unpin(dice.choice(pinned))
        elif what in needs and of[SlotState(needs[what])]:
            getattr(pool, what)(dice.choice(of[SlotState(needs[what])]))
        pool.check()
