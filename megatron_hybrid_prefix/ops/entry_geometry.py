"""How a tensor's entries lie on the device and in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.slot_copies import word_type


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryGeometry:
    """How a tensor's entries lie on the device and in pages.

    Attributes:
        row_bytes: Bytes of an entry, in all layers.
        row_pages: Pages of a row that hold some of them.
        layer_bytes: Bytes of an entry in a layer.
        layer_step_bytes: From a layer to the next one.
        entry_step_bytes: From an entry to the next one.
        word: The widest integer type that divides all sizes and steps.
        is_contiguous: Whether an entry is, inside a layer.
    """

    row_bytes: int
    row_pages: int
    layer_bytes: int
    layer_step_bytes: int
    entry_step_bytes: int
    word: torch.dtype
    is_contiguous: bool


def geometry_of(entries: torch.Tensor, start_bytes: int, page_bytes: int) -> EntryGeometry:
    """The geometry of ``entries``, (layers, all entries, *shape), whose rows begin ``start_bytes`` into pages of ``page_bytes``."""
    return _geometry(
        entries.shape,
        entries.stride(),
        entries.storage_offset(),
        entries.element_size(),
        start_bytes=start_bytes,
        page_bytes=page_bytes,
    )


@lru_cache(maxsize=256)  # the same few tensors again and again; each launch would take the CPU 20 us longer
def _geometry(
    shape: torch.Size, strides: tuple[int, ...], offset: int, item_bytes: int, *, start_bytes: int, page_bytes: int
) -> EntryGeometry:
    layers, _, *inside = shape
    layer_bytes = math.prod(inside) * item_bytes
    layer_step_bytes, entry_step_bytes = (stride * item_bytes for stride in strides[:2])
    row_bytes = layers * layer_bytes
    return EntryGeometry(
        row_bytes=row_bytes,
        row_pages=ceil_div(start_bytes + row_bytes, page_bytes) - start_bytes // page_bytes,
        layer_bytes=layer_bytes,
        layer_step_bytes=layer_step_bytes,
        entry_step_bytes=entry_step_bytes,
        word=word_type(start_bytes, page_bytes, layer_bytes, layer_step_bytes, entry_step_bytes, offset * item_bytes),
        is_contiguous=all(
            size == 1 or stride == math.prod(inside[dim + 1 :])
            for dim, (size, stride) in enumerate(zip(inside, strides[2:], strict=True))
        ),
    )
