"""Layouts of states, the pool that holds them, and the agreement of a single rank with itself."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.pool.device import StatePool
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout

CONV = StateComponent(name="conv", shape=(5, 4), dtype="bfloat16")
SSM = StateComponent(name="ssm", shape=(2, 3, 4), dtype="float32")
BYTES = 5 * 4 * 2 + 2 * 3 * 4 * 4


def layout(layers=3, components=(CONV, SSM)):
    return StateLayout(kind="some", layers=layers, components=components)


def slots_of(*kinds):
    return SlotLayout(kinds)


def numbered(pool):
    """Gives every element another number (a bit pattern for small dtypes). Returns clones of the tensors."""
    for tensor in pool.tensors.values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return {name: tensor.clone() for name, tensor in pool.tensors.items()}


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_are_those_of_the_tensor(dtype, size):
    component = StateComponent(name="x", shape=(3, 1, 7), dtype=dtype)
    tensor = torch.empty(component.shape, dtype=getattr(torch, dtype))
    assert component.bytes == tensor.numel() * tensor.element_size() == 21 * size


@pytest.mark.parametrize("dtype", ["int64", "float8", "", "torch.float32"])
def test_an_unknown_type_is_refused(dtype):
    with pytest.raises(ValueError, match=r"'x': unknown dtype"):
        StateComponent(name="x", shape=(1,), dtype=dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (3, -1)])
def test_a_shape_without_elements_is_refused(shape):
    with pytest.raises(ValueError, match=r"'x': shape .* has no elements"):
        StateComponent(name="x", shape=shape, dtype="float32")


@pytest.mark.parametrize(("layers", "components"), [(-1, (CONV,)), (1, ()), (1, (CONV, CONV)), (0, (CONV, SSM, CONV))])
def test_an_impossible_layout_is_refused(layers, components):
    with pytest.raises(ValueError, match="state layout 'some'"):
        layout(layers, components)


def test_slots_within_a_budget():
    assert layout().slot_bytes == 3 * BYTES
    for slots in (0, 1, 2, 100):
        assert slots_of(layout()).slots_within(slots * 3 * BYTES) == slots
        assert slots_of(layout()).slots_within(slots * 3 * BYTES - 1) == slots - 1 if slots else True
        assert slots_of(layout()).slots_within((slots + 1) * 3 * BYTES - 1) == slots


def test_a_rank_without_recurrent_layers_does_not_vote():
    assert layout(layers=0).slot_bytes == 0
    assert slots_of(layout(layers=0)).slots_within(0) is None
    assert slots_of(layout(layers=0)).slots_within(2**40) is None


def test_a_slot_holds_the_states_of_several_kinds():
    other = StateLayout(kind="other", layers=2, components=(StateComponent(name="sum", shape=(7,), dtype="float64"),))
    both = slots_of(layout(), other)
    assert both.slot_bytes == 3 * BYTES + 2 * 7 * 8
    assert both.slots_within(5 * both.slot_bytes) == 5
    pool = StatePool(both, live_slots=1, checkpoint_slots=2, device="cpu")
    assert {name: tuple(tensor.shape[:2]) for name, tensor in pool.tensors.items()} == {
        "conv": (3, 3),
        "ssm": (3, 3),
        "sum": (2, 3),
    }
    numbers = numbered(pool)
    pool.copy([0], [2])
    assert all(torch.equal(pool.tensors[name][:, 2], tensor[:, 0]) for name, tensor in numbers.items())


def test_kinds_are_told_apart_by_the_names_of_their_components():
    with pytest.raises(ValueError, match=r"layer kinds \['some', 'some'\] have components"):
        slots_of(layout(), layout())
    with pytest.raises(ValueError, match="layer kinds"):
        slots_of()


def test_the_pool_takes_what_the_layout_says():
    pool = StatePool(layout(), live_slots=2, checkpoint_slots=5, device="cpu")
    assert (pool.live_slots, pool.checkpoint_slots) == (2, 5)
    assert {name: tuple(tensor.shape) for name, tensor in pool.tensors.items()} == {
        "conv": (3, 7, 5, 4),
        "ssm": (3, 7, 2, 3, 4),
    }
    assert [tensor.dtype for tensor in pool.tensors.values()] == [torch.bfloat16, torch.float32]
    taken_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors.values())
    assert taken_bytes == 7 * pool.layout.slot_bytes


def test_zero_takes_only_the_slots_named():
    pool = StatePool(layout(), live_slots=2, checkpoint_slots=3, device="cpu")
    for tensor in pool.tensors.values():
        tensor.fill_(float("nan"))
    pool.zero([])
    assert all(tensor.isnan().all() for tensor in pool.tensors.values())
    pool.zero((3, 0))
    for tensor in pool.tensors.values():
        assert (tensor[:, [0, 3]] == 0).all()
        assert tensor[:, [1, 2, 4]].isnan().all()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([], []),
        ([0], [4]),
        ([4, 4, 4], [0, 2, 3]),
        ([2], [2]),
    ],
)
def test_copies_are_bit_equal(sources, targets):
    pool = StatePool(layout(), live_slots=2, checkpoint_slots=3, device="cpu")
    before = numbered(pool)
    pool.copy(tuple(sources), targets)
    for name, tensor in pool.tensors.items():
        origin = list(range(5))
        for source, target in zip(sources, targets, strict=True):
            origin[target] = source
        assert torch.equal(tensor, before[name][:, origin])


def test_copies_keep_every_bit():
    """NaNs with a payload, signed zeros, subnormals: a copy changes no bit."""
    pool = StatePool(layout(1, (SSM,)), live_slots=1, checkpoint_slots=1, device="cpu")
    bits = pool.tensors["ssm"].view(torch.int32)
    odd = torch.tensor([0x7FC12345, -(2**31), 1, 0x7F800000, -1, 0x00800000], dtype=torch.int32)
    bits[:, 0] = odd.repeat(4).view(2, 3, 4)
    pool.copy([0], [1])
    assert torch.equal(bits[:, 1], bits[:, 0])


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0], [1, 2], "1 sources and 2 targets"),
        ([0, 1], [2], "2 sources and 1 targets"),
        ([0, 1], [2, 2], "twice"),
        ([1, 2], [2, 1], r"slots \[1, 2\] are both"),
        ([0, 1, 2], [1, 2, 3], r"slots \[1, 2\] are both"),
        ([-1], [2], "slot -1"),
        ([0], [5], "slot 5"),
    ],
)
def test_impossible_copies_are_refused_before_anything_is_written(sources, targets, message):
    pool = StatePool(layout(), live_slots=2, checkpoint_slots=3, device="cpu")
    before = numbered(pool)
    with pytest.raises(ValueError, match=message):
        pool.copy(sources, targets)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pool.tensors.items())


@pytest.mark.parametrize("slot", [-1, 5])
def test_no_other_slot_is_zeroed(slot):
    """-1 means "no slot"; it must not mean the last one."""
    pool = StatePool(layout(), live_slots=2, checkpoint_slots=3, device="cpu")
    before = numbered(pool)
    with pytest.raises(ValueError, match=f"slot {slot}"):
        pool.zero([0, slot])
    assert all(torch.equal(tensor, before[name]) for name, tensor in pool.tensors.items())


@pytest.mark.parametrize(("layers", "checkpoint_slots"), [(0, 3), (2, 0)])
def test_pools_of_nothing(layers, checkpoint_slots):
    """A pipeline stage without recurrent layers; a budget below one state."""
    pool = StatePool(layout(layers), live_slots=2, checkpoint_slots=checkpoint_slots, device="cpu")
    pool.zero([0, 1])
    pool.copy([0], [1])
    assert pool.tensors["ssm"].shape[:2] == (layers, 2 + checkpoint_slots)


def test_one_rank_agrees_with_itself(platform):
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_hybrid_prefix.mcore.ranks.agreement import min_over_model_ranks

    for groups in (None, ProcessGroupCollection.use_mpu_process_groups()):
        assert [min_over_model_ranks(value, groups) for value in (0, 7, None)] == [0, 7, None]
