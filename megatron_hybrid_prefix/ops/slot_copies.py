"""Copies of whole states between slots: one launch for all layers and slots."""

from __future__ import annotations

import math
from typing import SupportsIndex

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_BLOCK = 2048  # words of 8 bytes
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_slots(
    source: torch.Tensor, target: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """``target[:, target_slots[i]] = source[:, source_slots[i]]`` for every i, bit by bit.

    A slot of ``target`` may be written once only, and no other copy may read it.

    Args:
        source: (layers, slots, *shape), strided over layers and slots, contiguous inside a slot.
        target: (layers, slots, *shape), likewise; may be ``source``.
        source_slots: (copies,) int64; negative: no copy.
        target_slots: (copies,) int64; negative: no copy.

    Raises:
        ValueError: Layers, shapes or dtypes of ``source`` and ``target`` differ.
    """
    if source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:] or source.dtype != target.dtype:
        raise ValueError(
            f"states {tuple(source.shape)} {source.dtype} cannot be copied to {tuple(target.shape)} {target.dtype}"
        )
    convert_slots(source, target, source_slots, target_slots)


def convert_slots(
    source: torch.Tensor, target: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """`copy_slots` that rounds to the type of ``target``, where both are floating. Shapes are not checked."""
    copies = source_slots.shape[0]
    if not runs_kernel(source):
        wanted = (source_slots >= 0) & (target_slots >= 0)
        target[:, target_slots[wanted]] = source[:, source_slots[wanted]].to(target.dtype)
        return
    if not copies or not target.numel():
        return
    assert source[0, 0].is_contiguous() and target[0, 0].is_contiguous()
    if source.dtype == target.dtype:
        source, target = as_words(source, target)
    words, strides = source[0, 0].numel(), (*source.stride()[:2], *target.stride()[:2])
    _copy_slots_kernel[(triton.cdiv(words, _BLOCK), source.shape[0], copies)](
        source, target, source_slots, target_slots, words, *strides, BLOCK=_BLOCK
    )


def as_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(layers, slots, words) views, in the widest integer type that divides all sizes, strides and offsets."""
    strides_bytes = [tensor.stride(dim) * tensor.element_size() for tensor in tensors for dim in (0, 1)]
    slot_bytes = math.prod(tensors[0].shape[2:]) * tensors[0].element_size()
    offsets_bytes = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    word = word_type(slot_bytes, *strides_bytes, *offsets_bytes)
    return [tensor.flatten(2).view(word) for tensor in tensors]


def word_type(*sizes_bytes: SupportsIndex) -> torch.dtype:
    """The widest integer type that divides all these sizes."""
    step = math.gcd(*sizes_bytes)
    return next(dtype for dtype in _WORDS if step % dtype.itemsize == 0)


@jit
def _copy_slots_kernel(
    source_ptr: tl.tensor,  # (layers, slots, words or elements), strided over layers and slots
    target_ptr: tl.tensor,
    source_slots_ptr: tl.tensor,
    target_slots_ptr: tl.tensor,
    words: tl.tensor,
    source_stride_layer: tl.int64,
    source_stride_slot: tl.int64,
    target_stride_layer: tl.int64,
    target_stride_slot: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK words of one copy in one layer."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    source_slot = tl.load(source_slots_ptr + tl.program_id(2)).to(tl.int64)
    target_slot = tl.load(target_slots_ptr + tl.program_id(2)).to(tl.int64)
    mask = (offsets < words) & (source_slot >= 0) & (target_slot >= 0)
    values = tl.load(
        source_ptr + layer * source_stride_layer + source_slot * source_stride_slot + offsets, mask=mask, other=0
    ).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr + layer * target_stride_layer + target_slot * target_stride_slot + offsets, values, mask=mask)
