"""Rows as the kernels of this folder want them: where a tensor lies in memory must not choose how a row is reduced."""

from __future__ import annotations

import torch

ALIGNMENT_BYTES = 16


def aligned_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """All leading dimensions as one.

    Triton compiles one kernel for pointers and strides that are multiples of 16 bytes, and another for those that are not;
    the two may add a row's elements in different orders. So a tensor that does not start at such an address is copied.

    Args:
        x: (..., features).

    Returns:
        (rows, features), a view where possible, contiguous inside a row, and the elements from one row to the next.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 or rows.data_ptr() % ALIGNMENT_BYTES:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows, rows.stride(0) if len(rows) > 1 else rows.shape[1]
