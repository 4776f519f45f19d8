"""Matrix states in int8: what a checkpoint keeps of them, and back.

An element is an integer times the scale of its row and that of its column. A state is a sum of outer products, so some of its rows and some
of its columns are much larger than others; of the schemes that were compared this one has the smallest error of log-probs per byte
(docs/states.md). The scale of a column is the root of its largest element, that of a row what is left then, over 127. Scales are bfloat16, whose
exponents are those of float32. A matrix with an element that is not finite is not finite afterwards.
"""

from __future__ import annotations

import torch

_MOST = 127


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
