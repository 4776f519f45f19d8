"""The squared ReLU of feed-forward layers, without ``torch.compile``: megatron compiles its own at each process's first step, for seconds."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_BLOCK = 2048


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``relu(x) ** 2``, with the bits of PyTorch's two operations.

    Args:
        x: Floating, any shape.

    Returns:
        Shape and dtype of x.
    """
    if not runs_kernel(x) or x.dtype == torch.float64 or (torch.is_grad_enabled() and x.requires_grad):
        return torch.relu(x) ** 2
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _squared_relu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK)
    return out


if triton is not None:

    @triton.jit
    def _squared_relu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.int64, BLOCK: tl.constexpr) -> None:
        """One program: BLOCK elements."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        tl.store(out_ptr + at, (x * x).to(out_ptr.dtype.element_ty), mask=at < count)
