"""Matrix products whose rows do not depend on each other."""

from __future__ import annotations

import torch

TILE_ROWS = 16
"""Rows of a product on a CPU. More are no faster per row from here on, and a decode of one request computes all of them."""
_tile_rows: dict[tuple[torch.dtype, int, int, int], int] = {}  # by dtype, outputs, inputs, threads


def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x @ weight.T``, each row with the same bits in any batch.

    BLAS chooses a kernel, and with it the order of a sum, by the number of rows. On a CPU every product therefore has
    `TILE_ROWS` rows, the last of them zeros if need be. For some sizes a row's bits depend on its place among these rows, too
    (seen with MKL's AVX2 kernels, two threads and 100 inputs); rows are then multiplied one by one.

    Args:
        x: (..., inputs), floating; rows may be strided.
        weight: (outputs, inputs), x's dtype, contiguous.
        dtype: Of the outputs; None: x's.

    Returns:
        (..., outputs).
    """
    if x.is_cuda:
        from megatron_hybrid_prefix.ops.invariant.linear_triton import linear as on_gpu

        return on_gpu(x, weight, dtype=dtype)
    x, weight = x.to(dtype or x.dtype), weight.to(dtype or x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    size = (weight.dtype, *weight.shape, torch.get_num_threads())
    if size not in _tile_rows:
        _tile_rows[size] = 1 if _depends_on_place(weight) else TILE_ROWS
    return _in_tiles(rows, weight, _tile_rows[size]).view(*x.shape[:-1], len(weight))


def _in_tiles(rows: torch.Tensor, weight: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """(rows, outputs): products of ``tile_rows`` rows each."""
    out = rows.new_empty(len(rows), len(weight))
    transposed = weight.t()
    for start in range(0, len(rows), tile_rows):
        some = rows[start : start + tile_rows]
        tile = rows.new_zeros(tile_rows, rows.shape[1])  # new memory: the same alignment each time
        tile[: len(some)] = some
        out[start : start + tile_rows] = torch.mm(tile, transposed)[: len(some)]
    return out


def _depends_on_place(weight: torch.Tensor) -> bool:
    """Whether a row of a tile has other bits at another place of the tile: tries each row at each place."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TILE_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    # Not the weights themselves, which may be zeros.
    weight = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    first = _in_tiles(rows, weight, TILE_ROWS)
    return any(
        not torch.equal(_in_tiles(rows.roll(places, 0), weight, TILE_ROWS), first.roll(places, 0))
        for places in range(1, TILE_ROWS)
    )
