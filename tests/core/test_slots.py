"""Slot accounting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import SlotPool, SlotState

FIXED = (SlotState.RESERVED, SlotState.LIVE, SlotState.RETIRED)


def make(slots: int, first_slot: int = 0, *, states: int = 1) -> SlotPool:
    return SlotPool(Pages(2 * slots // states, 2, states), first_slot)


def test_no_slots_is_legal():
    pool = make(0, first_slot=4)
    assert pool.reserve(0) is None and pool.used_slots == 0
    pool.check()
    pool.reset()
    with pytest.raises(ValueError):
        make(-1)


@pytest.mark.parametrize("verb", ["publish", "abandon", "retire", "pin", "unpin"])
def test_a_wrong_move_is_corruption(verb):
    pool = make(4, first_slot=1)
    published, retired = pool.reserve(0), pool.reserve(0)
    pool.publish(published)
    pool.publish(retired)
    pool.retire(retired)
    # One of the engine's, none at all, one that was abandoned; one that is published or retired already.
    pool.abandon(abandoned := pool.reserve(0))
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
        pool.publish(pool.reserve(0))
        pool.check()
        break_it(pool)
        with pytest.raises(CacheCorruptionError):
            pool.check()


@pytest.mark.parametrize("cap", [None, 0, 5])
@pytest.mark.parametrize("states", [1, 2, 5, (1, 4), (2, 3)], ids=str)
def test_slots_of_pages_against_the_obvious_count(states, cap):
    sizes = (states,) if isinstance(states, int) else states
    dice, size, count, last, moved = random.Random(sum(sizes)), 3, 6, len(sizes) - 1, 0
    pages = Pages(size * count + 2, size, states)
    pool = SlotPool(pages, 7, cap)
    blocks: list[int] = []

    def page_of(slot: int) -> int:
        return (slot - 7) // sum(sizes)

    def size_of(slot: int) -> int:
        return int(last and (slot - 7) % sum(sizes) >= sizes[0])

    for _ in range(3000):
        of = {state: pool.slots_in(state) for state in SlotState}
        used = [slot for state in SlotState if state for slot in of[state]]
        stuck = {page_of(slot) for slot in used if pool.state(slot) in FIXED or pool.pins(slot)}
        held = {page_of(slot): size_of(slot) for slot in used}
        assert len({(page_of(slot), size_of(slot)) for slot in used}) == len(held), "a page has states of both sizes"
        assert [pages.is_state(page) for page in range(count)] == [page in held for page in range(count)]
        live = [slot for slot in used if size_of(slot) < last or pool.state(slot) == SlotState.LIVE]
        assert (pool.stuck_pages, pool.live_slots, pool.used_slots) == (len(stuck), len(live), len(used))
        assert pool.is_full == (len(used) - len(live) >= (sizes[last] * count if cap is None else cap))
        empty = [p for p in range(count) if p not in held and not {b for b in blocks if b // size == p}]
        for slot in of[SlotState.PUBLISHED]:
            assert pool.is_loose(slot) == (page_of(slot) not in stuck)
        of_page = Counter(map(page_of, used))
        free = {kind: sum(sizes[kind] - of_page[p] for p in held if held[p] == kind) for kind in range(len(sizes))}
        needs = {"publish": 1, "abandon": 1, "make_live": 1, "retire": 2, "pin": 2, "reserve_again": 2, "end_live": 4}
        often = ["reserve"] * 3 + ["publish", "end_live"] * 2 + ["unpin"]
        what = dice.choice([*needs, *often, "unpin", "take", "free", "empty"])
        if what == "reserve":
            kind = dice.choice([0, last, last])
            slot = pool.reserve(kind)
            assert (slot is not None) == bool(empty or free[kind])
            assert slot is None or size_of(slot) == kind
        elif what == "empty":
            loose = [of_page[p] for p in held if p not in stuck and held[p] == last]
            moves = pool.empty()
            assert len(moves) == (min(loose) if last and loose and free[last] >= sizes[last] else 0)
            assert len({page_of(source) for source, _ in moves}) <= 1 and {a for a, _ in moves}.isdisjoint(
                b for _, b in moves
            )
            assert {pool.state(source) for source, _ in moves} <= {SlotState.FREE}
            assert {pool.state(target) for _, target in moves} <= {SlotState.PUBLISHED}
            moved += len(moves)
        elif what == "take" and pages.free_blocks:
            blocks += pages.take_blocks(dice.randint(1, min(4, pages.free_blocks)))
        elif what == "free" and blocks:
            pages.free(blocks.pop(dice.randrange(len(blocks))))
        elif what == "unpin" and (pinned := [slot for slot in used if pool.pins(slot)]):
            pool.unpin(dice.choice(pinned))
        elif what in needs:
            # A live state is not published, a checkpoint is not a request's.
            wrong = {"publish": 0, "make_live": 1}.get(what) if last else None
            if some := [slot for slot in of[SlotState(needs[what])] if size_of(slot) != wrong]:
                getattr(pool, what)(dice.choice(some))
        pool.check()
    assert bool(moved) == bool(last)
