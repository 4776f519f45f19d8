"""A chunked scan of Mamba2, from and to slots.

A chunked scan (SSD, https://arxiv.org/abs/2405.21060, section 6) computes what each chunk adds to the state, passes the
state from chunk to chunk, and then computes the outputs. Each is one kernel; what a chunk adds is never in memory. A sequence
starts from any slot of the state pool. The state after its last chunk, and after each chunk that has a slot, is written
directly to its slot: no gather, no scatter, no extra buffer.

The state is carried in float32 and rounded to the pool's dtype when it is written. So with a float32 pool, a request that
resumes continues from exactly the bits that a request without a hit would have. Outputs depend on their chunk and the state
before it, not on what else is in the step. One file: the parts agree on rounding and on what lies after a chunk's last token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from megatron_hybrid_prefix.ops.elementwise import is_wrong, silu, softplus, stable_softplus, zero_wrong
from megatron_hybrid_prefix.ops.rings import OpenChunks
from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, runs_kernel, tl, triton

_BLOCK = 64  # of a state's rows and columns, and of tokens, in a program of the states
_HEADS = 8  # of a program of the decays
_MOST_HEADS = 8  # of a program of the outputs, if there are enough programs
_ROWS, _COLUMNS = 16, 1024  # of a program that zeroes padding
_NEW = 512  # columns of a new token, that a program copies at once
_OPENED = 32  # open chunks, of which a program writes the states behind those that are full
# A tile of the new token. Its instructions add in the order of a prefill's, of 64 rows; programs of a multiprocessor, if heads suffice.
_TILE, _PROGRAMS = {"BLOCK_M": 16, "num_stages": 2}, 8


class Added(NamedTuple):
    """The new tokens of a decode, and where a kernel adds them.

    Args:
        entries: (rows,) int64, see `OpenChunks.added`.
        dt: (rows, heads).
        row: (rows, at least width): x and B of all heads and groups come first.
        inputs: (entries, width), the ring of these.
    """

    entries: torch.Tensor
    dt: torch.Tensor
    row: torch.Tensor
    inputs: torch.Tensor


class Opened(NamedTuple):
    """Open chunks as the kernel of the outputs reads them: entries that they end with, slots of the states before; int32, where NaN."""

    entries: torch.Tensor
    sources: torch.Tensor
    wrong: torch.Tensor


def scan_by_slots(
    states: torch.Tensor,
    bounds: torch.Tensor,
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
    wrong: torch.Tensor,
    kept: torch.Tensor | None = None,
    **slots: torch.Tensor,
) -> torch.Tensor:
    """Scan all sequences of the step; their states are read from and written to ``states``.

    Args:
        states: (slots, heads, headdim, d_state), the pool of one layer; updated in place.
        bounds: (chunks + 1,) int32, chunk i is rows [bounds[i], bounds[i + 1]).
        x: (tokens, heads, headdim), packed; rows of it and of the inputs below may be strided.
        dt: (tokens, heads), before bias and softplus.
        A: (heads,) float32, negative.
        B: (tokens, groups, d_state).
        C: (tokens, groups, d_state).
        D: (heads,) or (heads, headdim).
        z: (tokens, heads, headdim), or None if the gate is applied later.
        dt_bias: (heads,), floating.
        chunk_tokens: Maximum tokens of a chunk, a power of 2.
        wrong: (>= tokens,) int32, gets 1 for each token whose step no scan may see.
        kept: Where states after chunks go; see `pass_states`.
        **slots: Source and target slots; likewise.

    Returns:
        (tokens, heads, headdim) in the dtype of ``x``, contiguous; zero after the last sequence.
    """
    y = empty_up_to(bounds[-1:], x)
    steps, log_decay = chunk_decays(dt, A, dt_bias, bounds, chunk_tokens, wrong)
    before = pass_states(x, steps, B, log_decay, bounds, states, kept=kept, **slots)
    chunk_outputs(x, steps, log_decay, B, C, before, bounds, D=D, z=z, out=y)
    return y


def continue_scan(
    xBC: torch.Tensor,
    states: torch.Tensor,
    chunks: OpenChunks,
    *,
    dt: torch.Tensor,
    z: torch.Tensor | None,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    inputs: torch.Tensor,
    ring: torch.Tensor,
) -> torch.Tensor:
    """One token of each row, with the bits that `scan_by_slots` gives it.

    Args:
        xBC: (rows, heads x headdim + 2 x groups x d_state): x of all heads, B and C of all groups; contiguous.
        chunks: The open chunks.
        dt: (rows, heads), contiguous inside a row; this and the others as there, one token a row.
        inputs: (rings, chunk, heads x headdim + groups x d_state) in the type of ``xBC``: its x and B.
        ring: (rings, chunk, heads) in the type of ``dt``, of that.

    Returns:
        (rows, heads, headdim) in the type of ``xBC``; NaN where dt is not finite, zero in rows of padding.
    """
    (heads, headdim, d_state), (_, chunk_tokens, width), bounds = states.shape[1:], inputs.shape, chunks.bounds
    by_kernels = runs_kernel(xBC)  # they read the rings in place
    packed = inputs.view(-1, width) if by_kernels else chunks.with_new(inputs, xBC[:, :width])
    x, B = packed.split([heads * headdim, width - heads * headdim], 1)
    x, B = x.unflatten(1, (heads, headdim)), B.unflatten(1, (-1, d_state))
    C = xBC[:, width:].unflatten(1, (-1, d_state))
    if by_kernels:
        if chunks.step_tokens > 1:  # the kernel adds a token while others read
            chunks.add(ring, dt)
        wrong, y = dt.new_empty(dt.shape, dtype=torch.int32), xBC.new_empty(len(dt), heads, headdim)
        new = Added(chunks.added, dt, xBC, packed)
        steps, log_decay = chunk_decays(ring.view(-1, heads), A, dt_bias, bounds, chunk_tokens, wrong, new=new)
        # The state behind a full chunk takes the place of the one before it, which the outputs need.
        opened = Opened(chunks.added, chunks.sources, wrong)
        chunk_outputs(x, steps, log_decay, B, C, states, bounds, D=D, z=z, out=y, opened=opened)
        pass_states(x, steps, B, log_decay, bounds, states, added=chunks.added, **chunks.slots)
        return y
    C = C[chunks.rows]
    wrong = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    steps, log_decay = chunk_decays(chunks.with_new(ring, dt), A, dt_bias, bounds, chunk_tokens, wrong)
    before = pass_states(x, steps, B, log_decay, bounds, states, **chunks.slots)
    y, z = x.new_zeros(len(dt), heads, headdim), None if z is None else z[chunks.rows]
    chunk_outputs(x, steps, log_decay, B, C, before, bounds, D=D, z=z, out=y, last=True)
    return y.masked_fill_((wrong[chunks.last] > 0)[:, None, None], float("nan"))


def chunk_decays(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    bounds: torch.Tensor,
    chunk_tokens: int,
    wrong: torch.Tensor,
    new: Added | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes ``softplus(dt + dt_bias)`` and the logarithms of decays ``cumsum(A * step)`` along each chunk.

    A step that no scan may see is zero (`ops/elementwise.py`).

    Args:
        dt: (tokens, heads), packed; strided over tokens.
        A: (heads,) float32, negative.
        dt_bias: (heads,).
        bounds: (chunks + 1,) integer, chunk i is rows [bounds[i], bounds[i + 1]) of dt.
        chunk_tokens: Maximum tokens of a chunk, a power of 2.
        wrong: (>= tokens,) int32, gets 1 for each token with such a step.
        new: Kernels only. ``dt`` is a ring and gets it first; ``wrong`` is (chunks, heads), of the new tokens alone.

    Returns:
        Both (heads, chunks, chunk_tokens) float32, contiguous. After a chunk's last token the step is 0, and the sum stays.
    """
    heads, chunks = dt.shape[1], bounds.shape[0] - 1
    steps = torch.empty(heads, chunks, chunk_tokens, dtype=torch.float32, device=dt.device)
    log_decay = torch.empty_like(steps)
    if not runs_kernel(dt):
        steps.zero_()
        for chunk, own in enumerate(slice(*pair) for pair in pairwise(bounds.tolist())):
            rows = zero_wrong(softplus(dt[own].float() + dt_bias.float()), wrong[own])
            steps[:, chunk, : len(rows)] = rows.T
        return steps, torch.cumsum(steps * A.view(-1, 1, 1), 2, out=log_decay)
    added, new_dt, row, inputs = new or Added(bounds, dt, dt, dt)
    assert dt.stride(1) == new_dt.stride(1) == row.stride(1) == 1 and A.is_contiguous() and dt_bias.is_contiguous()
    _chunk_decays_kernel[(chunks, triton.cdiv(heads, _HEADS))](
        dt,
        A,
        dt_bias,
        bounds,
        wrong,
        steps,
        log_decay,
        added,
        new_dt,
        row,
        inputs,
        dt.stride(0),
        new_dt.stride(0),
        row.stride(0),
        inputs.shape[1],
        heads,
        chunks,
        CHUNK=chunk_tokens,
        HEADS=_HEADS,
        OPEN=new is not None,
        COLUMNS=_NEW,
    )
    return steps, log_decay


def pass_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    log_decay: torch.Tensor,
    bounds: torch.Tensor,
    states: torch.Tensor,
    *,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
    kept: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pass states along the chunks of each sequence; updates ``states`` in place.

    Token t of a chunk adds ``exp(log_decay[last] - log_decay[t]) * dt[t] * x[t] (outer) B[t]``; the product of all but x is rounded to
    the type of x, as in megatron's kernel. A sequence may read and write the same slot. Two sequences may share a slot only if both just
    read it.

    Args:
        x: (tokens, heads, headdim), packed; strided over tokens and heads.
        dt: (heads, chunks, chunk_tokens) float32, contiguous.
        B: (tokens, groups, d_state); strided over tokens and groups.
        log_decay: (heads, chunks, chunk_tokens) float32, contiguous; cumulative over each chunk, constant after its last token.
        bounds: (chunks + 1,) integer, chunk i is rows [bounds[i], bounds[i + 1]) of x and B.
        states: (slots, heads, headdim, d_state), the pool of one layer; strided over slots, contiguous inside a slot.
        first_chunks: (sequences + 1,) int64, the chunks of sequence i are [first_chunks[i], first_chunks[i + 1]).
        source_slots: (sequences,) int64, slot of the state that each sequence starts from.
        live_slots: (sequences,) int64, slot for its final state; negative: none.
        chunk_slots: (chunks,) int64, slot for the state after a chunk; negative: none.
        kept: Where states after chunks go, (slots, heads, headdim, d_state) as ``states``, of the same dtype; None: ``states``.
        added: Kernels only, with x and B that are rings: the entries of `OpenChunks`. Each sequence has one chunk; of those
            without a live slot nothing is read. No state before a chunk is returned.

    Returns:
        (chunks, heads, headdim, d_state): the state before each chunk, rounded to the dtype of ``states`` and to that of x, as a chunk's
        outputs need no more; undefined for chunks of no sequence.
    """
    chunks, chunk_tokens = log_decay.shape[1:]
    narrower = min(states.dtype, x.dtype, key=lambda dtype: dtype.itemsize)
    before = torch.empty((chunks if added is None else 0, *states.shape[1:]), dtype=narrower, device=states.device)
    slots = first_chunks, source_slots, live_slots, chunk_slots
    kept = states if kept is None else kept
    if not runs_kernel(x):
        initial, ends, repeat = states[source_slots].float(), bounds.tolist(), x.shape[1] // B.shape[1]
        ends_kept, live = chunk_slots.tolist(), live_slots.tolist()
        for sequence, (first, last) in enumerate(pairwise(first_chunks.tolist())):
            state = initial[sequence]
            for chunk in range(first, last):
                before[chunk] = state.to(states.dtype)
                rows, end = slice(ends[chunk], ends[chunk + 1]), log_decay[:, chunk, -1:]
                if rows.stop > rows.start:
                    scale = torch.exp(end - log_decay[:, chunk]) * dt[:, chunk]
                    scale[:, rows.stop - rows.start :] = 0
                    keys = rows_of_chunk(B, rows, chunk_tokens).repeat_interleave(repeat, 0) * scale[:, :, None]
                    added = rows_of_chunk(x, rows, chunk_tokens).transpose(1, 2) @ keys.to(x.dtype).float()
                    state = torch.exp(end)[:, :, None] * state + added
                if ends_kept[chunk] >= 0:
                    kept[ends_kept[chunk]] = state.to(states.dtype)
            if live[sequence] >= 0:
                states[live[sequence]] = state.to(states.dtype)
        return before
    _, heads, headdim, d_state = states.shape
    assert states[0].is_contiguous() and kept[0].is_contiguous() and log_decay.is_contiguous() and dt.is_contiguous()
    assert x.stride(2) == B.stride(2) == 1
    blocks = [max(16, min(_BLOCK, triton.next_power_of_2(size))) for size in (headdim, d_state, chunk_tokens)]
    # Not autotuned: autotuning runs a kernel several times, and this one writes slots in place.
    together = 1 if added is None else _OPENED
    tiles = triton.cdiv(headdim, blocks[0]) * triton.cdiv(d_state, blocks[1])
    _pass_states_kernel[(tiles, heads, triton.cdiv(source_slots.shape[0], together))](
        x,
        dt,
        B,
        log_decay,
        bounds,
        bounds if added is None else added,
        states,
        kept,
        before,
        *slots,
        heads,
        heads // B.shape[1],
        chunks,
        *x.stride()[:2],
        *B.stride()[:2],
        states.stride(0),
        kept.stride(0),
        P=headdim,
        N=d_state,
        CHUNK=chunk_tokens,
        BLOCK_P=blocks[0],
        BLOCK_N=blocks[1],
        BLOCK_K=blocks[2],
        OPEN=added is not None,
        TOGETHER=together,
        num_stages=3,
    )
    return before


def rows_of_chunk(packed: torch.Tensor, rows: slice, tokens: int) -> torch.Tensor:
    """Rows of (all tokens, heads, width) as (heads, tokens, width) float32, zeros after the last one.

    In new memory: products then have one shape and alignment, so a chunk's bits depend on nothing else in the step.
    """
    part = packed[rows].transpose(0, 1)
    padded = torch.zeros(part.shape[0], tokens, part.shape[2], device=packed.device)
    padded[:, : part.shape[1]] = part
    return padded


def chunk_outputs(
    x: torch.Tensor,
    steps: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    before: torch.Tensor,
    bounds: torch.Tensor,
    *,
    D: torch.Tensor,
    z: torch.Tensor | None,
    out: torch.Tensor,
    last: bool = False,
    opened: Opened | None = None,
) -> None:
    """Write the outputs of all chunks; rows of ``out`` that are in no chunk do not change.

    With S the state before a chunk, token t of it gives ``exp(log_decay[t]) * S C[t] + D * x[t]``, and from each token s <= t
    ``(C[t] . B[s]) * exp(log_decay[t] - log_decay[s]) * steps[s] * x[s]``; all times ``silu(z[t])``, if there is a gate. The state and the
    factor of x are rounded to the type of x, as in megatron's kernel.

    Args:
        x: (tokens, heads, headdim), packed; strided over tokens and heads.
        steps: (heads, chunks, chunk_tokens) float32, contiguous (`chunk_decays`).
        log_decay: (heads, chunks, chunk_tokens) float32, contiguous.
        B: (tokens, groups, d_state); strided over tokens and groups.
        C: (tokens, groups, d_state); likewise.
        before: (chunks, heads, headdim, d_state), contiguous: the state before each chunk.
        bounds: (chunks + 1,) integer, chunk i is rows [bounds[i], bounds[i + 1]).
        D: (heads,) or (heads, headdim), contiguous.
        z: (tokens, heads, headdim), strided over tokens and heads; None: no gate.
        out: (tokens, heads, headdim), contiguous.
        last: Only that of each chunk's last token is wanted: ``out`` is (chunks, heads, headdim).
        opened: Kernels only. So, too; C and z are (chunks, ...) as well, x and B are rings, and ``before`` is the pool of states.
    """
    heads, chunks, chunk_tokens = log_decay.shape
    headdim, (groups, d_state) = x.shape[2], B.shape[1:]
    if not runs_kernel(x):
        for chunk, rows in enumerate(slice(*pair) for pair in pairwise(bounds.tolist())):
            if rows.start == rows.stop:
                continue
            keys, queries, values = (rows_of_chunk(each, rows, chunk_tokens) for each in (B, C, x))
            decay = log_decay[:, chunk]
            weights = (decay[:, :, None] - decay[:, None]).clamp_(max=0).exp_()  # (heads, tokens, tokens)
            weights.view(groups, -1, chunk_tokens, chunk_tokens).mul_((queries @ keys.transpose(1, 2))[:, None])
            weights.mul_(steps[:, chunk, None]).tril_()
            state = before[chunk].to(x.dtype).float().view(groups, -1, d_state)
            y = (queries @ state.transpose(1, 2)).view(groups, chunk_tokens, -1, headdim).transpose(1, 2).flatten(0, 1)
            y = y * decay.exp()[:, :, None] + weights.to(x.dtype).float() @ values
            y = (y + D.float().view(heads, 1, -1) * values)[:, : rows.stop - rows.start].transpose(0, 1)
            y = (y if z is None else y * silu(z[rows].float())).to(out.dtype)
            out[chunk if last else rows] = y[-1] if last else y
        return
    gate = x if z is None else z
    assert x.stride(2) == B.stride(2) == C.stride(2) == gate.stride(2) == 1
    assert all(each.is_contiguous() for each in (steps, log_decay, before[0], D, out))
    tiles = _tiles(x.dtype, headdim, d_state, chunk_tokens)
    tiles |= _TILE if opened and x.dtype.itemsize == 2 else {}
    blocks = triton.cdiv(headdim, tiles["BLOCK_P"]) * (1 if opened else triton.cdiv(chunk_tokens, tiles["BLOCK_M"]))
    least = (_PROGRAMS if opened else 2) * multiprocessors(x.device)
    together = min(_MOST_HEADS, heads // groups)
    while (heads // groups) % together or (together > 1 and heads // together * chunks * blocks < least):
        together -= 1
    _chunk_outputs_kernel[(blocks, heads // together, chunks)](
        x,
        steps,
        log_decay,
        B,
        C,
        before,
        bounds,
        *(opened or Opened(bounds, bounds, bounds)),
        D,
        gate,
        out,
        heads,
        heads // groups,
        together,
        chunks,
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        gate.stride(0),
        gate.stride(1),
        before.stride(0),
        P=headdim,
        N=d_state,
        CHUNK=chunk_tokens,
        OF_D=D.numel() // heads,
        GATE=z is not None,
        OPEN=opened is not None,
        **tiles,
    )


def _tiles(dtype: torch.dtype, headdim: int, d_state: int, chunk_tokens: int) -> dict[str, int]:
    """Tiles whose operands fit into the shared memory of an A100 or H100 (128 KB at most), and what runs them."""
    width = triton.next_power_of_2(d_state)
    most = 128 if dtype.itemsize * width <= 256 else 64
    sizes = {"BLOCK_M": max(16, min(64, chunk_tokens)), "BLOCK_K": max(16, min(most, chunk_tokens))}
    # With fewer channels of 16 bits ptxas 12.8 miscompiles it: tensor cores read memory by what another kernel left in a register.
    channels = 64 if dtype.itemsize == 2 else max(16, min(64, triton.next_power_of_2(headdim)))
    sizes |= {"BLOCK_P": channels, "BLOCK_N": max(16, width)}
    return sizes | {"num_warps": 4, "num_stages": 1}


def empty_up_to(end: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows that are zero from ``end`` on. The others are undefined: the caller fills them.

    Args:
        end: (1,) integer on the device of ``like``.
        like: (rows, ...); gives shape, type and device.

    Returns:
        The shape and type of ``like``, contiguous.
    """
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not runs_kernel(out):
        out[int(end) :] = 0
    elif len(out):
        _zero_after_kernel[(triton.cdiv(len(out), _ROWS),)](
            out, end, len(out), out[0].numel(), ROWS=_ROWS, BLOCK=_COLUMNS
        )
    return out


# One program for prompts of any length: none is compiled while requests wait.
_NUMBERS = ["heads", "chunks"]


@jit(do_not_specialize=[*_NUMBERS, "width"])
def _chunk_decays_kernel(
    dt_ptr: tl.tensor,  # (tokens, heads), strided over tokens
    A_ptr: tl.tensor,  # (heads,)
    dt_bias_ptr: tl.tensor,  # (heads,)
    bounds_ptr: tl.tensor,  # (chunks + 1,)
    wrong_ptr: tl.tensor,  # (tokens,)
    steps_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    added_ptr: tl.tensor,  # (chunks,), and the next ones: `Added`; unused without OPEN
    new_dt_ptr: tl.tensor,
    new_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    stride_dt: tl.int64,
    stride_new_dt: tl.int64,
    stride_new: tl.int64,
    width: tl.tensor,
    heads: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    OPEN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: HEADS heads of one chunk. Of an open one, it adds these heads' dt and a part of the other inputs to the rings first."""
    chunk = tl.program_id(0).to(tl.int64)
    head, token = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, CHUNK)
    start = tl.load(bounds_ptr + chunk).to(tl.int64)
    tokens = (tl.load(bounds_ptr + chunk + 1) - start).to(tl.int32)
    of_head = head < heads
    if OPEN:
        entry = tl.load(added_ptr + chunk)
        start = entry + 1 - tokens
        new = tl.load(new_dt_ptr + chunk * stride_new_dt + head, mask=of_head & (tokens > 0))
        tl.store(dt_ptr + entry * stride_dt + head, new, mask=of_head & (tokens > 0))
        for first in range(tl.program_id(1) * COLUMNS, width, tl.num_programs(1) * COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            wanted = (column < width) & (tokens > 0)
            part = tl.load(new_ptr + chunk * stride_new + column, mask=wanted)
            tl.store(inputs_ptr + entry * width + column, part, mask=wanted)
        tl.debug_barrier()
    mask = of_head[:, None] & (token < tokens)[None, :]
    dt = tl.load(dt_ptr + (start + token)[None, :] * stride_dt + head[:, None], mask=mask, other=0.0)
    bias = tl.load(dt_bias_ptr + head, mask=of_head, other=0.0).to(tl.float32)
    dt = dt.to(tl.float32) + bias[:, None]
    steps = tl.where(mask, stable_softplus(dt), 0.0)
    bad = is_wrong(dt) & mask  # its softplus would hide NaN
    steps = tl.where(bad, 0.0, steps)
    if OPEN:
        of_new = bad & (token == tokens - 1)[None, :]
        tl.store(wrong_ptr + chunk * heads + head, tl.max(of_new.to(tl.int32), 1), mask=of_head)
    else:
        bad_tokens = tl.max(bad.to(tl.int32), 0)
        tl.store(wrong_ptr + start + token, bad_tokens, mask=bad_tokens > 0)
    A = tl.load(A_ptr + head, mask=of_head, other=0.0)
    at = (head[:, None].to(tl.int64) * chunks + chunk) * CHUNK + token[None, :]
    tl.store(steps_ptr + at, steps, mask=of_head[:, None])
    tl.store(log_decay_ptr + at, tl.cumsum(steps * A[:, None], 1), mask=of_head[:, None])


@jit
def _scores(
    C: tl.tensor,  # (BLOCK_M, BLOCK_N)
    of_b: tl.tensor,  # (BLOCK_N, 1), pointers to the first token of the chunk
    stride_B: tl.int64,
    n_mask: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    tokens: tl.tensor,
) -> tl.tensor:
    """(BLOCK_M, BLOCK_K) float32; zero for tokens that come later."""
    mask = n_mask[:, None] & (k < tokens)[None, :]
    B = tl.load(of_b + k[None, :].to(tl.int64) * stride_B, mask=mask, other=0.0)
    return tl.where(m[:, None] >= k[None, :], tl.dot(C, B), 0.0)


@jit
def _from_tokens(
    scores: tl.tensor,  # (BLOCK_M, BLOCK_K)
    decay_m: tl.tensor,
    of_chunk: tl.tensor,
    steps_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    of_x: tl.tensor,  # (1, BLOCK_P), pointers to the first token of the chunk
    stride_x: tl.int64,
    p_mask: tl.tensor,
    k: tl.tensor,
    tokens: tl.tensor,
) -> tl.tensor:
    """(BLOCK_M, BLOCK_P): what tokens ``k`` of a head give."""
    k_mask = k < tokens
    x = tl.load(of_x + k[:, None].to(tl.int64) * stride_x, mask=k_mask[:, None] & p_mask[None, :], other=0.0)
    decay_k = tl.load(log_decay_ptr + of_chunk + k, mask=k_mask, other=0.0)
    step = tl.load(steps_ptr + of_chunk + k, mask=k_mask, other=0.0)
    weights = scores * tl.exp(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * step[None, :]
    return tl.dot(weights.to(x.dtype), x)


@jit(do_not_specialize=[*_NUMBERS, "heads_of_group", "heads_of_program"])
def _chunk_outputs_kernel(
    x_ptr: tl.tensor,  # (tokens, heads, P), strided over tokens and heads
    steps_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    B_ptr: tl.tensor,  # (tokens, groups, N), strided over tokens and groups
    C_ptr: tl.tensor,  # (tokens, groups, N), likewise
    before_ptr: tl.tensor,  # (chunks, heads, P, N), or the pool of states: strided over the first
    bounds_ptr: tl.tensor,  # (chunks + 1,)
    added_ptr: tl.tensor,  # (chunks,), and the next ones: `Opened`; unused without OPEN
    sources_ptr: tl.tensor,
    wrong_ptr: tl.tensor,
    D_ptr: tl.tensor,  # (heads x OF_D,)
    z_ptr: tl.tensor,  # (tokens, heads, P), strided over tokens and heads; unused without GATE
    out_ptr: tl.tensor,  # (tokens, heads, P)
    heads: tl.tensor,
    heads_of_group: tl.tensor,
    heads_of_program: tl.tensor,
    chunks: tl.tensor,
    stride_x: tl.int64,
    stride_x_head: tl.int64,
    stride_B: tl.int64,
    stride_B_group: tl.int64,
    stride_C: tl.int64,
    stride_C_group: tl.int64,
    stride_z: tl.int64,
    stride_z_head: tl.int64,
    stride_before: tl.int64,
    P: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    OF_D: tl.constexpr,
    GATE: tl.constexpr,
    OPEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_M tokens of a chunk, BLOCK_P channels of some heads of one group.

    Of an open chunk, the last token alone, in its place among BLOCK_M. What is of that token alone has a row for each chunk.
    """
    blocks_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    first_m = tl.program_id(0) // blocks_p * BLOCK_M
    first_head, chunk = (tl.program_id(1) * heads_of_program).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.load(bounds_ptr + chunk).to(tl.int64)
    tokens = (tl.load(bounds_ptr + chunk + 1) - start).to(tl.int32)
    p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    source = chunk
    if OPEN:
        first_m = tl.maximum(tokens - 1, 0) // BLOCK_M * BLOCK_M
        start, source = tl.load(added_ptr + chunk) + 1 - tokens, tl.load(sources_ptr + chunk)
        if tokens == 0:
            for head in range(first_head, first_head + heads_of_program):
                zero = tl.zeros([BLOCK_P], out_ptr.dtype.element_ty)
                tl.store(out_ptr + (chunk * heads + head) * P + p, zero, mask=p < P)
    if first_m >= tokens:
        return
    m, k, n = first_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    m_mask, n_mask, p_mask = m < tokens, n < N, p < P
    row, group = start + m, first_head // heads_of_group
    if OPEN:
        m_mask, row = m == tokens - 1, chunk + tl.zeros_like(row)
    of_c = C_ptr + row[:, None] * stride_C + group * stride_C_group + n[None, :]
    C = tl.load(of_c, mask=m_mask[:, None] & n_mask[None, :], other=0.0)
    of_b = B_ptr + start * stride_B + group * stride_B_group + n[:, None]
    if BLOCK_K >= CHUNK:
        scores = _scores(C, of_b, stride_B, n_mask, m, k, tokens)
    mask = m_mask[:, None] & p_mask[None, :]
    for head in range(first_head, first_head + heads_of_program):
        of_chunk = (head * chunks + chunk) * CHUNK
        decay_m = tl.load(log_decay_ptr + of_chunk + m, mask=m_mask, other=0.0)
        of_state = source * stride_before + (head * P + p[None, :]) * N + n[:, None]
        state = tl.load(before_ptr + of_state, mask=n_mask[:, None] & p_mask[None, :], other=0.0)
        of_x = x_ptr + start * stride_x + head * stride_x_head + p[None, :]
        y = tl.dot(C, state.to(C.dtype)) * tl.exp(decay_m)[:, None]
        if BLOCK_K >= CHUNK:
            y += _from_tokens(scores, decay_m, of_chunk, steps_ptr, log_decay_ptr, of_x, stride_x, p_mask, k, tokens)
        else:
            for first_k in range(0, first_m + BLOCK_M, BLOCK_K):
                part = _scores(C, of_b, stride_B, n_mask, m, first_k + k, tokens)
                y += _from_tokens(
                    part, decay_m, of_chunk, steps_ptr, log_decay_ptr, of_x, stride_x, p_mask, first_k + k, tokens
                )
        D = tl.load(D_ptr + head).to(tl.float32)
        if OF_D > 1:
            D = tl.load(D_ptr + head * OF_D + p, mask=p_mask, other=0.0).to(tl.float32)[None, :]
        y += D * tl.load(of_x + m[:, None].to(tl.int64) * stride_x, mask=mask, other=0.0).to(tl.float32)
        if GATE:
            of_z = z_ptr + row[:, None] * stride_z + head * stride_z_head + p[None, :]
            z = tl.load(of_z, mask=mask, other=0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        if OPEN:
            y = tl.where(tl.load(wrong_ptr + chunk * heads + head) > 0, float("nan"), y)
        of_out = out_ptr + (row[:, None] * heads + head) * P + p[None, :]
        tl.store(of_out, y.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["heads", "heads_of_group", "chunks"])  # one program for prompts of any length
def _pass_states_kernel(
    x_ptr: tl.tensor,  # (tokens, heads, P), strided over tokens and heads
    dt_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    B_ptr: tl.tensor,  # (tokens, groups, N), strided over tokens and groups
    log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
    bounds_ptr: tl.tensor,
    added_ptr: tl.tensor,  # (chunks,): with OPEN the entries of a ring that chunks end with
    states_ptr: tl.tensor,  # (slots, heads, P, N), strided over slots
    kept_states_ptr: tl.tensor,
    before_ptr: tl.tensor,  # (chunks, heads, P, N)
    first_chunks_ptr: tl.tensor,
    source_slots_ptr: tl.tensor,
    live_slots_ptr: tl.tensor,
    chunk_slots_ptr: tl.tensor,
    heads: tl.tensor,
    heads_of_group: tl.tensor,
    chunks: tl.tensor,
    stride_x: tl.int64,
    stride_x_head: tl.int64,
    stride_B: tl.int64,
    stride_B_group: tl.int64,
    stride_slot: tl.int64,
    stride_kept: tl.int64,
    P: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPEN: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """One program: (BLOCK_P, BLOCK_N) of one head's state, along all chunks of one sequence; or behind those of TOGETHER open chunks that are full."""
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    p = (tl.program_id(0) // blocks_n) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    head = tl.program_id(1).to(tl.int64)
    sequence, sequences = tl.program_id(2), 1
    if OPEN:
        ahead = tl.program_id(2) * TOGETHER + tl.arange(0, TOGETHER)
        full = (tl.load(live_slots_ptr + ahead, mask=ahead < chunks, other=-1) >= 0).to(tl.int32)
        sequences, number = tl.sum(full), tl.cumsum(full, 0)
    mask = (p < P)[:, None] & (n < N)[None, :]
    dtype = states_ptr.dtype.element_ty
    in_slot = head * P * N + p[:, None] * N + n[None, :]
    of_x = x_ptr + head * stride_x_head + p[:, None]
    of_b = B_ptr + (head // heads_of_group) * stride_B_group + n[None, :]
    for nth in range(sequences):
        if OPEN:
            sequence = tl.sum(tl.where((full > 0) & (number == nth + 1), ahead, 0))
        first = tl.load(first_chunks_ptr + sequence)
        last = tl.load(first_chunks_ptr + sequence + 1)
        source = tl.load(source_slots_ptr + sequence)
        state = tl.load(states_ptr + source * stride_slot + in_slot, mask=mask, other=0.0).to(tl.float32)
        for chunk in range(first, last):
            start = tl.load(bounds_ptr + chunk)
            tokens = tl.load(bounds_ptr + chunk + 1) - start
            if OPEN:
                start = tl.load(added_ptr + chunk) + 1 - tokens
            else:
                before = state.to(dtype).to(before_ptr.dtype.element_ty)
                tl.store(before_ptr + chunk * heads * P * N + in_slot, before, mask=mask)
            of_chunk = (head * chunks + chunk) * CHUNK
            end = tl.load(log_decay_ptr + of_chunk + CHUNK - 1)
            added = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
            for at in tl.static_range(0, CHUNK, BLOCK_K):
                token = at + k
                inside = token < tokens
                row = (start + token).to(tl.int64)
                x = tl.load(of_x + row[None, :] * stride_x, mask=(p < P)[:, None] & inside[None, :], other=0.0)
                b = tl.load(of_b + row[:, None] * stride_B, mask=inside[:, None] & (n < N)[None, :], other=0.0)
                decay = tl.load(log_decay_ptr + of_chunk + token, mask=inside, other=0.0)
                scale = tl.exp(end - decay) * tl.load(dt_ptr + of_chunk + token, mask=inside, other=0.0)
                added += tl.dot(x, (b.to(tl.float32) * scale[:, None]).to(x.dtype))
            state = tl.exp(end) * state + added
            slot = tl.load(chunk_slots_ptr + chunk)
            tl.store(kept_states_ptr + slot * stride_kept + in_slot, state.to(dtype), mask=mask & (slot >= 0))
        slot = tl.load(live_slots_ptr + sequence)
        tl.store(states_ptr + slot * stride_slot + in_slot, state.to(dtype), mask=mask & (slot >= 0))


@jit
def _zero_after_kernel(
    out_ptr: tl.tensor,  # (rows, width)
    end_ptr: tl.tensor,  # (1,)
    rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: ROWS rows, as a rule none of them padding."""
    first = tl.maximum(tl.program_id(0) * ROWS, tl.load(end_ptr).to(tl.int32))
    last = tl.minimum((tl.program_id(0) + 1) * ROWS, rows)
    of_row = out_ptr + first.to(tl.int64) * width
    for _ in range(first, last):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(of_row + column, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=column < width)
        of_row += width
