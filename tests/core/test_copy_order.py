"""`stores_first`: stores are launched together, and what arrives is the same."""

from __future__ import annotations

import random

from megatron_hybrid_prefix.tiers.units import (
    DEVICE,
    HOST,
    BlockMove,
    BlockTransfer,
    EntryKind,
    LoadOver,
    PageClear,
    StateMove,
    Tag,
)
from megatron_hybrid_prefix.transfers.mover import stores_first

PAGE_BLOCKS, PAGE_STATES, BLOCKS, HOST_PAGES = 3, 2, 12, 6
SLOTS = BLOCKS // PAGE_BLOCKS * PAGE_STATES
FIRST_SLOT = 2  # of the first page; those before it are the engine's
LAYOUT = PAGE_BLOCKS, PAGE_STATES, FIRST_SLOT


def transfer(kind, device_id, page, *, load=False):
    source, target = (HOST, DEVICE) if load else (DEVICE, HOST)
    tag = Tag(kind=kind, key=b"", depth_tokens=0, epoch=0)
    return BlockTransfer(
        source=source, target=target, pages=(page,), tag=tag, device_id=device_id, load_id=0 if load else -1
    )


def carry_out(copies):
    """What is on the device and on the host after the copies."""
    # In parts of blocks, as many as a page has states. So a state has as many as a page has blocks.
    device, host = [f"part {part}" for part in range(BLOCKS * PAGE_STATES)], [("nothing",)] * HOST_PAGES

    def part(kind, number):
        size = PAGE_STATES if kind == EntryKind.KV else PAGE_BLOCKS
        return slice(number * size, (number + 1) * size)

    for copy in copies:
        if isinstance(copy, LoadOver):
            continue
        if isinstance(copy, BlockMove):
            device[part(EntryKind.KV, copy.target_block)] = device[part(EntryKind.KV, copy.source_block)]
            continue
        if isinstance(copy, StateMove):
            source, target = (part(EntryKind.STATE, slot - FIRST_SLOT) for slot in copy)
            device[target] = device[source]
            continue
        if isinstance(copy, PageClear):
            for block in range(copy.page * PAGE_BLOCKS, (copy.page + 1) * PAGE_BLOCKS):
                device[part(EntryKind.KV, block)] = ["zeros"] * PAGE_STATES
            continue
        place = part(copy.tag.kind, copy.device_id - (0 if copy.tag.kind == EntryKind.KV else FIRST_SLOT))
        if copy.source == DEVICE:
            host[copy.pages[0]] = tuple(device[place])
        else:
            size = place.stop - place.start
            device[place] = (host[copy.pages[0]] * size)[:size]
    return device, host


def test_the_result_is_the_same():
    dice, earlier = random.Random(0), 0
    for _ in range(4000):
        copies = []
        for _ in range(dice.randrange(8)):
            what = dice.choice(("move", "move", "state", "clear", "store", "store", "store", "load", "over"))
            if what == "over":
                copies.append(LoadOver(0))
            elif what == "state":
                copies.append(StateMove(*dice.sample(range(FIRST_SLOT, FIRST_SLOT + SLOTS), 2)))
            elif what == "clear":
                copies.append(PageClear(dice.randrange(BLOCKS // PAGE_BLOCKS)))
            elif what == "move":
                source, target = dice.sample(range(BLOCKS), 2)
                copies.append(BlockMove(source_block=source, target_block=target))
            else:
                kind = dice.choice(list(EntryKind))
                places = (0, BLOCKS) if kind == EntryKind.KV else (FIRST_SLOT, FIRST_SLOT + SLOTS)
                page = dice.randrange(HOST_PAGES)
                copies.append(transfer(kind, dice.randrange(*places), page, load=what == "load"))
        ordered = stores_first(copies, *LAYOUT)
        assert sorted(map(id, ordered)) == sorted(map(id, copies))
        assert carry_out(ordered) == carry_out(copies)
        earlier += ordered != copies
    assert earlier > 200


def test_an_eviction_after_a_move_is_launched_with_those_before():
    moves = [BlockMove(source_block=0, target_block=4)]
    before, after = (
        transfer(EntryKind.KV, 7, 0),
        [transfer(EntryKind.STATE, FIRST_SLOT + slot, slot % 6) for slot in (4, 7)],
    )
    assert stores_first([before, *moves, *after], *LAYOUT) == [before, *after, *moves]
