"""Gated RMS norm.

Same parameters as `mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn`. `norm_triton` is the version for a GPU.
"""

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Normalise by the root mean square, with an optional SiLU gate; differentiable.

    Args:
        x: (..., dim), floating.
        weight: (dim,), floating.
        bias: (dim,), floating, or None.
        z: (..., dim), floating, or None: `norm(x) * silu(z)`, or `norm(x * silu(z))` if not `norm_before_gate`.
        eps: added to the mean square.
        group_size: features that share a root mean square; None means all.
        norm_before_gate: see z.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: `group_size` does not divide dim, or z has another shape than x.
    """
    dim = x.shape[-1]
    group_size = dim if group_size is None else group_size
    if dim % group_size:
        raise ValueError(f"group_size {group_size} does not divide {dim}")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)}, x {tuple(x.shape)}")
    dtype = compute_dtype(x)
    y = x.to(dtype)
    gate = None if z is None else silu(z.to(dtype))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.reshape(*x.shape[:-1], dim // group_size, group_size)
    groups = groups * (1.0 / torch.sqrt(groups.square().mean(-1, keepdim=True) + eps))
    y = groups.reshape(x.shape) * weight.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)
