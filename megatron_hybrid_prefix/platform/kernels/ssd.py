"""Chunked Mamba2 scan over packed sequences.

Replaces `megatron.core.ssm.ops.ssd_combined.mamba_chunk_scan_combined_varlen`.
"""

import torch

from megatron_hybrid_prefix.ops.mamba_scan import chunk_decays, chunk_outputs, pass_states


@torch.no_grad()
def mamba_chunk_scan_combined_varlen(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    cu_chunk_seqlens: torch.Tensor | None,
    last_chunk_indices: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_raw_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run the Mamba2 recurrence over packed sequences in chunks; writes `out` in place.

    An empty chunk writes no output and passes the state on. If `seq_idx` changes there, it stores the initial state of its
    sequence: trailing padding chunks have `seq_idx` 0 and hold a copy of `initial_states[0]`.

    Args:
        x: (seqlen, nheads, headdim), floating.
        dt: (seqlen, nheads), before bias and softplus.
        A: (nheads,) float32, negative.
        B: (seqlen, ngroups, dstate), floating.
        C: (seqlen, ngroups, dstate), floating.
        chunk_size: Maximum tokens of a chunk, a power of 2.
        cu_chunk_seqlens: (nchunks + 1,), integer: token positions where chunks start and end, ascending.
        last_chunk_indices: (batch,), integer: the chunk that ends each sequence.
        seq_idx: (nchunks,), integer: row of `initial_states` for each chunk; a new value starts a sequence.
        out: (seqlen, nheads, headdim), contiguous; rows outside all chunks do not change.
        D: (nheads,) or (nheads, headdim).
        z: (seqlen, nheads, headdim) gate, or None.
        dt_bias: (nheads,).
        initial_states: (batch, nheads, headdim, dstate).
        dt_softplus: Must be True.
        dt_limit: Must be that of softplus.
        return_raw_states: Whether to return the state after every chunk as well.
        state_dtype: Dtype of the states.

    Returns:
        states (batch, nheads, headdim, dstate) after each sequence's last chunk, or (states, raw_states) with
        raw_states (nchunks, nheads, headdim, dstate).
    """
    assert seq_idx is not None and cu_chunk_seqlens is not None and last_chunk_indices is not None
    assert D is not None and dt_bias is not None and initial_states is not None
    assert dt_softplus and dt_limit == (0.0, float("inf"))
    batch, chunks = len(initial_states), len(seq_idx)
    pool = torch.cat([initial_states, initial_states.new_zeros(chunks, *initial_states.shape[1:])]).to(state_dtype)
    starts = torch.cat([seq_idx.new_ones(1), seq_idx.diff()]).nonzero()[:, 0]
    steps, log_decay = chunk_decays(
        dt, A, dt_bias, cu_chunk_seqlens, chunk_size, dt.new_zeros(len(dt), dtype=torch.int32)
    )
    before = pass_states(
        x,
        steps,
        B,
        log_decay,
        cu_chunk_seqlens,
        pool,
        first_chunks=torch.cat([starts, starts.new_tensor([chunks])]),
        source_slots=seq_idx[starts].long(),
        live_slots=starts.new_full((len(starts),), -1),
        chunk_slots=torch.arange(batch, batch + chunks, device=x.device),
    )
    chunk_outputs(x, steps, log_decay, B, C, before, cu_chunk_seqlens, D=D, z=z, out=out)
    states = pool[batch + last_chunk_indices.long()]
    return (states, pool[batch:]) if return_raw_states else states
