"""A layer's sum with the residual and the RMS norm that the next layer begins with: one pass over (tokens, hidden) in place of two.

PyTorch's norm of one dtype (2.11, on a GPU) adds a row's squares in a fixed order: each of 128 threads its fours of neighbours, then
halves of the threads. The kernel does the same, so a step's bits do not tell which of both it took. For another PyTorch, and
for a weight of another dtype, the error is the same: everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_MOST_FEATURES = 8192  # that 128 threads hold


def can_fuse(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm_of_sum` takes rows (..., features): contiguous, of a width that PyTorch reads in fours, on a GPU."""
    width = x.shape[-1]
    fits = width % 4 == 0 and width <= _MOST_FEATURES and x.is_contiguous() and weight.is_contiguous()
    return fits and runs_kernel(x) and x.dtype != torch.float64


def norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, multiplier: float = 1.0
) -> torch.Tensor:
    """Set x to ``residual + multiplier * x``, rounded once, and normalise that by its root mean square.

    Args:
        x: (..., features), floating, contiguous; see `can_fuse`.
        residual: Shape and dtype of x, contiguous.
        weight: (features,), floating.
        epsilon: Added to the mean square.
        multiplier: See above.

    Returns:
        The norm: shape and dtype of x, rounded once.
    """
    if not runs_kernel(x):
        x.copy_(torch.add(residual, x, alpha=multiplier))
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(x.dtype)
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        sizes = {"WIDTH": width, "PARTS": triton.cdiv(width, 512)}
        _norm_of_sum_kernel[(x.numel() // width,)](x, residual, weight, out, multiplier, epsilon, **sizes, num_warps=4)
    return out


@jit
def _norm_of_sum_kernel(
    x_ptr: tl.tensor,  # (rows, WIDTH) as residual and out, contiguous; gets the sum
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,  # (WIDTH,)
    out_ptr: tl.tensor,
    multiplier: tl.float32,
    epsilon: tl.float32,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One program: a row, in parts of 128 x 4."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, 128)[:, None] * 4 + tl.arange(0, 4)[None, :]
    sums, squares = (), tl.zeros((128,), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * 512 + column
        x = tl.load(x_ptr + row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        x = tl.fma(x, multiplier, residual).to(x_ptr.dtype.element_ty)
        sums += (x,)  # type: ignore[assignment]
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (128, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        squares = tl.fma(second, second, tl.fma(first, first, squares))
        squares = tl.fma(fourth, fourth, tl.fma(third, third, squares))
    halves = tl.reshape(squares, (4, 32))
    for step in tl.static_range(5):  # of 32 threads; each sum is of two, so it has one order
        halves = tl.sum(tl.reshape(halves, (4, 2, 16 >> step)), 1)
    total = tl.sum(tl.sum(tl.reshape(halves, (2, 2)), 0), 0)
    scale = tl.rsqrt(tl.div_rn(total, WIDTH * 1.0) + epsilon)
    for part in tl.static_range(PARTS):
        at = part * 512 + column
        tl.store(x_ptr + row + at, sums[part], mask=at < WIDTH)
        weight = tl.load(weight_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        out = weight * (sums[part].to(tl.float32) * scale)
        tl.store(out_ptr + row + at, out.to(out_ptr.dtype.element_ty), mask=at < WIDTH)  # type: ignore[unreachable]
