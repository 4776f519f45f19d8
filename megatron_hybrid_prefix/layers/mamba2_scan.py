"""The chunked scan of a prefill step, from and to slots: megatron's kernels around this package's state passing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_hybrid_prefix.layers.step import Chunks
from megatron_hybrid_prefix.ops.state_passing import pass_states
from megatron_hybrid_prefix.upstream.mixer import scan_on_host


def scan_by_slots(
    states: torch.Tensor,
    chunks: Chunks,
    slots: Mapping[str, torch.Tensor],
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
    """Scan all sequences of the step; their states are read from and written to ``states``.

    Args:
        states: (slots, heads, headdim, d_state), the pool of one layer; updated in place.
        chunks: The step's chunks for ``chunk_tokens``.
        slots: Source and target slots (`PrefillStep.slots`).
        x: (tokens, heads, headdim), packed; rows of it and of the inputs below may be strided.
        dt: (tokens, heads), before bias and softplus.
        A: (heads,) float32, negative.
        B: (tokens, groups, d_state).
        C: (tokens, groups, d_state).
        D: (heads,) or (heads, headdim).
        z: (tokens, heads, headdim), or None if the gate is applied later.
        dt_bias: (heads,) float32.
        chunk_tokens: Maximum tokens of a chunk, a power of 2.

    Returns:
        (tokens, heads, headdim) in the dtype of ``x``, contiguous; zero after the last sequence.
    """
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if not x.is_cuda:
        _scan_on_host(
            states, chunks, slots, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, chunk_size=chunk_tokens, out=y
        )
        return y
    from megatron_hybrid_prefix.upstream.ssd_kernels import chunk_cumsum, chunk_scan, chunk_scores, chunk_states

    bounds = chunks.bounds
    log_decay, dt = chunk_cumsum(
        dt, A, chunk_tokens, bounds, dt_bias=dt_bias, dt_softplus=True, dt_limit=(0.0, float("inf"))
    )
    added = chunk_states(B, x, dt, log_decay, bounds, states_in_fp32=True)
    before = pass_states(added.flatten(-2), log_decay, states, **slots).view(-1, *states.shape[1:])
    scores = chunk_scores(C, B, chunk_tokens, bounds, output_dtype=torch.float32)
    # Each chunk gets the state before it, as if it were a sequence.
    own = chunks.ids
    chunk_scan(scores, x, dt, log_decay, C, before, bounds, y, own, D=D, z=z, initial_states=before)
    return y


def _scan_on_host(states: torch.Tensor, chunks: Chunks, slots: Mapping[str, torch.Tensor], **inputs: Any) -> None:
    """The platform's scan in PyTorch; reads all sources before it writes."""
    final, after = scan_on_host(
        **inputs,
        cu_chunk_seqlens=chunks.bounds,
        last_chunk_indices=chunks.last,
        seq_idx=chunks.of_sequence,
        initial_states=states[slots["source_slots"]],
        return_raw_states=True,
        dt_softplus=True,
        dt_limit=(0.0, float("inf")),
        state_dtype=states.dtype,
    )
    for targets, values in ((slots["live_slots"], final), (slots["chunk_slots"], after)):
        wanted = targets >= 0
        states[targets[wanted]] = values[wanted]
