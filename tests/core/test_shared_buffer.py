"""`SharedMemory`: no byte has two owners, nothing is set aside but what is asked for, moves are bit-equal."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_hybrid_prefix.layers.base import LayerKind
from megatron_hybrid_prefix.layers.components import rings_of as layer_rings
from megatron_hybrid_prefix.mcore.state import memory as memory_of_states
from megatron_hybrid_prefix.ops.state_codes import decode, encode
from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout, StateComponent, StateLayout
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


def rings_of(states: str) -> RingLayout:
    """Two tensors for each kind, whose sizes are no multiple of the alignment."""
    kinds, shapes = [], {"bfloat16": (11, 5), "float64": (11,)}
    for of in STATES[states].kinds:
        parts = (StateComponent(name=of.kind + dtype, shape=shape, dtype=dtype) for dtype, shape in shapes.items())
        kinds.append(StateLayout(kind=of.kind, layers=of.layers, components=tuple(parts)))
    return RingLayout(tokens=8, kinds=tuple(kinds))


def memory(
    block: str = "heads",
    states: str = "one kind",
    *,
    pages: int = 6,
    page_states: int = 1,
    own: int = 2,
    rings: RingLayout | None = None,
    requests: int = 3,
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
    own_fields = {"own_slots": own, "rings": rings or rings_of(states), "requests": requests}
    return SharedMemory(slots, layout=layout, block=shape, device="cpu", **own_fields)


def without_kv(states: str = "one kind") -> SharedMemory:
    return SharedMemory(STATES[states], own_slots=5, rings=rings_of(states), requests=5, device="cpu")


def block_of(made: SharedMemory, number: int) -> torch.Tensor:
    """KV of a block in all layers: a view."""
    return made.kv.select(made.kv.dim() - (4 if made.kv.dim() == 6 else 3), number)


@pytest.mark.parametrize("requests", [0, 3])
@pytest.mark.parametrize(("page_states", "padding", "rest"), [(1, 0, 1), (2, ALIGNMENT_BYTES, 2), (5, 0, 2)])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_byte_has_two_owners(block, states, page_states, padding, rest, requests):
    """Own slots, the rings of each request, the states or the blocks of each page, the blocks behind them."""
    made = memory(block, states, page_states=page_states, padding=padding, rest=rest, requests=requests)
    layout, dice, own = made.layout, random.Random(0), made.first_page_slot
    owners = [made.state(slot).values() for slot in range(own)]
    owners += [[ring[:, request] for ring in made.rings.values()] for request in range(requests)]
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
            before_bytes = own_bytes(slot_bytes(STATES[states]), made.ring_layout, own_slots=own, requests=requests)
            assert len(made.buffer) == before_bytes + (layout.total_blocks + 1) * layout.block_bytes
            assert int(taken.sum()) == own * STATES[states].slot_bytes + made.ring_layout.bytes(requests)
            assert not taken[before_bytes:].any()
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
def test_shapes_are_megatrons_and_states_and_rings_begin_aligned(block):
    made, shape = memory(block, "two kinds", page_states=2), BLOCKS[block]
    assert made.kv.shape == (*shape.before, made.layout.total_blocks + 1, *shape.after)
    assert block_of(made, 0)[(0,) * len(shape.before)].is_contiguous()
    for layout, component in STATES["two kinds"]:
        for slot in range(made.first_page_slot + made.layout.slots):
            view = made.state(slot)[component.name]
            assert view.shape == (layout.layers, *component.shape) and view.is_contiguous()
            assert view.dtype == getattr(torch, component.dtype)
            assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
    for layout in made.ring_layout.kinds:
        for component in layout.components:
            view = made.rings[component.name]
            assert view.shape == (layout.layers, 3, *component.shape) and view.is_contiguous()
            assert view.dtype == getattr(torch, component.dtype) and view.data_ptr() != made.buffer.data_ptr()
            assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
    assert shape.bytes % ALIGNMENT_BYTES == 0 == slot_bytes(STATES["two kinds"]) % ALIGNMENT_BYTES


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [without_kv, partial(memory, pages=2, page_states=2, own=1)])
def test_zero_takes_only_the_slots_named(make):
    """-1 means "no slot"; it must not mean the last one."""
    made = make()
    made.buffer.random_(0, 256, generator=torch.Generator().manual_seed(0))
    before, states = made.buffer.clone(), {slot: [bits(part) for part in made.state(slot).values()] for slot in (3, 0)}
    made.zero([])
    for slot in (-1, 5):
        with pytest.raises(ValueError, match=f"slot {slot} does not exist"):
            made.zero([0, slot])
    assert torch.equal(made.buffer, before)
    made.zero((3, 0))
    for slot, parts in states.items():
        for tensor, part in zip(made.state(slot).values(), parts, strict=True):
            assert not tensor.any()
            tensor.copy_(part.view(tensor.dtype))
    assert torch.equal(made.buffer, before)


@pytest.mark.parametrize("make", [without_kv, memory])
def test_a_stage_without_recurrent_layers_has_neither_states_nor_rings(make):
    made = make(states="no layer here")
    made.zero([0, 1])
    assert made.state(1)["ssm"].shape == (0, 2, 3, 40) and not any(ring.numel() for ring in made.rings.values())
    assert len(made.buffer) == (0 if made.layout is None else (made.layout.total_blocks + 1) * made.layout.block_bytes)


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


# -- checkpoints in fewer bytes ----------------------------------------------------------------------------------------


def of_two_sizes(dtype: str) -> SharedMemory:
    parts = (CONV, replace(SSM, shape=(2, 24, 40), accumulates=True))
    slots = SlotLayout((StateLayout(kind="a", layers=3, components=parts),))
    kept, shape = slots.kept_in(dtype), BLOCKS["float32"]
    sizes = {"live_bytes": slot_bytes(slots), "state_bytes": slot_bytes(kept), "alignment_bytes": ALIGNMENT_BYTES}
    layout = PageLayout.of(block_bytes=shape.bytes, **sizes)
    layout = replace(layout, total_blocks=4 * layout.page_blocks + 1)
    own = {"own_slots": 2, "rings": RingLayout(tokens=8), "requests": 0, "kept": kept}
    return SharedMemory(slots, layout=layout, block=shape, device="cpu", **own)


def taken(made: SharedMemory, slot: int) -> set[int]:
    """The bytes of a slot."""
    made.buffer.zero_()
    for view in made.state(slot).values():
        view.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[view.element_size()]).fill_(-1)
    return set(made.buffer.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_page_has_live_states_or_checkpoints(dtype):
    made = of_two_sizes(dtype)
    layout, own = made.layout, made.first_page_slot
    assert layout.page_states > layout.page_live >= 1
    begin = len(made.buffer) - (layout.total_blocks + 1) * layout.block_bytes
    for page in range(layout.pages):
        inside = range(begin + page * layout.page_bytes, begin + (page + 1) * layout.page_bytes)
        slots = range(own + page * layout.page_slots, own + (page + 1) * layout.page_slots)
        for of_a_size in (slots[: layout.page_live], slots[layout.page_live :]):
            owned = [taken(made, slot) for slot in of_a_size]
            assert len(set().union(*owned)) == sum(map(len, owned)) and set().union(*owned) <= set(inside)
    with pytest.raises(ValueError, match="does not exist"):
        made.row(own + layout.pages * layout.page_slots)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_checkpoint_is_kept_moved_and_restored(dtype):
    """Windows are exact, matrices are as the codes say, and no other byte changes."""
    made = of_two_sizes(dtype)
    made.buffer.fill_(7)
    live, kept = made.first_page_slot, made.first_page_slot + made.layout.page_slots + made.layout.page_live
    for slot in (live, 0):
        for view in made.state(slot).values():
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(slot)))
    states = {name: view.clone() for name, view in made.state(live).items()}
    moved, before = kept + 1, made.buffer.clone()
    made.keep([live], [kept])
    made.move_states([(kept, moved)])
    assert all(torch.equal(bits(view), bits(made.state(kept)[name])) for name, view in made.state(moved).items())
    made.restore([moved], [0])
    right = states | {"ssm": decode(*encode(states["ssm"])) if dtype == "int8" else states["ssm"].bfloat16().float()}
    assert all(torch.equal(bits(view), bits(right[name])) for name, view in made.state(0).items())
    changed = set((made.buffer != before).nonzero()[:, 0].tolist())
    assert changed <= taken(made, 0) | taken(made, kept) | taken(made, moved)


# -- states of running requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_kind_without_a_ring_goes_on_from_the_last_accepted_token(platform, monkeypatch, drafts):
    """A state counts the accepted tokens; a wrong draft adds 100. A flush writes it at any of them, to a checkpoint, too."""
    from megatron_hybrid_prefix.layers.slot_layer import SlotLayer

    class Counting(SlotLayer):
        def slot_decode(self, inputs, states, slots):
            for tensor in states.values():
                tensor[slots[slots >= 0]] += inputs[slots >= 0].to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
            return inputs

        def slot_prefill(self, inputs, states, kept, step):
            raise NotImplementedError

    requests, slots, dice = 3, STATES["one kind"], random.Random(drafts)
    monkeypatch.setattr(memory_of_states, "KINDS", {"a": SimpleNamespace(flush=partial(LayerKind.flush, None))})
    of_kind = {"a": partial(LayerKind.ring, SimpleNamespace(name="a"))}
    rings = layer_rings(slots, of_kind, block_tokens=8, step_tokens=drafts + 1, dtype="float32")
    shared = memory(own=requests, rings=rings, requests=requests)
    assert set(shared.rings) == ({"conv_after", "ssm_after"} if drafts else set())
    for ring in shared.rings.values():
        ring.fill_(torch.nan)
    kinds = SimpleNamespace(quanta=(8,), kind_of_layer=("a",) * 3, slots=slots)
    fields = {"max_requests": requests, "block_tokens": 8, "max_tokens": 64}
    states = memory_of_states.StateMemory(kinds, shared, live_states=False, **fields)

    def tokens_in(slot: int) -> list[float]:
        return torch.cat([tensor.flatten().float() for tensor in shared.state(slot).values()]).unique().tolist()

    positions, kept = np.zeros(requests, np.int32), {}
    for _ in range(40):
        everyone, decodes = np.array(dice.sample(range(requests), requests)), dice.randint(1, requests)
        live, others = everyone[:decodes], everyone[decodes:]
        positions[others] = 0  # these start over, with a prefill
        before, accepted = positions[live], [dice.randint(1, drafts + 1) for _ in live]
        lengths = np.array([drafts + 1] * decodes + [dice.randint(1, 9) for _ in others])
        states.decodes.prepare(everyone, positions[everyone], lengths, everyone, decodes=decodes)
        states.decodes.copy()
        states.decodes.show(torch.tensor([*map(shared.row, live.tolist()), -1][:requests]))
        rows = torch.tensor([[1.0] * right + [100.0] * (drafts + 1 - right) for right in [*accepted, 0][:requests]])
        for layer, ring in zip(states.layers, states.rings, strict=True):
            Counting().slot_decode_rows(rows[..., None], layer, ring, states.decodes.rows)
        positions[everyone] += [*accepted, *lengths[decodes:]]
        for slot in others.tolist():
            for tensor in shared.state(slot).values():
                tensor.fill_(positions[slot])
        some = dice.sample(range(len(live)), dice.randint(1, len(live)))
        flushed, ends = live[some].tolist(), [dice.randint(before[row] + 1, positions[live[row]]) for row in some]
        for _ in range(2):  # the second writes what is in the slots
            targets = [requests + slot if slot else -1 for slot in dice.sample(range(6), len(some))]
            states.flush(flushed, ends, targets)
            kept.update((slot, end) for slot, end in zip(targets, ends, strict=True) if slot >= 0)
            assert [tokens_in(slot) for slot in flushed] == [[end] for end in ends]
            assert states.decodes.origins[flushed].tolist() == ends
            assert all(tokens_in(slot) == [end] for slot, end in kept.items())
