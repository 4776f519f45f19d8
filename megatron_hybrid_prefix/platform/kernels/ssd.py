"""Chunked Mamba2 scan over packed sequences.

Replaces `megatron.core.ssm.ops.ssd_combined.mamba_chunk_scan_combined_varlen` (and the kernels that it calls:
`ssd_chunk_state`, `ssd_state_passing`, `ssd_bmm`, `ssd_chunk_scan`).

Chunks are computed one at a time, each padded with zeros to `chunk_size`. So every matrix product has the same shape, strides
and alignment for any batch, and the bits of a chunk depend only on its tokens and the state before it. This makes resuming
from a checkpoint comparable, bit by bit, with computing the whole prompt.
"""

from itertools import pairwise

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus


class _Chunk:
    """Zero-padded buffers for one chunk, in the compute dtype, reused for every chunk of a call.

    Attributes:
        x: (nheads, chunk_size, headdim).
        b: (ngroups, chunk_size, dstate).
        c: (ngroups, chunk_size, dstate).
        dt: (chunk_size, nheads), after bias, softplus and limits; zero on padding.
    """

    def __init__(self, x: torch.Tensor, B: torch.Tensor, chunk_size: int, dtype: torch.dtype) -> None:
        _, nheads, headdim = x.shape
        _, ngroups, dstate = B.shape
        self.x = torch.zeros(nheads, chunk_size, headdim, dtype=dtype, device=x.device)
        self.b = torch.zeros(ngroups, chunk_size, dstate, dtype=dtype, device=x.device)
        self.c = torch.zeros_like(self.b)
        self.dt = torch.zeros(chunk_size, nheads, dtype=dtype, device=x.device)

    def load(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt_bias: torch.Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
    ) -> None:
        """Fill the buffers with n tokens: x (n, nheads, headdim), dt (n, nheads), B, C (n, ngroups, dstate)."""
        n = x.shape[0]
        for buffer, tokens in ((self.x, x), (self.b, B), (self.c, C)):
            buffer[:, :n].copy_(tokens.transpose(0, 1))
            buffer[:, n:].zero_()
        self.dt[:n].copy_(dt)
        self.dt[n:].zero_()
        if dt_bias is not None:
            self.dt += dt_bias.to(self.dt.dtype)
        if dt_softplus:
            self.dt = softplus(self.dt)
        self.dt.clamp_(dt_limit[0], dt_limit[1])
        self.dt[n:].zero_()  # again, because bias and softplus made the padding positive


def _scan_chunk(
    chunk: _Chunk, A: torch.Tensor, carried: torch.Tensor, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one chunk.

    Args:
        chunk: the loaded `_Chunk`.
        A: (nheads,), compute dtype.
        carried: (nheads, headdim, dstate), compute dtype: the state from which the recurrence continues.
        previous: the same state as the outputs use it: after a round trip through the stored dtype.

    Returns:
        (y, state): y (nheads, chunk_size, headdim) without the D and z terms, and the state after the chunk.
    """
    nheads, chunk_size, headdim = chunk.x.shape
    ngroups, _, dstate = chunk.b.shape
    heads_per_group = nheads // ngroups

    dt = chunk.dt.t().contiguous()  # (nheads, chunk_size)
    log_decay = torch.cumsum(dt * A[:, None], dim=1)  # (nheads, chunk_size); constant over the padding, where dt is 0

    # Contribution of the state before the chunk: exp(log_decay_i) * C_i . previous
    states_by_group = previous.reshape(ngroups, heads_per_group * headdim, dstate)
    y = torch.bmm(chunk.c, states_by_group.transpose(1, 2))  # (ngroups, chunk_size, heads_per_group * headdim)
    y = y.view(ngroups, chunk_size, heads_per_group, headdim).transpose(1, 2).reshape(nheads, chunk_size, headdim)
    y *= torch.exp(log_decay)[:, :, None]

    # Contribution of the chunk's own tokens: sum_{j <= i} (C_i . B_j) exp(log_decay_i - log_decay_j) dt_j x_j.
    # Above the diagonal the difference is positive. The clamp (as upstream) keeps exp finite there. tril_ writes zeros,
    # while a product with a 0/1 mask could leave NaN.
    weights = (log_decay[:, :, None] - log_decay[:, None, :]).clamp_(max=0.0).exp_()  # (nheads, chunk_size, chunk_size)
    scores = torch.bmm(chunk.c, chunk.b.transpose(1, 2))  # (ngroups, chunk_size, chunk_size)
    weights.view(ngroups, heads_per_group, chunk_size, chunk_size).mul_(scores[:, None])
    weights.mul_(dt[:, None, :]).tril_()
    y += torch.bmm(weights, chunk.x)

    # State: sum_j exp(log_decay_last - log_decay_j) dt_j x_j B_j, plus the decayed state before the chunk.
    scale = (log_decay[:, -1:] - log_decay).clamp_(max=0.0).exp_() * dt  # (nheads, chunk_size)
    scaled_x = (chunk.x * scale[:, :, None]).transpose(1, 2).reshape(ngroups, heads_per_group * headdim, chunk_size)
    added = torch.bmm(scaled_x, chunk.b).view(nheads, headdim, dstate)
    return y, torch.exp(log_decay[:, -1])[:, None, None] * carried + added


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

    Arithmetic is float32 (float64 for float64 `x`). States are rounded to `state_dtype` as upstream: the recurrence carries the
    unrounded state along a sequence; the stored states, and the outputs of the chunk after them, use the rounded state.
    Upstream also rounds matrix operands to bf16 for the tensor cores; this function does not.

    A chunk has 0 to `chunk_size` tokens. An empty chunk writes no output and passes the state on. If `seq_idx` changes there, it
    stores the initial state of its sequence: trailing padding chunks have `seq_idx` 0 and hold a copy of `initial_states[0]`.
    Rows of `out` outside all chunks do not change.

    Args:
        x: (seqlen, nheads, headdim), floating.
        dt: (seqlen, nheads), floating.
        A: (nheads,), floating, negative.
        B: (seqlen, ngroups, dstate), floating.
        C: (seqlen, ngroups, dstate), floating.
        chunk_size: tokens in a full chunk, a power of 2.
        cu_chunk_seqlens: (nchunks + 1,), integer: token positions where chunks start and end, ascending.
        last_chunk_indices: (batch,), integer: the chunk that ends each sequence.
        seq_idx: (nchunks,), integer: row of `initial_states` for each chunk; a new value starts a sequence.
        out: (seqlen, nheads, headdim), written in place, any floating dtype.
        D: (nheads,) or (nheads, headdim) skip weights, or None.
        z: (seqlen, nheads, headdim) gate, or None; the output is multiplied by silu(z).
        dt_bias: (nheads,) or None.
        initial_states: (batch, nheads, headdim, dstate) or None for zeros.
        dt_softplus: whether to apply softplus to dt (after the bias).
        dt_limit: (lowest, highest) dt after softplus.
        return_raw_states: whether to return the state after every chunk as well.
        state_dtype: dtype of the returned states; None means C's.

    Returns:
        states (batch, nheads, headdim, dstate) after each sequence's last chunk, or (states, raw_states) with
        raw_states (nchunks, nheads, headdim, dstate), all in `state_dtype`.
    """
    assert seq_idx is not None and cu_chunk_seqlens is not None and last_chunk_indices is not None
    bounds = cu_chunk_seqlens.tolist()
    dtype = compute_dtype(x)
    nheads, headdim, dstate = x.shape[1], x.shape[2], B.shape[2]
    sequences = seq_idx.tolist()
    A = A.to(dtype)
    if D is not None:
        D = D.to(dtype).reshape(nheads, 1, -1)  # (nheads, 1, headdim or 1)

    raw_states = torch.empty((len(sequences), nheads, headdim, dstate), dtype=state_dtype or C.dtype, device=x.device)
    chunk = _Chunk(x, B, chunk_size, dtype)
    for c, (start, end) in enumerate(pairwise(bounds)):
        if c == 0 or sequences[c] != sequences[c - 1]:
            if initial_states is None:
                carried = torch.zeros((nheads, headdim, dstate), dtype=dtype, device=x.device)
            else:
                carried = initial_states[sequences[c]].to(dtype)
            previous = carried
        else:
            previous = raw_states[c - 1].to(dtype)
        if end > start:
            span = slice(start, end)
            chunk.load(x[span], dt[span], B[span], C[span], dt_bias, dt_softplus, dt_limit)
            y, carried = _scan_chunk(chunk, A, carried, previous)
            if D is not None:
                y += chunk.x * D
            y = y[:, : end - start].transpose(0, 1)  # (tokens, nheads, headdim)
            if z is not None:
                y = y * silu(z[span].to(dtype))
            out[span].copy_(y)
        raw_states[c].copy_(carried)

    states = raw_states[last_chunk_indices.long()]
    return (states, raw_states) if return_raw_states else states
