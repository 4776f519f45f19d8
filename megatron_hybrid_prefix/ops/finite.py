"""Rows that are not finite: they become zeros, and the request is marked, so that no other row and no other request sees them.

Attention and chunked scans multiply what a row must not see by zero, and zero times NaN is NaN. So a key, a value or an input of a
recurrence that is not finite, or so large that a product of two overflows, is zero for all other rows. The marks are read with the
step's logits: a marked request has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

LIMIT = 1e18  # the sum of 256 squares is still a float32


def zero_wrong(values: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Inputs of a recurrence, with zero for what is not finite or beyond `LIMIT`: what kernels do with theirs, in plain PyTorch.

    Args:
        values: (tokens, width), floating.
        wrong: (>= tokens,) int32, gets 1 for each token with such a value.
    """
    fine = values.abs() <= LIMIT
    if fine.all():
        return values
    wrong[: len(values)][~fine.all(dim=1)] = 1
    return values.masked_fill(~fine, 0)


def zero_wrong_rows(tensors: Sequence[torch.Tensor], wrong: torch.Tensor) -> None:
    """Set rows that are not finite to zero, in place.

    Args:
        tensors: Each (rows, ...), floating: keys and values of a step's tokens. All have the same number of rows.
        wrong: (>= rows,) int32, gets 1 for each such row.
    """
    for tensor in tensors if len(tensors[0]) else ():
        rows = tensor.view(tensor.shape[0], -1, tensor.shape[-1])
        if not runs_kernel(rows):
            bad = ~rows.isfinite().flatten(1).all(dim=1)
            if bad.any():
                rows[bad] = 0
                wrong[: len(bad)][bad] = 1
        else:
            assert rows.stride(2) == 1
            width = triton.next_power_of_2(rows.shape[2])
            together = triton.next_power_of_2(rows.shape[1])
            _zero_wrong_rows_kernel[(len(rows),)](
                rows, wrong, rows.stride(0), rows.stride(1), *rows.shape[1:], HEADS=together, BLOCK=width, num_warps=1
            )


def replace_wrong_logits(logits: torch.Tensor, rows: torch.Tensor | None, count: int) -> torch.Tensor:
    """Set rows of logits from which nothing can be sampled to zero, in place: with NaN or +inf, or with nothing but -inf.

    Args:
        logits: (>= count, vocabulary), floating; rows may be strided.
        rows: (>= count,) integer: which rows to look at; None: the first.
        count: Number of rows.

    Returns:
        (count,) bool, True for such a row.
    """
    own = logits[:count] if rows is None else logits[rows[:count].long()]
    top = own.amax(dim=-1) if count else own.new_zeros(0)
    wrong = top - top != 0  # NaN of NaN, and of infinities
    own.masked_fill_(wrong[:, None], 0)
    if rows is not None:
        logits.index_copy_(0, rows[:count].long(), own)
    return wrong


if triton is not None:

    @triton.jit
    def either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
        """Combines the bits of a reduction."""
        return a | b

    @triton.jit
    def is_wrong(values: tl.tensor) -> tl.tensor:
        """Whether a value is NaN or larger than `LIMIT`."""
        return ~(tl.abs(values.to(tl.float32)) <= 1e18)

    @triton.jit
    def _zero_wrong_rows_kernel(
        rows_ptr: tl.tensor,  # (rows, heads, width), strided over rows and heads
        wrong_ptr: tl.tensor,  # (rows,)
        stride_row: tl.int64,
        stride_head: tl.int64,
        heads: tl.tensor,
        width: tl.tensor,
        HEADS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: one row."""
        row = tl.program_id(0).to(tl.int64)
        head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
        at = rows_ptr + row * stride_row + head * stride_head + column
        mask = (head < heads) & (column < width)
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        bad = tl.max(tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 1), 0)
        if bad:
            tl.store(at, tl.zeros([HEADS, BLOCK], rows_ptr.dtype.element_ty), mask=mask)
            tl.store(wrong_ptr + row, 1)
