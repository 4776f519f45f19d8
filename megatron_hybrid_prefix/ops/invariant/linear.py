"""Matrix products whose rows do not depend on each other."""

from __future__ import annotations

import torch

TILE_ROWS = 16
"""Rows of a product on a CPU. More are no faster per row from here on, and a decode of one request computes all of them."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``, each row with the same bits in any batch.

    BLAS chooses a kernel, and with it the order of a sum, by the number of rows. On a CPU every product therefore has
    `TILE_ROWS` rows, the last of them zeros if need be.

    Args:
        x: (..., inputs), floating; rows may be strided.
        weight: (outputs, inputs), x's dtype, contiguous.

    Returns:
        (..., outputs) in x's dtype.
    """
    if x.is_cuda:
        from megatron_hybrid_prefix.ops.invariant.linear_triton import linear as on_gpu

        y: torch.Tensor = on_gpu(x, weight)
        return y
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(len(rows), len(weight))
    transposed = weight.t()
    for start in range(0, len(rows), TILE_ROWS):
        some = rows[start : start + TILE_ROWS]
        tile = rows.new_zeros(TILE_ROWS, rows.shape[1])  # new memory: the same alignment each time
        tile[: len(some)] = some
        out[start : start + TILE_ROWS] = torch.mm(tile, transposed)[: len(some)]
    return out.view(*x.shape[:-1], len(weight))
