"""Forwards of recurrent layers that keep no state, in plain PyTorch: differentiable, on any device.

They replace functions of `mamba_ssm.ops.triton.ssd_combined`. Megatron's mixer calls `mamba_split_conv1d_scan_combined` in training
mode; it is replaced where mamba-ssm, causal-conv1d or their compiled extensions are not installed. Layers that predict drafts call
`mamba_chunk_scan_combined`; it is replaced where mamba-ssm is not installed.

`l2norm` and `causal_conv1d` are called by Gated DeltaNet layers; they replace those of flash-linear-attention where it is not installed.
`chunk_gated_delta_product` likewise, by Gated Delta Product layers.

Mamba2's recurrence is computed in chunks (SSD, https://arxiv.org/abs/2405.21060, section 6): within a chunk as a masked product of matrices,
between chunks by one product with the decays from chunk to chunk. `torch.autograd` makes the backward. The memory of a layer grows with
tokens x heads x chunk size. `torch.compile` fuses most of the rest.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.delta_product import steps_of
from megatron_hybrid_prefix.ops.elementwise import compute_dtype
from megatron_hybrid_prefix.upstream.modules import GATED_DELTA_NET


def chunked_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int
) -> torch.Tensor:
    """Run the Mamba2 recurrence from a state of zeros; differentiable.

    Decays and products of matrices are computed in dt's dtype. Under autocast the products are in its dtype, except the one that
    carries states.

    Args:
        x: (batch, tokens, heads, head_dim).
        dt: (batch, tokens, heads), positive, float32 or float64.
        A: (heads,), negative.
        B: (batch, tokens, groups, d_state).
        C: (batch, tokens, groups, d_state).
        chunk_size: Tokens of a chunk. It changes rounding only.

    Returns:
        (batch, tokens, heads, head_dim): of token t, C_t . sum over s <= t of exp(A (dt_{s+1} + ... + dt_t)) dt_s x_s B_s.
    """
    batch, tokens, heads, _ = x.shape
    groups = B.shape[2]
    if not torch.is_autocast_enabled(x.device.type):
        B, C = B.to(dt.dtype), C.to(dt.dtype)
    padding = -tokens % chunk_size
    # Padded tokens come last and have dt = 0.
    x, dt, B, C = (F.pad(part, (0, 0) * (part.dim() - 2) + (0, padding)) for part in (x, dt, B, C))
    chunks = x.shape[1] // chunk_size
    by_head = (batch, chunks, chunk_size, groups, heads // groups)
    x_dt = (
        (x * dt[..., None]).view(*by_head, -1).permute(0, 1, 3, 4, 2, 5)
    )  # (batch, chunks, groups, heads, chunk_size, dim)
    B, C = (part.view(batch, chunks, chunk_size, groups, -1).transpose(2, 3)[:, :, :, None] for part in (B, C))
    log_decay = (dt * A).view(by_head).permute(0, 1, 3, 4, 2).cumsum(-1)  # (batch, chunks, groups, heads, chunk_size)

    decay = _lower(log_decay[..., :, None] - log_decay[..., None, :], diagonal=0)
    y: torch.Tensor = ((C @ B.transpose(-1, -2)) * decay) @ x_dt

    # What a chunk adds to the state, and the state before each chunk: (batch, groups, heads, chunks, dim x d_state).
    to_end = (log_decay[..., -1:] - log_decay).exp()
    added = (x_dt * to_end[..., None]).transpose(-1, -2) @ B
    through = log_decay[..., -1].permute(0, 2, 3, 1).cumsum(-1)
    before = through - log_decay[..., -1].permute(0, 2, 3, 1)
    carry = _lower(before[..., :, None] - through[..., None, :], diagonal=-1)
    with torch.autocast(x.device.type, enabled=False):
        entering = carry @ added.to(carry.dtype).permute(0, 2, 3, 1, 4, 5).flatten(-2)
    entering = entering.unflatten(-1, added.shape[-2:]).permute(0, 3, 1, 2, 4, 5)
    y = y + (C @ entering.to(C.dtype).transpose(-1, -2)) * log_decay.exp()[..., None]
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, chunks * chunk_size, heads, -1)[:, :tokens]
    return y


def _lower(log_decay: torch.Tensor, diagonal: int) -> torch.Tensor:
    """exp() of the entries up to this diagonal, 0 above. Masked before exp(): above it could be infinite, its gradient NaN."""
    size = log_decay.shape[-1]
    kept = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(diagonal)
    return log_decay.masked_fill(~kept, float("-inf")).exp()


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Split, convolution, scan and gate of a Mamba2 mixer, as megatron's ``_ssm_training`` asks for them; differentiable.

    Args:
        zxbcdt: (batch, tokens, width), z, x, B, C and dt side by side.
        conv1d_weight: (channels, taps); the last column meets the current token.
        conv1d_bias: (channels,).
        dt_bias: (heads,).
        A: (heads,), negative.
        D: (heads,), or (heads, head_dim) where headdim is None.
        chunk_size: Tokens of a chunk of the scan.
        seq_idx: Must be None: packed sequences are not supported.
        activation: Must be "silu".
        headdim: Channels of a head.
        ngroups: Groups of heads that share B and C.
        norm_before_gate: Must be False: the norm follows the gate.
        state_dtype: Not used: states are carried in float32. New versions of mamba-ssm have it.

    Returns:
        (batch, tokens, heads x head_dim) in zxbcdt's dtype.

    Raises:
        ValueError: An argument is not supported.
    """
    if seq_idx is not None:
        raise ValueError(
            "without mamba-ssm, Mamba2 layers do not train on packed sequences: give sequences of one length"
        )
    if activation != "silu" or norm_before_gate:
        raise ValueError(
            f"activation={activation!r}, norm_before_gate={norm_before_gate}: only 'silu' and False are supported"
        )
    heads, channels = len(A), len(conv1d_bias)
    inner = heads * (D.shape[1] if headdim is None else headdim)
    z, xbc, dt = zxbcdt.split([inner, channels, heads], dim=-1)
    dtype = compute_dtype(zxbcdt)
    tokens, taps = xbc.shape[1], conv1d_weight.shape[1]
    padded = F.pad(xbc, (0, 0, taps - 1, 0))
    convolved = conv1d_bias.to(dtype)
    for tap in range(taps):
        convolved = convolved + padded[:, tap : tap + tokens] * conv1d_weight[:, tap].to(dtype)
    shared = (channels - inner) // 2
    x, B, C = F.silu(convolved).to(xbc.dtype).split([inner, shared, shared], dim=-1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    dt = F.softplus(dt.to(dtype) + dt_bias.to(dtype))
    y = chunked_scan(x, dt, A.to(dtype), B, C, chunk_size) + x * D.to(dtype).view(heads, -1)
    return (y.flatten(-2) * F.silu(z.to(dtype))).to(zxbcdt.dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool = True,
    z: torch.Tensor | None = None,
    return_final_states: bool = False,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The scan of a Mamba2 mixer from a state of zeros, as megatron's ``_ssm_prefill`` asks for it without a dynamic engine.

    Args:
        x: (batch, tokens, heads, head_dim).
        dt: (batch, tokens, heads), before its bias and softplus.
        A: (heads,), negative.
        B: (batch, tokens, groups, d_state).
        C: (batch, tokens, groups, d_state).
        chunk_size: Tokens of a chunk. It changes rounding only.
        D: (heads,), or (heads, head_dim).
        dt_bias: (heads,).
        dt_softplus: Must be True.
        z: Shape of x: the output is multiplied by its SiLU; None: it is not.
        return_final_states: Must be False. Static batching asks for the states.
        initial_states: Must be None.
        state_dtype: Not used: states are carried in float32. New versions of mamba-ssm have it.

    Returns:
        (batch, tokens, heads, head_dim) in x's dtype.

    Raises:
        ImportError: States are asked for.
    """
    if return_final_states or initial_states is not None or not dt_softplus:
        raise ImportError(
            "static batching of Mamba layers needs mamba-ssm and causal-conv1d: "
            "pip install --no-build-isolation 'megatron-hybrid-prefix[mamba]'"
        )
    dtype, heads = compute_dtype(x), len(A)
    steps = F.softplus(dt.to(dtype) + dt_bias.to(dtype))
    y = chunked_scan(x, steps, A.to(dtype), B, C, chunk_size) + x * D.to(dtype).view(heads, -1)
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Unit vectors along the last dimension, as those of ``fla.modules.l2norm``."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    cu_seqlens: None,
    **states: object,
) -> tuple[torch.Tensor, None]:
    """Convolution and SiLU of (batch, tokens, channels), by weights (channels, taps), as ``fla.modules.convolution``; no state.

    Raises:
        ValueError: The sequences are packed, or the activation is another one.
    """
    if cu_seqlens is not None or activation not in ("silu", "swish") or any(states.values()):
        raise ValueError(
            "without flash-linear-attention, Gated DeltaNet layers train on sequences of one length, with SiLU"
        )
    tokens, (channels, taps) = x.shape[1], weight.shape
    y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)
    return F.silu(y[..., :tokens]).transpose(1, 2), None


def chunk_gated_delta_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``fla.ops.gated_delta_product``, with its options, by megatron's PyTorch version of the gated delta rule.

    As in `delta_product.Inputs`, but k, v and beta have a dimension of tokens x n. Returns (batch, tokens, heads, V), and the last state.

    Raises:
        ValueError: The sequences are packed.
    """
    if options.get("cu_seqlens") is not None:
        raise ValueError("without flash-linear-attention, Gated Delta Product layers train on sequences of one length")
    n = options.pop("num_householder")
    k, v, beta = (each.unflatten(1, (-1, n)) for each in (k, v, beta))
    y, state = sys.modules[GATED_DELTA_NET].torch_chunk_gated_delta_rule(*steps_of(q, k, v, g, beta), **options)
    return y[:, n - 1 :: n], state
