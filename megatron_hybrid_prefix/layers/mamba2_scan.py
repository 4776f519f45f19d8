"""The chunked scan of a prefill step, from and to slots: megatron's building blocks around this package's state passing."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import mamba_mixer as upstream

from megatron_hybrid_prefix.mcore.state.metadata import HybridPrefixMambaMetadata
from megatron_hybrid_prefix.ops.state_passing import pass_states


def scan_by_slots(
    states: torch.Tensor,
    metadata: HybridPrefixMambaMetadata,
    *,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor:
    """Outputs of all sequences of the step; their states are read from, and written to, ``states``.

    Args:
        states: (slots, heads, headdim, d_state), the pool of one layer; updated in place.
        metadata: The step's.
        x: (tokens, heads, headdim), packed.
        dt: (tokens, heads), before bias and softplus.
        A: (heads,) float32, negative.
        B: (tokens, groups, d_state).
        C: (tokens, groups, d_state).
        D: (heads,) or (heads, headdim).
        z: (tokens, heads, headdim), or None where the gate follows later.
        dt_bias: (heads,) float32.
        chunk_tokens: Longest chunk, a power of 2.

    Returns:
        (tokens, heads, headdim) in the type of ``x``; zero behind the last sequence.
    """
    y = torch.zeros_like(x)
    if not x.is_cuda:
        _scan_on_host(
            states, metadata, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, chunk_size=chunk_tokens, out=y
        )
        return y
    from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd
    from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd
    from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd, _chunk_state_fwd

    bounds = metadata.cu_chunk_seqlens
    log_decay, dt = _chunk_cumsum_fwd(
        dt, A, chunk_tokens, bounds, dt_bias=dt_bias, dt_softplus=True, dt_limit=(0.0, float("inf"))
    )
    added = _chunk_state_fwd(B, x, dt, log_decay, bounds, states_in_fp32=True)
    before = pass_states(added.flatten(-2), log_decay, states, **metadata.slots()).view(-1, *states.shape[1:])
    scores = _bmm_chunk_fwd(C, B, chunk_tokens, bounds, output_dtype=torch.float32)
    # Each chunk is given the state before it as if it were a sequence of its own.
    own = metadata.chunk_ids
    _chunk_scan_fwd(scores, x, dt, log_decay, C, before, bounds, y, own, D=D, z=z, initial_states=before)
    return y


def _scan_on_host(states: torch.Tensor, metadata: HybridPrefixMambaMetadata, **inputs: Any) -> None:
    """The platform's scan in PyTorch; what is read is read before anything is written."""
    scan: Any = upstream.mamba_chunk_scan_combined_varlen
    final, after = scan(
        **inputs,
        cu_chunk_seqlens=metadata.cu_chunk_seqlens,
        last_chunk_indices=metadata.last_chunk_indices,
        seq_idx=metadata.seq_idx_for_varlen,
        initial_states=states[metadata.source_slots],
        return_raw_states=True,
        dt_softplus=True,
        dt_limit=(0.0, float("inf")),
        state_dtype=states.dtype,
    )
    for slots, values in ((metadata.live_slots, final), (metadata.chunk_slots, after)):
        wanted = slots >= 0
        states[slots[wanted]] = values[wanted]
