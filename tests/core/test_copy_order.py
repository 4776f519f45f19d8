"""`stores_first`: stores are launched together, and what arrives is the same."""

from __future__ import annotations

import random

from megatron_hybrid_prefix.tiers.units import (
    DEVICE,
    HOST,
    BlockMove,
    BlockTransfer,
    EntryKind,
    PageClear,
    Tag,
    stores_first,
)

PAGE_BLOCKS, BLOCKS, HOST_PAGES = 3, 12, 6
FIRST_SLOT = 2  # that of the first page; those before it are the engine's


def transfer(kind, device_id, page, *, load=False):
    source, target = (HOST, DEVICE) if load else (DEVICE, HOST)
    tag = Tag(kind=kind, key=b"", depth_tokens=0, epoch=0)
    return BlockTransfer(
        source=source, target=target, pages=(page,), tag=tag, device_id=device_id, load_id=0 if load else None
    )


def carry_out(copies):
    """What is on the device and on the host after the copies."""
    device, host = [f"block {block}" for block in range(BLOCKS)], [("nothing",)] * HOST_PAGES
    for copy in copies:
        if isinstance(copy, BlockMove):
            device[copy.target_block] = device[copy.source_block]
            continue
        if isinstance(copy, PageClear):
            device[copy.page * PAGE_BLOCKS : (copy.page + 1) * PAGE_BLOCKS] = ["zeros"] * PAGE_BLOCKS
            continue
        size = 1 if copy.tag.kind == EntryKind.KV else PAGE_BLOCKS
        first = copy.device_id if copy.tag.kind == EntryKind.KV else (copy.device_id - FIRST_SLOT) * size
        place = slice(first, first + size)
        if copy.source == DEVICE:
            host[copy.pages[0]] = tuple(device[place])
        else:
            device[place] = (host[copy.pages[0]] * size)[:size]
    return device, host


def test_the_result_is_the_same():
    dice, earlier = random.Random(0), 0
    for _ in range(4000):
        copies = []
        for _ in range(dice.randrange(8)):
            what = dice.choice(("move", "move", "clear", "store", "store", "store", "load"))
            if what == "clear":
                copies.append(PageClear(dice.randrange(BLOCKS // PAGE_BLOCKS)))
            elif what == "move":
                source, target = dice.sample(range(BLOCKS), 2)
                copies.append(BlockMove(source_block=source, target_block=target))
            else:
                kind = dice.choice(list(EntryKind))
                places = (0, BLOCKS) if kind == EntryKind.KV else (FIRST_SLOT, FIRST_SLOT + BLOCKS // PAGE_BLOCKS)
                page = dice.randrange(HOST_PAGES)
                copies.append(transfer(kind, dice.randrange(*places), page, load=what == "load"))
        ordered = stores_first(copies, PAGE_BLOCKS, FIRST_SLOT)
        assert sorted(map(id, ordered)) == sorted(map(id, copies))
        assert carry_out(ordered) == carry_out(copies)
        earlier += ordered != copies
    assert earlier > 200


def test_an_eviction_after_a_move_is_launched_with_those_before():
    moves = [BlockMove(source_block=0, target_block=4)]
    before, after = (
        transfer(EntryKind.KV, 7, 0),
        [transfer(EntryKind.STATE, FIRST_SLOT + page, page) for page in (2, 3)],
    )
    assert stores_first([before, *moves, *after], PAGE_BLOCKS, FIRST_SLOT) == [before, *after, *moves]


def test_what_was_moved_is_stored_after_its_move():
    moves = [BlockMove(source_block=0, target_block=4)]
    for store in (transfer(EntryKind.KV, 4, 0), transfer(EntryKind.STATE, FIRST_SLOT + 1, 0)):
        assert stores_first([*moves, store], PAGE_BLOCKS, FIRST_SLOT) == [*moves, store]


def test_a_state_is_stored_before_its_page_is_cleared():
    clear, other = PageClear(1), transfer(EntryKind.KV, 7, 1)
    before, after = transfer(EntryKind.STATE, FIRST_SLOT + 1, 0), transfer(EntryKind.KV, 4, 2)
    assert stores_first([before, clear, other, after], PAGE_BLOCKS, FIRST_SLOT) == [before, other, clear, after]


def test_stores_stay_behind_a_load_from_the_same_page():
    copies = [transfer(EntryKind.KV, 2, 1, load=True), transfer(EntryKind.KV, 3, 1)]
    assert stores_first(copies, PAGE_BLOCKS, FIRST_SLOT) == copies
