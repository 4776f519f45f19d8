"""`SharedMemory`: no byte has two owners, moves are bit-equal, and the buffer fits its budget."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.mcore.state.memory import StateMemory, own_slots
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import PageLayout
from megatron_hybrid_prefix.pool.shared_memory import ALIGNMENT_BYTES, BlockShape, SharedMemory, slot_bytes

CONV = StateComponent(name="conv", shape=(5, 4), dtype="bfloat16")
SSM = StateComponent(name="ssm", shape=(2, 3, 40), dtype="float32")
DELTA = StateComponent(name="delta", shape=(7, 9), dtype="float32")
BLOCKS = {
    "heads": BlockShape(before=(2, 3), after=(8, 2, 5), dtype=torch.bfloat16),
    "latent": BlockShape(before=(3,), after=(8, 11), dtype=torch.bfloat16),
    "float32": BlockShape(before=(2, 1), after=(16, 2, 8), dtype=torch.float32),
}
STATES = {
    "one kind": SlotLayout((StateLayout(kind="a", layers=3, components=(CONV, SSM)),)),
    "two kinds": SlotLayout(
        (StateLayout(kind="a", layers=1, components=(CONV, SSM)), StateLayout(kind="b", layers=2, components=(DELTA,)))
    ),
    "no layer here": SlotLayout((StateLayout(kind="a", layers=0, components=(CONV, SSM)),)),
}


def memory(
    block: str = "heads", states: str = "one kind", *, pages: int = 6, own: int = 2, padding: int = 0, rest: int = 0
) -> SharedMemory:
    shape, slots = BLOCKS[block], STATES[states]
    step = shape.bytes + padding
    page_blocks = max(1, -(-slot_bytes(slots) // step))
    budget = ((pages + own) * page_blocks + rest) * step + 17
    layout = PageLayout.of_buffer(budget, block_bytes=step, page_blocks=page_blocks, own_slots=own)
    made = SharedMemory(layout, block=shape, slots=slots, own_slots=own, device="cpu")
    assert layout.total_blocks == pages * page_blocks + rest - 1 and made.buffer.numel() == budget - 17
    made.layout = layout
    return made


def block_of(made: SharedMemory, number: int) -> torch.Tensor:
    """KV of a block in all layers: a view."""
    return made.kv.select(made.kv.dim() - (4 if made.kv.dim() == 6 else 3), number)


@pytest.mark.parametrize(("padding", "rest"), [(0, 0), (0, 1), (ALIGNMENT_BYTES, 1)])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_byte_has_two_owners(block, states, padding, rest):
    """Each page has its blocks or its slot. All of them, the dummy block and the engine's slots are written, then read."""
    made, dice = memory(block, states, padding=padding, rest=rest), random.Random(0)
    size, total = made.layout.page_blocks, made.layout.total_blocks
    made.buffer.fill_(0)
    owners = []
    for page in range(made.layout.pages):
        held = dice.random() < 0.5
        owners += (
            [("slot", made.first_page_slot + page)] if held else [("block", page * size + at) for at in range(size)]
        )
    owners += [("block", number) for number in range(made.layout.pages * size, total + 1)]
    owners += [("slot", number) for number in range(made.first_page_slot)]
    parts = {
        (what, number): [block_of(made, number)]
        if what == "block"
        else [tensor[:, number] for tensor in made.states.tensors.values()]
        for what, number in owners
    }
    for mark, tensors in enumerate(parts.values(), 1):
        for tensor in tensors:
            assert not tensor.any(), "another owner wrote here"
            tensor.fill_(mark)
    for mark, tensors in enumerate(parts.values(), 1):
        assert all(bool((tensor == mark).all()) for tensor in tensors)
    # The rows that are copied to the host are the same bytes.
    for (what, number), tensors in parts.items():
        row = (made.kv_rows if what == "block" else made.state_rows)[0, number]
        row.fill_(0)
        assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("block", BLOCKS)
def test_shapes_are_megatrons_and_blocks_begin_aligned(block):
    made, shape = memory(block, "two kinds"), BLOCKS[block]
    assert made.kv.shape == (*shape.before, made.layout.total_blocks + 1, *shape.after)
    assert block_of(made, 0)[(0,) * len(shape.before)].is_contiguous()
    for layout, component in STATES["two kinds"]:
        tensor = made.states.tensors[component.name]
        assert tensor.shape == (layout.layers, made.states.total_slots, *component.shape)
        assert tensor.stride(1) * tensor.element_size() % ALIGNMENT_BYTES == 0
        assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT_BYTES == 0
    assert shape.bytes % ALIGNMENT_BYTES == 0 == slot_bytes(STATES["two kinds"]) % ALIGNMENT_BYTES


@pytest.mark.parametrize("padding", [0, 3 * ALIGNMENT_BYTES])
@pytest.mark.parametrize("seed", range(5))
def test_moves_are_those_made_one_after_another(seed, padding):
    made, dice = memory(pages=4, padding=padding), random.Random(seed)
    made.buffer.random_(0, 256)
    blocks = range(made.layout.total_blocks)
    moves = [tuple(dice.sample(blocks, 2)) for _ in range(30)]  # chains, and blocks that are read and written again
    expected = made.kv_rows.clone()
    for source, target in moves:
        expected[0, target] = expected[0, source]
    made.move_blocks(moves)
    assert torch.equal(made.kv_rows, expected)


def test_a_page_is_cleared_and_no_byte_beside_it():
    made = memory(pages=4, padding=3 * ALIGNMENT_BYTES, rest=1)
    assert not made.buffer.any(), "zeros at first"
    made.buffer.fill_(7)
    made.clear_pages([1, 3])
    states, step = made.state_rows[0], made.layout.page_bytes
    assert [bool(states[made.first_page_slot + page].any()) for page in range(4)] == [True, False, True, False]
    size = made.layout.page_blocks
    kept = [block for block in range(made.layout.total_blocks + 1) if made.kv_rows[0, block].all()]
    assert kept == [*range(size), *range(2 * size, 3 * size), 4 * size]
    assert int((made.buffer == 0).sum()) == 2 * step


def test_what_does_not_fit_is_refused():
    layout = PageLayout(block_bytes=BLOCKS["heads"].bytes, state_bytes=1, total_blocks=5)
    with pytest.raises(ValueError, match=r"^a state of \d+ bytes does not fit a page of \d+$"):
        SharedMemory(layout, block=BLOCKS["heads"], slots=STATES["one kind"], own_slots=1, device="cpu")
    layout = PageLayout(block_bytes=BLOCKS["heads"].bytes - 1, state_bytes=2**20, total_blocks=5)
    with pytest.raises(ValueError, match=r"^blocks of \d+ bytes do not fit a distance of \d+$"):
        SharedMemory(layout, block=BLOCKS["heads"], slots=STATES["one kind"], own_slots=1, device="cpu")


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_states_of_drafts_have_slots_of_their_own(platform, drafts):
    max_requests = 3
    own = own_slots(max_requests=max_requests, drafts=drafts)
    shared = memory(own=own)
    kinds = SimpleNamespace(
        slots=STATES["one kind"],
        quanta=(8,),
        kind_of_layer=("a",) * 3,
        without_drafts=(),
        place=lambda at: (STATES["one kind"].kinds[0], at),
    )
    states = StateMemory(
        kinds,
        max_requests=max_requests,
        checkpoint_slots=0,
        drafts=drafts,
        block_tokens=8,
        max_tokens=64,
        device="cpu",
        shared=shared,
    )
    shared.buffer.zero_()
    homes = [states.live.slot(index) for index in range(max_requests)]
    assert max(homes) < shared.first_page_slot and len(set(homes)) == (max_requests if drafts else 1)
    marks = {}
    for index, home in enumerate(homes):
        marks[index, None] = states.pool.tensors["ssm"][:, home]
        for token in range(drafts + 1 if drafts else 0):
            marks[index, token] = states.drafted["ssm"][:, home, token]
    if drafts:
        for mark, part in enumerate(marks.values(), 1):
            assert not part.any()
            part.fill_(mark)
        tokens = torch.arange(max_requests) % (drafts + 1)
        states.roll_back(torch.tensor([*homes[:2], -1]), tokens)
        for index in range(max_requests):
            expected = (
                marks[index, int(tokens[index])]
                if index < 2
                else torch.full_like(marks[index, None], 2 * (drafts + 2) + 1)
            )
            assert torch.equal(states.pool.tensors["ssm"][:, homes[index]], expected)
        first, second = shared.first_page_slot, shared.first_page_slot + 1
        states.copy_decoded([first, second], homes[:2], [drafts, 0])
        assert torch.equal(states.pool.tensors["ssm"][:, first], marks[0, drafts])
        assert torch.equal(states.pool.tensors["ssm"][:, second], marks[1, 0])
