"""Gated RMS norm on a GPU: `kernels.norm.rmsnorm_fn` in one Triton kernel, without gradients.

Used if mamba-ssm, whose kernel megatron's mixer uses, is not installed.
"""

import torch
import triton
import triton.language as tl

# Maximum features that a program holds at a time; it reads a longer group twice.
_MOST_FEATURES = 4096


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Normalise each group of features by its root mean square, with an optional SiLU gate.

    Computes in float32.

    Args:
        x: (..., dim), floating, on a GPU.
        weight: (dim,), floating.
        z: shape of x, or None: ``norm(x) * silu(z)``, or ``norm(x * silu(z))`` if not ``norm_before_gate``.
        eps: Added to the mean square.
        group_size: Features that share a root mean square; divides dim.
        norm_before_gate: See z.

    Returns:
        Shape and dtype of x, contiguous.
    """
    dim = x.shape[-1]
    rows = _rows(x, dim)
    gate = rows if z is None else _rows(z, dim)
    out = torch.empty((rows.shape[0], dim), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(group_size), _MOST_FEATURES)
    if rows.shape[0]:
        _gated_rms_norm_kernel[(rows.shape[0], dim // group_size)](
            rows,
            gate,
            weight,
            out,
            rows.stride(0),
            gate.stride(0),
            dim,
            eps,
            GROUP=group_size,
            BLOCK=block,
            HAS_GATE=z is not None,
            NORM_FIRST=norm_before_gate,
            num_warps=min(8, max(1, block // 256)),
        )
    return out.view(x.shape)


def _rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """(rows, dim), strided over rows, contiguous inside one."""
    rows = tensor.reshape(-1, dim)
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def _load(
    x_ptr: tl.tensor,
    z_ptr: tl.tensor,
    features: tl.tensor,
    mask: tl.tensor,
    HAS_GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The values to normalise, and the factor to multiply them by afterwards; float32."""
    x = tl.load(x_ptr + features, mask=mask, other=0.0).to(tl.float32)
    gate = tl.full(x.shape, 1.0, tl.float32)
    if HAS_GATE:
        z = tl.load(z_ptr + features, mask=mask, other=0.0).to(tl.float32)
        gate = z / (1.0 + tl.exp(-z))
    if HAS_GATE and not NORM_FIRST:
        x = x * gate
        gate = tl.full(x.shape, 1.0, tl.float32)
    return x, gate


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr: tl.tensor,  # (rows, dim), strided over rows
    z_ptr: tl.tensor,  # (rows, dim), strided over rows; unused without a gate
    weight_ptr: tl.tensor,  # (dim,)
    out_ptr: tl.tensor,  # (rows, dim), contiguous
    x_stride: tl.int64,
    z_stride: tl.int64,
    dim: tl.int64,
    eps: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
) -> None:
    """One program: one group of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    x_ptr += row * x_stride + first
    z_ptr += row * z_stride + first
    out_ptr += row * dim + first
    weight_ptr += first
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, GROUP, BLOCK):
        features = start + columns
        x, gate = _load(x_ptr, z_ptr, features, features < GROUP, HAS_GATE, NORM_FIRST)
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares) / GROUP + eps)
    for start in tl.static_range(0, GROUP, BLOCK):
        features = start + columns
        mask = features < GROUP
        x, gate = _load(x_ptr, z_ptr, features, mask, HAS_GATE, NORM_FIRST)
        weight = tl.load(weight_ptr + features, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + features, (x * scale * weight * gate).to(out_ptr.dtype.element_ty), mask=mask)
