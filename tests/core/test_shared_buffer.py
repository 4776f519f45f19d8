"""`SharedMemory`: no byte has two owners, nothing is set aside but what is asked for, copies and moves are bit-equal."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.mcore.state.memory import StateMemory
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory, slot_bytes
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from tests.harness.one_memory import bits

CONV = StateComponent(name="conv", shape=(5, 4), dtype="bfloat16")
SSM = StateComponent(name="ssm", shape=(2, 3, 40), dtype="float32")
DELTA = StateComponent(name="delta", shape=(7, 9), dtype="float64")
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
    block: str = "heads",
    states: str = "one kind",
    *,
    pages: int = 6,
    page_states: int = 1,
    own: int = 2,
    drafts: int = 0,
    padding: int = 0,
    rest: int = 1,
) -> SharedMemory:
    shape, slots = BLOCKS[block], STATES[states]
    step, page_blocks = shape.bytes + padding, max(1, ceil_div(page_states * slot_bytes(slots), shape.bytes + padding))
    layout = PageLayout(
        block_bytes=step,
        state_bytes=slot_bytes(slots),
        page_blocks=page_blocks,
        page_states=page_states,
        total_blocks=pages * page_blocks + rest - 1,  # the last block of the memory is megatron's
    )
    return SharedMemory(slots, layout=layout, block=shape, own_slots=own, drafts=drafts, device="cpu")


def without_kv(own: int = 5, states: str = "one kind", drafts: int = 0) -> SharedMemory:
    return SharedMemory(STATES[states], own_slots=own, drafts=drafts, device="cpu")


def block_of(made: SharedMemory, number: int) -> torch.Tensor:
    """KV of a block in all layers: a view."""
    return made.kv.select(made.kv.dim() - (4 if made.kv.dim() == 6 else 3), number)


def after(made: SharedMemory, slot: int, token: int) -> dict[str, torch.Tensor]:
    """The state of an own slot after a drafted token: views."""
    return {name: tensor[:, made.row(slot), token] for name, tensor in made.drafted.items()}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("page_states", "padding", "rest"), [(1, 0, 1), (2, ALIGNMENT_BYTES, 2), (5, 0, 2)])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_byte_has_two_owners(block, states, page_states, padding, rest, drafts):
    """Own slots, states after drafted tokens, the states or the blocks of each page, the blocks behind them."""
    made = memory(block, states, page_states=page_states, padding=padding, rest=rest, drafts=drafts)
    layout, dice, own = made.layout, random.Random(0), made.first_page_slot
    owners = [made.state(slot).values() for slot in range(own)]
    owners += [after(made, slot, token).values() for slot in range(own) for token in range(drafts + 1) if drafts]
    before_pages = len(owners)
    blocks = list(range(layout.pages * layout.page_blocks, layout.total_blocks + 1))
    for page in range(layout.pages):
        if dice.random() < 0.5:
            owners += [made.state(own + page * page_states + place).values() for place in range(page_states)]
        else:
            blocks += range(page * layout.page_blocks, (page + 1) * layout.page_blocks)
    owners += [[block_of(made, number)] for number in blocks]
    taken = torch.zeros_like(made.buffer, dtype=torch.bool)
    for number, views in enumerate(owners):
        if number == before_pages:  # these are first in the memory, and take what they say
            assert len(made.buffer) == own_bytes(slot_bytes(STATES[states]), own_slots=own, drafts=drafts) + (
                (layout.total_blocks + 1) * layout.block_bytes
            )
            assert int(taken.sum()) == before_pages * STATES[states].slot_bytes
        made.buffer.zero_()
        for view in views:
            view.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]).fill_(-1)
        written = made.buffer == 0xFF
        assert int(written.sum()) == sum(view.numel() * view.element_size() for view in views)
        assert not (written & taken).any(), "has another owner"
        taken |= written
    # The rows that go to the host are the same bytes.
    made.buffer.zero_()
    made.kv_rows[0, blocks] = 1
    assert all(block_of(made, number).all() for number in blocks)
    made.state_rows[0, made.row(own)] = 2
    assert all(tensor.all() for tensor in made.state(own).values())


@pytest.mark.parametrize("block", BLOCKS)
def test_shapes_are_megatrons_and_states_begin_aligned(block):
    made, shape = memory(block, "two kinds", page_states=2), BLOCKS[block]
    assert made.kv.shape == (*shape.before, made.layout.total_blocks + 1, *shape.after)
    assert block_of(made, 0)[(0,) * len(shape.before)].is_contiguous()
    for layout, component in STATES["two kinds"]:
        for slot in range(made.first_page_slot + made.layout.slots):
            view = made.state(slot)[component.name]
            assert view.shape == (layout.layers, *component.shape) and view.is_contiguous()
            assert view.dtype == getattr(torch, component.dtype)
            assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
    assert shape.bytes % ALIGNMENT_BYTES == 0 == slot_bytes(STATES["two kinds"]) % ALIGNMENT_BYTES


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["without_kv", "one_memory"])
def five(request):
    """Five slots, full of random bits: NaNs with a payload, signed zeros, subnormals."""
    made = without_kv() if request.param == "without_kv" else memory(pages=2, page_states=2, own=1)
    made.buffer.random_(0, 256, generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([0x7FC12345, -(2**31), 1, 0x7F800000, -1, 0x00800000], dtype=torch.int32)
    for slot in range(5):
        made.state(slot)["ssm"].view(torch.int32)[:, 0, 0, :6] = odd + slot * (odd == 1)
    return made


def states_of(made):
    return [{name: bits(tensor) for name, tensor in made.state(slot).items()} for slot in range(5)]


def check_states(made, before, origin):
    """Slot i has what slot ``origin[i]`` had; None: zeros."""
    for found, source in zip(states_of(made), origin, strict=True):
        for name, tensor in found.items():
            assert not tensor.any() if source is None else torch.equal(tensor, before[source][name])


def test_zero_takes_only_the_slots_named(five):
    before = states_of(five)
    five.zero([])
    check_states(five, before, range(5))
    five.zero((3, 0))
    check_states(five, before, [None, 1, 2, None, 4])


@pytest.mark.parametrize(("sources", "targets"), [([], []), ([0], [4]), ([4, 4, 4], [0, 2, 3]), ([2], [2])])
def test_copies_are_bit_equal(five, sources, targets):
    before, origin = states_of(five), list(range(5))
    for source, target in zip(sources, targets, strict=True):
        origin[target] = source
    five.copy([five.row(slot) for slot in sources], targets)
    check_states(five, before, origin)


def test_negative_rows_are_not_copied(five):
    before = states_of(five)
    five.copy_rows(torch.tensor([five.row(1), -1, five.row(2)]), torch.tensor([five.row(3), five.row(4), -1]))
    check_states(five, before, [0, 1, 2, 1, 4])


@pytest.mark.parametrize(
    ("count", "targets", "message"),
    [(1, [1, 2], "as many"), (2, [1], "as many"), (2, [2, 2], "twice"), (1, [5], "slot 5"), (1, [-1], "slot -1")],
)
def test_impossible_copies_are_refused_before_anything_is_written(five, count, targets, message):
    before = five.buffer.clone()
    with pytest.raises(ValueError, match=message):
        five.copy([five.row(0)] * count, targets)
    assert torch.equal(five.buffer, before)


@pytest.mark.parametrize("slot", [-1, 5])
def test_no_other_slot_is_zeroed(five, slot):
    """-1 means "no slot"; it must not mean the last one."""
    before = five.buffer.clone()
    with pytest.raises(ValueError, match=f"slot {slot} does not exist"):
        five.zero([0, slot])
    assert torch.equal(five.buffer, before)


@pytest.mark.parametrize("make", [without_kv, memory])
def test_a_stage_without_recurrent_layers_has_nothing_to_copy(make):
    made = make(states="no layer here")
    made.zero([0, 1])
    made.copy([made.row(0)], [1])
    assert not made.buffer.any() and made.state(1)["ssm"].shape == (0, 2, 3, 40)


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


@pytest.mark.parametrize("page_states", [1, 2])
def test_a_page_is_cleared_and_no_byte_beside_it(page_states):
    made = memory(pages=4, page_states=page_states, padding=3 * ALIGNMENT_BYTES, rest=2)
    assert not made.buffer.any(), "zeros at first"
    made.buffer.fill_(7)
    made.clear_pages([1, 3])
    slots = [made.first_page_slot + number for number in range(4 * page_states)]
    assert [bool(made.state_rows[0, made.row(slot)].any()) for slot in slots] == [
        number // page_states in (0, 2) for number in range(4 * page_states)
    ]
    size = made.layout.page_blocks
    kept = [block for block in range(made.layout.total_blocks + 1) if made.kv_rows[0, block].all()]
    assert kept == [*range(size), *range(2 * size, 3 * size), 4 * size, 4 * size + 1]
    assert int((made.buffer == 0).sum()) == 2 * made.layout.page_bytes


# -- states of running requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_states_of_drafts_have_slots_of_their_own(platform, drafts):
    requests, slots = 3, STATES["one kind"]
    shared = memory(own=requests if drafts else 1, drafts=drafts)
    kinds = SimpleNamespace(quanta=(8,), kind_of_layer=(slots.kinds[0].kind,) * 3, slots=slots)
    states = StateMemory(kinds, shared, max_requests=requests, live_states=not drafts, block_tokens=8, max_tokens=64)
    homes = [states.live.slot(index) for index in range(requests)]
    assert homes == (list(range(requests)) if drafts else [0] * requests)
    if not drafts:
        return
    for slot in range(requests):
        for number, tensors in enumerate([shared.state(slot), *(after(shared, slot, at) for at in range(drafts + 1))]):
            tensors["ssm"].fill_(10 * slot + number)
            assert torch.equal(states.layers[1]["ssm"][shared.row(slot)], shared.state(slot)["ssm"][1])
    assert torch.equal(states.drafted_layers[2]["ssm"][shared.row(1), drafts], after(shared, 1, drafts)["ssm"][2])
    live = states.live.rows(torch.tensor([0, 1, -1]))
    states.roll_back(live, torch.tensor([0, 1, 1]))
    assert [shared.state(slot)["ssm"].unique().tolist() for slot in range(requests)] == [[1], [12], [20]]
    first = shared.first_page_slot
    states.copy_decoded([first, first + 1], homes[:2], [drafts, 0])
    assert [shared.state(first + at)["ssm"].unique().tolist() for at in range(2)] == [[1 + drafts], [11]]
