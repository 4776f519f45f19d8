"""Log-probs of rows that do not depend on each other."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.invariant.rows import aligned_rows
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_COLUMNS = 8192  # that a program reads at a time


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax over the last dimension.

    On a GPU one program computes a row, in an order that depends on the length of a row alone. PyTorch's kernel adds in an order
    that depends on where the row lies in memory, so on its number where the vocabulary is no multiple of 8. Logits are brought to
    float32 first: for another type Triton compiles another kernel, which adds in another order.

    Args:
        logits: (..., vocabulary), floating; -inf for tokens that are not allowed.

    Returns:
        The same shape, float32, contiguous.
    """
    if not runs_kernel(logits):  # PyTorch sums each row by itself on a CPU; tests/kernels/test_invariant.py shows it
        return torch.log_softmax(logits.float(), dim=-1)
    rows, stride = aligned_rows(logits.float())
    count, columns = rows.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if count:
        block = min(triton.next_power_of_2(columns), _COLUMNS)
        _log_softmax_kernel[(count,)](rows, out, stride, COLUMNS=columns, BLOCK=block, num_warps=8)
    return out


@jit
def _log_softmax_kernel(
    logits_ptr: tl.tensor,  # (rows, COLUMNS), strided over rows
    out_ptr: tl.tensor,  # (rows, COLUMNS) float32, contiguous
    stride: tl.int64,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row, read three times."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        at = first + column
        x = tl.load(logits_ptr + at, mask=at < COLUMNS, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        at = first + column
        x = tl.load(logits_ptr + at, mask=at < COLUMNS, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - top)
    log_total = tl.log(tl.sum(total, 0))
    for first in range(0, COLUMNS, BLOCK):
        at = first + column
        x = tl.load(logits_ptr + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * COLUMNS + at, x - top - log_total, mask=at < COLUMNS)
