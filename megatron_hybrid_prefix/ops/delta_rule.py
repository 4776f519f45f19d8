"""The gated delta rule, from and to slots.

A head's state S, (K, V), decays at each token, and what it says of the token's key is then moved towards the token's value
(https://arxiv.org/abs/2412.06464):

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    o  = S^T q

A decode reads the state at an earlier position, S_o, and a ring of what tokens wrote since, u = beta (v - S^T k). With G, the sums
of g from there on,

    S = exp(G) S_o + sum over the tokens i since of exp(G - G_i) k_i u_i^T

A prefill runs the same in chunks (section 3.3 there): inside a chunk one triangular system gives what all its tokens write, from chunk to chunk the state is passed on. A sequence starts from any
slot of the state pool, and the states after its last chunk, and after chunks whose end is to be kept, go directly to theirs.

The state is carried in float32 and rounded to the type of the pool where it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, EPSILON, scan_by_kernels, update_by_kernel
from megatron_hybrid_prefix.ops.elementwise import compute_dtype
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.rings import OpenChunks, RingRows, sums_after
from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel


def scan_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    *,
    normalise: bool,
    chunk_bounds: torch.Tensor,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """All sequences of a step in one pass; updates ``states`` in place.

    A sequence may read and write the same slot. No slot may be written by one sequence and read or written by another.
    Chunks are cut at multiples of 64: all chunks of a sequence but the first and the last hold 64 tokens.

    Args:
        q: (tokens, key heads, K), packed.
        k: (tokens, key heads, K).
        v: (tokens, value heads, V); value head i reads key head i // (value heads / key heads).
        log_decay: (tokens, value heads) float32.
        beta: (tokens, value heads).
        states: (slots, value heads, K, V), the pool of one layer; strided over slots, contiguous inside one.
        normalise: Whether queries and keys are made unit vectors first.
        chunk_bounds: (chunks + 1,) integer, chunk i is rows [chunk_bounds[i], chunk_bounds[i + 1]).
        first_chunks: (sequences + 1,) int64, the chunks of sequence i are [first_chunks[i], first_chunks[i + 1]).
        source_slots: (sequences,) int64, where each sequence starts from.
        live_slots: (sequences,) int64, where its final state goes; negative: nowhere.
        chunk_slots: (chunks,) int64, where the state after a chunk goes too; negative: nowhere.
        kept: Where states after chunks go, (slots, value heads, K, V) as ``states``, of the same dtype; None: ``states``.

    Returns:
        (tokens, value heads, V) in v's type; zero in rows of no sequence.
    """
    kept = states if kept is None else kept
    if v.dtype != torch.float64 and runs_kernel(v):
        slots = chunk_bounds, first_chunks, source_slots, live_slots, chunk_slots
        return scan_by_kernels(q, k, v, log_decay, beta, states, *slots, normalise=normalise, kept=kept)
    outputs = torch.zeros_like(v)
    first, bounds = first_chunks.tolist(), chunk_bounds.tolist()
    sources, live, ends = source_slots.tolist(), live_slots.tolist(), chunk_slots.tolist()
    filled = [chunk for chunk in range(first[-1]) if bounds[chunk + 1] > bounds[chunk]]
    spans = [(bounds[c], bounds[c + 1]) for c in filled]
    # The shapes of products must not depend on the other chunks of a step where bits count.
    together = [[span] for span in spans] if scope.is_on() else [spans]
    width = CHUNK if scope.is_on() else max((end - start for start, end in spans), default=0)
    inside = [_Chunks(q, k, v, log_decay, beta, group, normalise, width) for group in together]
    place = {
        chunk: (number, 0) if scope.is_on() else (0, number) for number, chunk in enumerate(filled)
    }  # group, and place in it
    for sequence, chunks in enumerate(pairwise(first)):
        state = states[sources[sequence]].to(compute_dtype(v), copy=True)
        for chunk in range(*chunks):
            if chunk in place:
                group, number = place[chunk]
                state, output = inside[group].run(number, state)
                outputs[bounds[chunk] : bounds[chunk + 1]] = output
            if ends[chunk] >= 0:
                kept[ends[chunk]] = state
        if live[sequence] >= 0:
            states[live[sequence]] = state
    return outputs


def update_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: RingRows,
    *,
    keys: torch.Tensor,
    written: torch.Tensor,
    decays: torch.Tensor,
    normalise: bool,
) -> torch.Tensor:
    """One token or several of each row, from its state and its ring.

    The state at a row's end is rounded, written, and used as it was rounded. Tokens are added to the rings and change no state.

    Args:
        q: (rows, tokens, key heads, K).
        k: (rows, tokens, key heads, K).
        v: (rows, tokens, value heads, V).
        log_decay: (rows, tokens, value heads) float32.
        beta: (rows, tokens, value heads).
        states: (slots, value heads, K, V), the pool of one layer.
        rows: Whose states and rings.
        keys: (rings, entries, key heads, K) in k's type: keys as they came.
        written: (rings, entries, value heads, V): w, what a token writes along its key; by the key's norm, if ``normalise``.
            It is rounded to this type before it is used.
        decays: (rings, entries, value heads) float32. Rings are strided, contiguous inside one; see `ring_entries`.
        normalise: Whether queries and keys are made unit vectors first.

    Returns:
        (rows, tokens, value heads, V) in v's type; zero in rows of padding.
    """
    if v.dtype != torch.float64 and runs_kernel(v):
        return update_by_kernel((q, k, v, log_decay, beta), states, rows, (keys, written, decays), normalise)
    outputs, filled = torch.zeros_like(v), torch.nonzero(rows.slots >= 0).squeeze(1)
    entries, repeat, scale = keys.shape[1], v.shape[2] // k.shape[2], k.shape[3] ** -0.5
    # The shapes of products must not depend on the number of rows where bits count.
    for group in filled.split(1 if scope.is_on() else max(1, len(filled))):
        own = RingRows(*(field[group].long() for field in rows))
        new_q, new_k, new_v, g, b = (x[group].to(compute_dtype(v)) for x in (q, k, v, log_decay, beta))
        at = own.origins[:, None] + torch.arange(entries, device=v.device)  # all of a ring, from the origin on
        stale, later = ((at >= since[:, None]).unsqueeze(2) for since in (own.positions, own.ends))
        key, write, decay = (ring[own.rings[:, None], at % entries].to(g.dtype) for ring in (keys, written, decays))
        key = key.masked_fill(stale[..., None], 0).repeat_interleave(repeat, 2)
        write, decay = write.masked_fill(stale[..., None], 0), decay.masked_fill(stale, 0)
        moved = torch.nonzero(own.ends > own.origins).squeeze(1)
        if len(moved):
            total, left = sums_after(decay[moved].masked_fill(later[moved], 0))
            wanted = left.exp().masked_fill(later[moved], 0)[..., None] * write[moved]
            state = total.exp()[..., None, None] * states[own.slots[moved]].to(g.dtype)
            states[own.slots[moved]] = (state + torch.einsum("rehk,rehv->rhkv", key[moved], wanted)).to(states.dtype)
        own.keep(states)
        total, left = sums_after(decay.masked_fill(~later, 0))
        left, state = left.exp().masked_fill(~later, 0), states[own.slots].to(g.dtype)
        for t in range(v.shape[1]):
            new = own.rings, (own.positions + t) % entries
            keys[new], decays[new] = new_k[:, t].to(keys.dtype), g[:, t].to(decays.dtype)
            both = torch.stack([new_k[:, t], new_q[:, t]], 1)  # (rows, 2, key heads, K)
            unit = torch.rsqrt(both.square().sum(-1) + EPSILON) if normalise else torch.ones_like(both[..., 0])
            both, unit = both.repeat_interleave(repeat, 2), unit.repeat_interleave(repeat, 2)[..., None]
            total, left = total + g[:, t], left * g[:, t, None].exp()
            sums = torch.einsum("rhkv,rnhk->rnhv", state, both) * total.exp()[:, None, :, None]
            meets = torch.einsum("rehk,rnhk->rneh", key, both) * left[:, None]
            sums = unit * (sums + torch.einsum("rneh,rehv->rnhv", meets, write))
            written[new] = (b[:, t, :, None] * (new_v[:, t] - sums[:, 0]) * unit[:, 0]).to(written.dtype)
            entry = torch.arange(len(group), device=v.device), own.positions + t - own.origins
            key[entry], write[entry], left[entry] = both[:, 0], written[new].to(g.dtype), 1.0
            meets = unit[:, 1] * (both[:, 0] * both[:, 1]).sum(-1, keepdim=True)
            outputs[group, t] = (scale * (sums[:, 1] + meets * write[entry])).to(outputs.dtype)
    return outputs


def continue_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunks: OpenChunks,
    *,
    rings: Sequence[torch.Tensor],
    normalise: bool,
) -> torch.Tensor:
    """One token of each row, with the bits that `scan_delta_rule` gives it.

    Args:
        q: (rows, key heads, K); this and the next five as there, one token a row.
        chunks: The open chunks.
        rings: Of k, v, log-decays and beta: (rings, 64, *shape).
        normalise: As there.

    Returns:
        (rows, value heads, V) in v's type; undefined in rows of padding.
    """
    slots = {"chunk_bounds": chunks.bounds} | chunks.slots
    if v.dtype != torch.float64 and runs_kernel(v):  # which read the rings in place
        k, v, g, b = (chunks.add(*each) for each in zip(rings, (k, v, log_decay, beta), strict=True))
        return scan_by_kernels(q, k, v, g, b, states, normalise=normalise, added=chunks.added, **slots)
    k, v, g, b = (chunks.with_new(*each) for each in zip(rings, (k, v, log_decay, beta), strict=True))
    return scan_delta_rule(q[chunks.rows], k, v, g, b, states, normalise=normalise, **slots)[chunks.last]


def flush_delta_rule(
    states: torch.Tensor, keys: torch.Tensor, written: torch.Tensor, decays: torch.Tensor, rows: RingRows
) -> None:
    """`update_delta_rule` without tokens: states are written where `RingRows` says so."""
    k, v, gate = (ring.new_empty(len(rows.slots), 0, *ring.shape[2:]) for ring in (keys, written, decays))
    update_delta_rule(k, k, v, gate, gate, states, rows, keys=keys, written=written, decays=decays, normalise=False)


class _Chunks:
    """Chunks of a step, padded to ``width``: what does not depend on the state, then one chunk after another."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        spans: list[tuple[int, int]],
        normalise: bool,
        width: int,
    ) -> None:
        dtype = compute_dtype(v)
        self._lengths = [end - start for start, end in spans]
        self._out_dtype = v.dtype
        if not spans:
            return
        starts = torch.tensor([start for start, _ in spans], device=v.device)[:, None]
        ends = torch.tensor([end for _, end in spans], device=v.device)[:, None]
        rows = starts + torch.arange(width, device=v.device)  # (chunks, width)
        padding = rows >= ends
        rows = rows.clamp(max=v.shape[0] - 1)

        def by_head(tensor: torch.Tensor) -> torch.Tensor:
            """(tokens, heads, ...) -> (chunks, heads, width, ...), zero after a chunk's end."""
            cut = tensor[rows].to(dtype)
            cut = cut.masked_fill(padding.view(*padding.shape, *[1] * (cut.dim() - 2)), 0)
            return cut.transpose(1, 2)

        heads = v.shape[1]
        q, k = _prepare(by_head(q).transpose(1, 2), by_head(k).transpose(1, 2), heads, normalise)
        q, k, v, g, b = q.transpose(1, 2), k.transpose(1, 2), by_head(v), by_head(log_decay), by_head(beta)
        g = g.cumsum(-1)
        order = torch.ones(width, width, dtype=torch.bool, device=v.device)
        # exp of what lies above the diagonal might overflow, and zero times infinity is no number.
        decay = (g[..., :, None] - g[..., None, :]).masked_fill(order.triu(1), float("-inf")).exp()
        known = (b[..., None] * decay * (k @ k.transpose(-1, -2))).masked_fill(order.triu(), 0)
        wanted = torch.cat([b[..., None] * v, (b * g.exp())[..., None] * k], dim=-1)
        # What a token writes depends on what those before it in the chunk write: a system with ones on its diagonal.
        written = torch.linalg.solve_triangular(known, wanted, upper=False, unitriangular=True)
        self._values, self._against = written.split([v.shape[-1], k.shape[-1]], dim=-1)
        self._scores = decay * (q @ k.transpose(-1, -2))
        self._queries = g.exp()[..., None] * q
        self._keys = ((g[..., -1:] - g).exp()[..., None] * k).transpose(-1, -2)
        self._left = g[..., -1].exp()[..., None, None]

    def run(self, chunk: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after a chunk, and the outputs (tokens, heads, V), from the state (heads, K, V) before it."""
        values = self._values[chunk] - self._against[chunk] @ state
        output = self._queries[chunk] @ state + self._scores[chunk] @ values
        state = self._left[chunk] * state + self._keys[chunk] @ values
        return state, output[:, : self._lengths[chunk]].transpose(0, 1).to(self._out_dtype)


def _prepare(q: torch.Tensor, k: torch.Tensor, heads: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, scaled, and keys of each value head: (..., value heads, K)."""
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(heads // q.shape[-2], dim=-2), k.repeat_interleave(heads // k.shape[-2], dim=-2)
