"""Activations whose result for an element does not depend on its position in the tensor.

They replace no upstream symbol: Triton kernels compute them inline, and models are built with `squared_relu` and `SwiGLU`. torch's
`silu`, `sigmoid`, `softplus` and `log1p` run vector code over most of a tensor and scalar code over each thread's tail, and the two
round differently (seen with torch 2.11 on AVX-512). A token's bits would then depend on the other tokens, and a reused prefix could not
be compared bit by bit with a recomputed one. `exp`, `log` and the four arithmetic operations do not have this problem.
"""

from typing import Any

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

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


if triton is not None:

    @triton.jit
    def _swiglu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.int64, BLOCK: tl.constexpr) -> None:
        """One program: BLOCK elements of a row."""
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(x_ptr + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + (row * 2 + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=at < width)

    @triton.jit
    def _squared_relu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.int64, BLOCK: tl.constexpr) -> None:
        """One program: BLOCK elements."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        tl.store(out_ptr + at, (x * x).to(out_ptr.dtype.element_ty), mask=at < count)
