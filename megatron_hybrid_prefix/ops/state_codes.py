"""Matrix states in int8: what a checkpoint keeps of them, and back.

An element is an integer times the scale of its row and that of its column. A state is a sum of outer products, so some of its rows and some
of its columns are much larger than others; of the schemes that were compared this one has the smallest error of log-probs per byte
(docs/states.md). The scale of a column is the root of its largest element, that of a row what is left then, over 127. Scales are bfloat16, whose
exponents are those of float32. A matrix with an element that is not finite is not finite afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from megatron_hybrid_prefix.ops.slot_copies import convert_slots
from megatron_hybrid_prefix.ops.triton_or_torch import constexpr, jit, runs_kernel, tl, triton

_MOST = 127
_ELEMENTS = 2048  # of a warp


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and scales of matrices.

    Args:
        states: (..., rows, columns), floating.

    Returns:
        (..., rows, columns) int8; scales of rows, (..., rows), and of columns, (..., columns), bfloat16.
    """
    matrices = states.float()
    columns = matrices.abs().amax(-2).sqrt().bfloat16()
    left = matrices / _divisor(columns)[..., None, :]
    rows = (left.abs().amax(-1) / _MOST).bfloat16()
    values = (left / _divisor(rows)[..., None]).round().clamp(-_MOST, _MOST)
    return values.nan_to_num(_MOST).to(torch.int8), rows, columns


def decode(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The matrices, (..., rows, columns) float32. Arguments are as `encode` returns them."""
    return values.float() * rows.float()[..., None] * columns.float()[..., None, :]


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """float32; 1 where all that is divided is 0."""
    return torch.where(scales == 0, 1.0, scales.float())


def keep_slots(
    states: torch.Tensor, parts: Sequence[torch.Tensor], source_slots: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write states to checkpoints: slot ``source_slots[i]`` of ``states`` to slot ``slots[i]`` of ``parts``, for every i.

    Args:
        states: (layers, slots, *shape) floating, strided over layers and slots, contiguous inside a slot.
        parts: What checkpoints have of them, likewise: one tensor of any floating type, or three as `encode` returns them.
        source_slots: (copies,) int64; negative: no copy.
        slots: (copies,) int64; negative: no copy. A slot may be written once only.
    """
    if len(parts) == 1:
        convert_slots(states, parts[0], source_slots, slots)
    elif runs_kernel(states):
        _code_slots(states, parts, source_slots, slots, keep=True)
    else:
        wanted = (source_slots >= 0) & (slots >= 0)
        for part, codes in zip(parts, encode(states[:, source_slots[wanted]]), strict=True):
            part[:, slots[wanted]] = codes


def restore_slots(
    parts: Sequence[torch.Tensor], states: torch.Tensor, slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Write checkpoints to states: slot ``slots[i]`` to slot ``target_slots[i]``. Arguments are as `keep_slots` has them."""
    if len(parts) == 1:
        convert_slots(parts[0], states, slots, target_slots)
    elif runs_kernel(states):
        _code_slots(states, parts, target_slots, slots, keep=False)
    else:
        wanted = (slots >= 0) & (target_slots >= 0)
        states[:, target_slots[wanted]] = decode(*(part[:, slots[wanted]] for part in parts)).to(states.dtype)


def _code_slots(
    states: torch.Tensor, parts: Sequence[torch.Tensor], state_slots: torch.Tensor, slots: torch.Tensor, *, keep: bool
) -> None:
    """`keep_slots` or `restore_slots` of matrices, in one launch."""
    if not len(slots) or not states.numel():
        return
    tensors, (layers, _, *others, rows, columns) = (states, *parts), states.shape
    assert all(tensor.stride(2) == math.prod(tensor.shape[3:]) and tensor.stride(-1) == 1 for tensor in tensors)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    grid = math.prod(others), layers, len(slots)
    _code_slots_kernel[grid](*tensors, state_slots, slots, *strides, KEEP=keep, **tile_of(rows, columns))


@cache
def tile_of(rows: int, columns: int) -> dict[str, int]:
    """Constants and warps of a program."""
    warps = min(32, triton.next_power_of_2(triton.cdiv(rows * columns, _ELEMENTS)))
    blocks = {"BLOCK_ROWS": triton.next_power_of_2(rows), "BLOCK_COLUMNS": triton.next_power_of_2(columns)}
    return {"ROWS": rows, "COLUMNS": columns, **blocks, "num_warps": warps}


_LIMIT = constexpr(float(_MOST))
_INTEGERS = constexpr(1.5 * 2.0**23)  # float32 has no fractions there: a sum is rounded, half to even


@jit
def _largest(matrix: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The largest absolute value: ordered as bits are, NaN is the largest."""
    return tl.max(matrix.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@jit(do_not_specialize_on_alignment=["state_slots_ptr", "slots_ptr"])
def _code_slots_kernel(
    states_ptr: tl.tensor,  # (layers, slots, matrices, ROWS, COLUMNS), strided over layers and slots, as the next ones
    values_ptr: tl.tensor,
    rows_ptr: tl.tensor,  # (layers, slots, matrices, ROWS)
    columns_ptr: tl.tensor,  # (layers, slots, matrices, COLUMNS)
    state_slots_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_states_layer: tl.int64,
    stride_states: tl.int64,
    stride_values_layer: tl.int64,
    stride_values: tl.int64,
    stride_rows_layer: tl.int64,
    stride_rows: tl.int64,
    stride_columns_layer: tl.int64,
    stride_columns: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """One program: one matrix of one slot in one layer. Divisions and roots are rounded as PyTorch's."""
    matrix, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_slot, slot = tl.load(state_slots_ptr + tl.program_id(2)), tl.load(slots_ptr + tl.program_id(2))
    if (state_slot < 0) | (slot < 0):
        return
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    row_mask, column_mask = row < ROWS, column < COLUMNS
    mask = row_mask[:, None] & column_mask[None, :]
    inside = matrix * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
    of_state = states_ptr + layer * stride_states_layer + state_slot * stride_states + inside
    of_values = values_ptr + layer * stride_values_layer + slot * stride_values + inside
    of_rows = rows_ptr + layer * stride_rows_layer + slot * stride_rows + matrix * ROWS + row
    of_columns = columns_ptr + layer * stride_columns_layer + slot * stride_columns + matrix * COLUMNS + column
    if KEEP:
        state = tl.load(of_state, mask=mask, other=0.0).to(tl.float32)
        columns = tl.sqrt_rn(_largest(state, 0)).to(tl.bfloat16)
        divisor = columns.to(tl.float32)
        left = tl.div_rn(state, tl.where(divisor == 0, 1.0, divisor)[None, :])
        rows = tl.div_rn(_largest(left, 1), _LIMIT).to(tl.bfloat16)
        divisor = rows.to(tl.float32)
        values = tl.div_rn(left, tl.where(divisor == 0, 1.0, divisor)[:, None]) + _INTEGERS - _INTEGERS
        values = tl.where(values < _LIMIT, tl.maximum(values, -_LIMIT), _LIMIT)  # NaN is the largest, too
        tl.store(of_values, values.to(tl.int8), mask=mask)
        tl.store(of_rows, rows, mask=row_mask)
        tl.store(of_columns, columns, mask=column_mask)
    else:
        rows = tl.load(of_rows, mask=row_mask, other=0.0).to(tl.float32)
        columns = tl.load(of_columns, mask=column_mask, other=0.0).to(tl.float32)
        values = tl.load(of_values, mask=mask, other=0).to(tl.float32)
        values = values * rows[:, None] * columns[None, :]
        tl.store(of_state, values.to(states_ptr.dtype.element_ty), mask=mask)
