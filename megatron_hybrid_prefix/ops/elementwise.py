"""Activations whose result for an element does not depend on its position in the tensor, and zeros in place of what is not finite.

They replace no upstream symbol: Triton kernels compute them inline, and models are built with `squared_relu` and `SwiGLU`. torch's
`silu`, `sigmoid`, `softplus` and `log1p` run vector code over most of a tensor and scalar code over each thread's tail, and the two
round differently (seen with torch 2.11 on AVX-512). A token's bits would then depend on the other tokens, and a reused prefix could not
be compared bit by bit with a recomputed one. `exp`, `log` and the four arithmetic operations do not have this problem.

**Rows that are not finite** become zeros, and the request is marked, so that no other row and no other request sees them.
Attention and chunked scans multiply what a row must not see by zero, and zero times NaN is NaN. So a key, a value or an input of a
recurrence that is not finite, or so large that a product of two overflows, is zero for all other rows. The marks are read with the
step's logits: a marked request has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import constexpr, jit, runs_kernel, tl, triton

LIMIT = constexpr(1e18)  # the sum of 256 squares is still a float32

# Above this, softplus(x) equals x in float32; upstream's kernels use the same limit.
SOFTPLUS_LINEAR_ABOVE = 20.0


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype to compute in: float64 for a float64 tensor, else float32 (as upstream's kernels do)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def silu(x: torch.Tensor) -> torch.Tensor:
    """Returns `x * sigmoid(x)`, same shape and dtype as `x`."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Returns `log(1 + exp(x))` up to `SOFTPLUS_LINEAR_ABOVE` and `x` above it, same shape and dtype as `x`.

    `log(w) * u / (w - 1)` with `u = exp(x)`, `w = 1 + u` is log1p(u) to rounding: the error made in forming `w`
    cancels (Kahan). The plain `log(1 + exp(x))` that upstream uses loses all digits for x below about -16.
    """
    u = torch.exp(x)
    w = 1.0 + u
    log1p_u = torch.where(w == 1.0, u, torch.log(w) * (u / (w - 1.0)))
    return torch.where(x <= SOFTPLUS_LINEAR_ABOVE, log1p_u, x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns `1 / (1 + exp(-x))`, same shape and dtype as `x`."""
    return 1.0 / (1.0 + torch.exp(-x))


_BLOCK = 2048


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``relu(x) ** 2``, with the bits of PyTorch's two operations. megatron compiles its own in each process, for seconds.

    Args:
        x: Floating, any shape.

    Returns:
        Shape and dtype of x.
    """
    if not _runs_kernel(x):
        return torch.relu(x) ** 2
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _squared_relu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK)
    return out


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, computed in float32 (float64) and rounded once on a GPU, by PyTorch elsewhere.

    Args:
        x: (..., 2 x width), floating: gate, then up.

    Returns:
        (..., width), the dtype of x. An element's bits depend on its gate and its up alone on a GPU.
    """
    width = x.shape[-1] // 2
    if not _runs_kernel(x):
        return torch.nn.functional.silu(x[..., :width]) * x[..., width:]
    rows = x.reshape(-1, 2 * width).contiguous()
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if out.numel():
        _swiglu_kernel[(len(rows), triton.cdiv(width, _BLOCK))](rows, out, width, BLOCK=_BLOCK)
    return out


class SwiGLU(torch.nn.Module):
    """`swiglu` as megatron's MLP asks for it.

    Args:
        config: Of the layer, a ``TransformerConfig``.

    Raises:
        ValueError: The layer has another activation.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
        if not (plain and config.gated_linear_unit and config.activation_func is torch.nn.functional.silu):
            raise ValueError("use_te_activation_func=True: these layers have SwiGLU only, without a clamp or an offset")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `swiglu`."""
        return swiglu(x)


def _runs_kernel(x: torch.Tensor) -> bool:
    return runs_kernel(x) and x.dtype != torch.float64 and not (torch.is_grad_enabled() and x.requires_grad)


def zero_wrong(values: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Inputs of a recurrence, with zero for what is not finite or beyond `LIMIT`: what kernels do with theirs, in plain PyTorch.

    Args:
        values: (tokens, width), floating.
        wrong: (>= tokens,) int32, gets 1 for each token with such a value.
    """
    fine = values.abs() <= LIMIT.value
    if fine.all():
        return values
    wrong[: len(values)][~fine.all(dim=1)] = 1
    return values.masked_fill(~fine, 0)


def zero_wrong_rows(tensors: Sequence[torch.Tensor], wrong: torch.Tensor) -> None:
    """Set rows that are not finite to zero, in place.

    Args:
        tensors: Each (rows, ..., width), floating: keys and values of a step's tokens, or one of them. All have one shape.
        wrong: (>= rows,) int32, gets 1 for each such row.
    """
    each = [tensor.view(len(tensor), -1, tensor.shape[-1]) for tensor in tensors if len(tensor)]
    if not each:
        return
    first, last = each[0], each[-1]
    if not runs_kernel(first):
        for rows in each:
            bad = ~rows.isfinite().flatten(1).all(dim=1)
            if bad.any():
                rows[bad] = 0
                wrong[: len(bad)][bad] = 1
        return
    assert first.shape == last.shape and first.stride(2) == last.stride(2) == 1
    together, width = (triton.next_power_of_2(size) for size in first.shape[1:])
    strides = *first.stride()[:2], *last.stride()[:2]
    _zero_wrong_rows_kernel[(len(first),)](
        first, last, wrong, *strides, *first.shape[1:], BOTH=len(each) > 1, HEADS=together, BLOCK=width, num_warps=1
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


@jit
def stable_softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), also where 1 + exp(x) rounds to 1: then log(u) is corrected by what u = 1 + exp(x) lost."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    lost = u - 1.0
    found = tl.where(lost == 0.0, e, tl.log(u) * (e / tl.where(lost == 0.0, 1.0, lost)))
    return tl.where(x > 20.0, x, found)


@jit
def _swiglu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.int64, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK elements of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=at < width)


@jit
def _squared_relu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.int64, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    tl.store(out_ptr + at, (x * x).to(out_ptr.dtype.element_ty), mask=at < count)


@jit
def either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Combines the bits of a reduction."""
    return a | b


@jit
def is_wrong(values: tl.tensor) -> tl.tensor:
    """Whether a value is NaN or larger than `LIMIT`."""
    return ~(tl.abs(values.to(tl.float32)) <= LIMIT)


@jit
def _zero_wrong_row(
    rows_ptr: tl.tensor,
    wrong_ptr: tl.tensor,
    stride_row: tl.int64,
    stride_head: tl.int64,
    heads: tl.tensor,
    width: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    at = rows_ptr + row * stride_row + head * stride_head + column
    mask = (head < heads) & (column < width)
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    bad = tl.max(tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 1), 0)
    if bad:
        tl.store(at, tl.zeros([HEADS, BLOCK], rows_ptr.dtype.element_ty), mask=mask)
        tl.store(wrong_ptr + row, 1)


@jit
def _zero_wrong_rows_kernel(
    first_ptr: tl.tensor,  # (rows, heads, width), strided over rows and heads
    last_ptr: tl.tensor,  # likewise; unused without BOTH
    wrong_ptr: tl.tensor,  # (rows,)
    stride_first_row: tl.int64,
    stride_first_head: tl.int64,
    stride_last_row: tl.int64,
    stride_last_head: tl.int64,
    heads: tl.tensor,
    width: tl.tensor,
    BOTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row of both."""
    _zero_wrong_row(first_ptr, wrong_ptr, stride_first_row, stride_first_head, heads, width, HEADS, BLOCK)
    if BOTH:
        _zero_wrong_row(last_ptr, wrong_ptr, stride_last_row, stride_last_head, heads, width, HEADS, BLOCK)
