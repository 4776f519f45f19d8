"""Zeros in place of entries whose checksum is wrong."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.slot_copies import as_words
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl

_BLOCK = 2048  # words


def zero_wrong(
    entries: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor, expected: torch.Tensor, places: torch.Tensor
) -> None:
    """``entries[:, ids[i]] = 0`` for every i with ``sums[i] != expected[places[i]]``: one launch, which mostly finds nothing to do.

    Does not synchronise with the device.

    Args:
        entries: (layers, all entries, *shape), strided over layers and entries, contiguous inside an entry.
        ids: (rows,) int64: entries; all differ.
        sums: (rows,) int64: checksums of what they hold.
        expected: (all places,) int64: checksums of what they should hold.
        places: (rows,) int64, may be strided.
    """
    if not runs_kernel(entries):
        entries[:, ids[sums != expected[places]]] = 0
        return
    if not len(ids) or not entries.numel():
        return
    assert entries[0, 0].is_contiguous()
    (words,) = as_words(entries)
    _zero_wrong_kernel[(len(ids), len(words))](
        words,
        ids,
        sums,
        expected,
        places,
        places.stride(0),
        words.shape[2],
        words.stride(0),
        words.stride(1),
        BLOCK=_BLOCK,
    )


@jit(  # else it would be compiled again for parts of an upload of ids
    do_not_specialize=["places_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "sums_ptr", "places_ptr"],
)
def _zero_wrong_kernel(
    entries_ptr: tl.tensor,  # (layers, all entries, words), strided over layers and entries
    ids_ptr: tl.tensor,  # (rows,)
    sums_ptr: tl.tensor,  # (rows,)
    expected_ptr: tl.tensor,  # (all places,)
    places_ptr: tl.tensor,  # (rows,), strided
    places_stride: tl.tensor,
    words: tl.tensor,
    stride_layer: tl.int64,
    stride_entry: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one entry in one layer."""
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + row * places_stride).to(tl.int64)
    if tl.load(sums_ptr + row) != tl.load(expected_ptr + place):
        entry = tl.load(ids_ptr + row).to(tl.int64)
        first = entries_ptr + layer * stride_layer + entry * stride_entry
        for start in range(0, words, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], dtype=entries_ptr.dtype.element_ty)
            tl.store(first + offsets, zeros, mask=offsets < words)
