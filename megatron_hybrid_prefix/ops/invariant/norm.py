"""RMS norm of rows that do not depend on each other."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.invariant.rows import aligned_rows
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_FEATURES = 4096  # that a program holds at a time; it reads a longer row twice


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise by the root mean square of the last dimension.

    On a GPU a program reads whole rows, in an order that depends on their length alone, and rounds once.

    Args:
        x: (..., features), floating.
        weight: (features,), floating, x's dtype on a CPU.
        eps: Added to the mean square.

    Returns:
        Shape and dtype of x; on a GPU contiguous.
    """
    if not runs_kernel(x):  # PyTorch sums each row by itself on a CPU; tests/kernels/test_invariant.py shows it
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    rows, stride = aligned_rows(x)
    count, features = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(features), _FEATURES)
    together = max(1, _FEATURES // 2 // block)
    if count:
        _rms_norm_kernel[(triton.cdiv(count, together),)](
            rows,
            weight,
            out,
            stride,
            count,
            eps,
            FEATURES=features,
            ROWS=together,
            BLOCK=block,
            num_warps=min(8, max(4, block // 256)),
        )
    return out


@jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,  # (rows, FEATURES), strided over rows
    weight_ptr: tl.tensor,  # (FEATURES,)
    out_ptr: tl.tensor,  # (rows, FEATURES), contiguous
    stride: tl.int64,
    rows: tl.tensor,
    eps: tl.tensor,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, FEATURES, BLOCK):
        at = first + column
        x = tl.load(x_ptr + row * stride + at, mask=(row < rows) & (at < FEATURES), other=0.0).to(tl.float32)
        squares = tl.fma(x, x, squares)
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / FEATURES + eps)
    for first in tl.static_range(0, FEATURES, BLOCK):
        at = first + column
        mask = (row < rows) & (at < FEATURES)
        x = tl.load(x_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=at < FEATURES, other=0.0).to(tl.float32)
        out = x * scale[:, None] * weight
        tl.store(out_ptr + row * FEATURES + at, out.to(out_ptr.dtype.element_ty), mask=mask)
