"""Checksums of rows of memory, to verify loads from another tier."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_BLOCK = 4096  # words of 8 bytes


def checksum_rows(rows: torch.Tensor) -> torch.Tensor:
    """``sum_i rows[r, i] * (2 i + 1)`` modulo 2^64 for every row. Flipped bits and swapped words change it.

    Args:
        rows: (rows, words) int64, contiguous inside a row.

    Returns:
        (rows,) int64; the same on every device.
    """
    if not runs_kernel(rows):
        weights = 2 * torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device) + 1
        return torch.stack([(row * weights).sum() for row in rows]) if len(rows) else weights.new_zeros(0)
    assert rows.stride(1) == 1
    sums = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    if rows.numel():
        _checksum_rows_kernel[(triton.cdiv(rows.shape[1], _BLOCK), rows.shape[0])](
            rows, sums, rows.shape[1], rows.stride(0), BLOCK=_BLOCK
        )
    return sums


@jit
def _checksum_rows_kernel(
    rows_ptr: tl.tensor,  # (rows, words)
    sums_ptr: tl.tensor,
    words: tl.tensor,
    row_stride: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK words of one row."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    values = tl.load(rows_ptr + row * row_stride + offsets, mask=offsets < words, other=0)
    tl.atomic_add(sums_ptr + row, tl.sum(values * (2 * offsets + 1), axis=0))
