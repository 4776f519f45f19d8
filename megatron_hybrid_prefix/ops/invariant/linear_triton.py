"""`linear.linear` on a GPU: each output row has the same bits whatever other rows are multiplied with it.

An element is one chain of additions over ascending input features, in float32 on the tensor cores, rounded once. No tile
splits the features over programs. Tiles differ in rows and columns, which choose where an element is computed, and in how many
features are loaded at a time. On an H200 all tiles of bfloat16 gave the same bits, those of fewer rows too, which another
instruction multiplies (``tests/gpu/bits_kernels.py`` compares them). So a decode may use small tiles, and a prefill large ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, tl, triton

_ALIGNMENT_BYTES = 16  # of a row, in the descriptors of tensors


class Tile(NamedTuple):
    """The tile that one program computes at a time.

    Attributes:
        rows: Of the output.
        columns: Of the output.
        depth: Input features that are loaded at a time.
        warps: Of a program.
        stages: Loads that are under way at a time.
        group: Tiles of rows that neighbouring programs compute with the same columns.
        persistent: One program per multiprocessor computes many tiles; else one program a tile.
        parts: Parts of the columns that are stored one after another, to need less shared memory.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    persistent: bool = False
    parts: int = 1


# Each with the share of the last one's speed that its tiles reached on an H200.
_TILES = (
    (Tile(64, 32, 256, 4, 4), 0.27),
    (Tile(64, 64, 128, 4, 5), 0.48),
    (Tile(64, 128, 64, 4, 6), 0.71),
    (Tile(128, 128, 64, 4, 5, persistent=True), 0.965),
    (Tile(128, 256, 64, 8, 3, persistent=True, parts=2), 1.0),
)
_FEW_ROWS = 16  # other tensor-core instructions multiply so few, with the same bits


@lru_cache(maxsize=4096)
def tile_for(rows: int, columns: int, dtype: torch.dtype, multiprocessors: int) -> Tile:
    """The tile for an output of this many rows and columns: the one whose tiles take the fewest rounds, weighted by their cost."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 2)
    if rows <= _FEW_ROWS:
        narrow = triton.cdiv(columns, 32) <= multiprocessors
        return Tile(16, 32, 128, 4, 8) if narrow else Tile(16, 64, 128, 4, 6)

    def cost(entry: tuple[Tile, float]) -> float:
        tile, speed = entry
        tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
        return float(triton.cdiv(tiles, multiprocessors) * tile.rows * tile.columns / speed)

    return min(_TILES, key=cost)[0]


def linear(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `linear.linear`.

    Args:
        x: (..., in features), bfloat16, float16 or float32.
        weight: (out features, in features), the same dtype.
        tile: None: `tile_for` chooses it. Tests and benchmarks give one.
        dtype: Of the output; None: the same.

    Returns:
        (..., out features), contiguous.
    """
    columns, depth = weight.shape
    rows = x.reshape(-1, depth)
    out_shape = (*x.shape[:-1], columns)
    rows, weight = _described(rows), _described(weight)
    row_quantum = _ALIGNMENT_BYTES // x.element_size()
    out = x.new_empty(len(rows), -(-columns // row_quantum) * row_quantum, dtype=dtype)
    if not out.numel():
        return out.view(out_shape)
    if tile is None:
        tile = tile_for(len(rows), columns, x.dtype, multiprocessors(x.device))
    from triton.tools.tensor_descriptor import TensorDescriptor

    tiles = triton.cdiv(len(rows), tile.rows) * triton.cdiv(columns, tile.columns)
    programs = min(tiles, multiprocessors(x.device)) if tile.persistent else tiles
    _linear_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // tile.parts]),
        len(rows),
        columns,
        rows.shape[1],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        PARTS=tile.parts,
        PERSISTENT=tile.persistent,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out[:, :columns].contiguous().view(out_shape)


def _described(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, copied if a descriptor cannot describe it; rows of a copy are padded with zeros, which add nothing."""
    quantum = _ALIGNMENT_BYTES // matrix.element_size()
    if matrix.stride(1) == 1 and matrix.stride(0) % quantum == 0 and matrix.data_ptr() % _ALIGNMENT_BYTES == 0:
        return matrix
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % quantum)).contiguous()


@jit(do_not_specialize=["rows", "columns", "depth"])  # one compiled kernel a tile
def _linear_kernel(
    x: tl.tensor_descriptor,  # descriptor of (rows, depth), blocks of (ROWS, DEPTH)
    weight: tl.tensor_descriptor,  # descriptor of (columns, depth), blocks of (COLUMNS, DEPTH)
    out: tl.tensor_descriptor,  # descriptor of (rows, columns), blocks of (ROWS, COLUMNS / PARTS)
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PERSISTENT: tl.constexpr,
) -> None:
    """All tiles, or one."""
    if PERSISTENT:
        tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _one_tile(tile, x, weight, out, rows, columns, depth, ROWS, COLUMNS, DEPTH, GROUP, PARTS)
    else:
        _one_tile(tl.program_id(0), x, weight, out, rows, columns, depth, ROWS, COLUMNS, DEPTH, GROUP, PARTS)


@jit
def _one_tile(
    tile: tl.tensor,
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One tile of the output. Tiles are numbered so that those of neighbouring programs share rows and columns."""
    tiles_of_group = GROUP * tl.cdiv(columns, COLUMNS)
    first = (tile // tiles_of_group) * GROUP
    group = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    row = (first + (tile % tiles_of_group) % group) * ROWS
    column = ((tile % tiles_of_group) // group) * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for feature in range(0, depth, DEPTH):
        total = tl.dot(x.load([row, feature]), weight.load([column, feature]).T, total, input_precision="ieee")
    if PARTS == 1:
        out.store([row, column], total.to(out.dtype))
    else:
        left, right = total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        out.store([row, column], left.to(out.dtype))
        out.store([row, column + COLUMNS // 2], right.to(out.dtype))
