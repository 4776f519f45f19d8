"""RMS norm of groups of features with a SiLU gate: of Mamba2's outputs, and of each head of a Gated DeltaNet layer."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_MOST_FEATURES = 4096  # that a program holds at a time; it reads a longer group twice
_FEATURES = 2048  # of a program that normalises several groups


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor | None,
    epsilon: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Normalise each group of features by its root mean square; computed in float32 (float64), rounded once.

    One kernel on a GPU, where nobody asks for gradients; differentiable PyTorch elsewhere.

    Args:
        x: (..., dim), floating; rows may be strided.
        weight: (dim,), or (group_size,): the same for all groups; floating, contiguous.
        z: shape of x, or None: ``norm(x) * silu(z)``, or ``norm(x * silu(z))`` if not ``norm_before_gate``.
        epsilon: Added to the mean square.
        group_size: Features that share a root mean square; divides dim.
        norm_before_gate: See z.

    Returns:
        Shape and dtype of x, contiguous.
    """
    dim = x.shape[-1]
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (x, weight, z) if each is not None)
    if x.dtype == torch.float64 or trains or not runs_kernel(x):
        dtype = compute_dtype(x)
        gate = 1.0 if z is None else silu(z.to(dtype)).unflatten(-1, (-1, group_size))
        groups = x.to(dtype).unflatten(-1, (-1, group_size))
        groups = groups if norm_before_gate else groups * gate
        scaled = groups * (1.0 / torch.sqrt(groups.square().mean(-1, keepdim=True) + epsilon))
        y = scaled * weight.to(dtype).view(-1, group_size)
        return (y * gate if norm_before_gate else y).to(x.dtype).flatten(-2)
    rows = packed_rows(x)
    gate = rows if z is None else packed_rows(z)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, block = dim // group_size, min(triton.next_power_of_2(group_size), _MOST_FEATURES)
    together = max(1, min(triton.next_power_of_2(count), _FEATURES // block))
    if len(rows):
        _gated_norm_kernel[(len(rows), triton.cdiv(count, together))](
            rows,
            gate,
            weight,
            out,
            rows.stride(0),
            gate.stride(0),
            count,
            epsilon,
            GROUP=group_size,
            SHARED=weight.numel() < dim,
            GATE=z is not None,
            NORM_FIRST=norm_before_gate,
            GROUPS=together,
            BLOCK=block,
            num_warps=min(8, max(1, together * block // 512)),
        )
    return out


def packed_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, width), strided over rows, contiguous inside one; a view where the strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@jit
def _load(
    x_ptr: tl.tensor, z_ptr: tl.tensor, at: tl.tensor, mask: tl.tensor, GATE: tl.constexpr, NORM_FIRST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The values to normalise, and the factor to multiply them by afterwards; float32."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.full(x.shape, 1.0, tl.float32)
    if GATE:
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = z / (1.0 + tl.exp(-z))
    if GATE and not NORM_FIRST:
        x = x * gate
        gate = tl.full(x.shape, 1.0, tl.float32)
    return x, gate


@jit
def _gated_norm_kernel(
    x_ptr: tl.tensor,  # (rows, groups x GROUP), strided over rows
    z_ptr: tl.tensor,  # likewise; unused without GATE
    weight_ptr: tl.tensor,  # (groups x GROUP,), or (GROUP,) if SHARED
    out_ptr: tl.tensor,  # (rows, groups x GROUP), contiguous
    stride_x: tl.int64,
    stride_z: tl.int64,
    groups: tl.tensor,
    epsilon: tl.tensor,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    x_ptr += row * stride_x
    z_ptr += row * stride_z
    out_ptr += row * groups * GROUP
    squares = tl.zeros((GROUPS, BLOCK), tl.float32)
    for start in tl.static_range(0, GROUP, BLOCK):
        inside = start + column
        mask = (group < groups) & (inside < GROUP)
        x, gate = _load(x_ptr, z_ptr, group * GROUP + inside, mask, GATE, NORM_FIRST)
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / GROUP + epsilon)
    for start in tl.static_range(0, GROUP, BLOCK):
        inside = start + column
        at = group * GROUP + inside
        mask = (group < groups) & (inside < GROUP)
        x, gate = _load(x_ptr, z_ptr, at, mask, GATE, NORM_FIRST)
        weight = tl.load(weight_ptr + (inside if SHARED else at), mask=mask, other=0.0).to(tl.float32)
        out = x * scale[:, None] * weight * gate
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
