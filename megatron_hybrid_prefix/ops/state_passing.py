"""States of a chunked scan, from and to slots.

A chunked scan (SSD, https://arxiv.org/abs/2405.21060, section 6) computes what each chunk adds to the state, passes the
state from chunk to chunk, and then computes the outputs. This file is the first two parts, in one kernel: what a chunk adds is never
in memory. A sequence starts from any slot of the state pool. The state after its last chunk, and after each chunk that has a slot, is
written directly to its slot: no gather, no scatter, no extra buffer.

The state is carried in float32 and rounded to the pool's dtype when it is written. So with a float32 pool, a request that
resumes continues from exactly the bits that a request without a hit would have.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_BLOCK = 64  # of a state's rows and columns, and of tokens, in a program


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

    Returns:
        (chunks, heads, headdim, d_state): the state before each chunk, rounded to the dtype of ``states`` and to that of x, as a chunk's
        outputs need no more; undefined for chunks of no sequence.
    """
    chunks, chunk_tokens = log_decay.shape[1:]
    narrower = min(states.dtype, x.dtype, key=lambda dtype: dtype.itemsize)
    before = torch.empty((chunks, *states.shape[1:]), dtype=narrower, device=states.device)
    slots = first_chunks, source_slots, live_slots, chunk_slots
    if not runs_kernel(x):
        _pass_states_reference(x, dt, B, log_decay, bounds, states, *slots, before)
        return before
    _, heads, headdim, d_state = states.shape
    assert states[0].is_contiguous() and log_decay.is_contiguous() and dt.is_contiguous()
    assert x.stride(2) == B.stride(2) == 1
    blocks = [max(16, min(_BLOCK, triton.next_power_of_2(size))) for size in (headdim, d_state, chunk_tokens)]
    # Not autotuned: autotuning runs a kernel several times, and this one writes slots in place.
    _pass_states_kernel[
        (triton.cdiv(headdim, blocks[0]) * triton.cdiv(d_state, blocks[1]), heads, source_slots.shape[0])
    ](
        x,
        dt,
        B,
        log_decay,
        bounds,
        states,
        before,
        *slots,
        heads,
        heads // B.shape[1],
        chunks,
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
        states.stride(0),
        P=headdim,
        N=d_state,
        CHUNK=chunk_tokens,
        BLOCK_P=blocks[0],
        BLOCK_N=blocks[1],
        BLOCK_K=blocks[2],
        num_stages=3,
    )
    return before


def _pass_states_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    log_decay: torch.Tensor,
    bounds: torch.Tensor,
    states: torch.Tensor,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
    before: torch.Tensor,
) -> None:
    """The same in plain PyTorch, one chunk at a time."""
    initial = states[source_slots].clone()
    for sequence in range(source_slots.shape[0]):
        state = initial[sequence].float()
        for chunk in range(int(first_chunks[sequence]), int(first_chunks[sequence + 1])):
            before[chunk] = state.to(states.dtype)
            rows = slice(int(bounds[chunk]), int(bounds[chunk + 1]))
            last, own = log_decay[:, chunk, -1:], slice(0, rows.stop - rows.start)
            scale = torch.exp(last - log_decay[:, chunk, own]) * dt[:, chunk, own]  # (heads, tokens)
            keys = B[rows].float().repeat_interleave(x.shape[1] // B.shape[1], 1) * scale.T.unsqueeze(-1)
            added = torch.einsum("thp,thn->hpn", x[rows].float(), keys.to(x.dtype).float())
            state = torch.exp(last).unsqueeze(-1) * state + added
            if chunk_slots[chunk] >= 0:
                states[chunk_slots[chunk]] = state.to(states.dtype)
        if live_slots[sequence] >= 0:
            states[live_slots[sequence]] = state.to(states.dtype)


if triton is not None:

    @triton.jit(do_not_specialize=["heads", "heads_of_group", "chunks"])  # one program for prompts of any length
    def _pass_states_kernel(
        x_ptr: tl.tensor,  # (tokens, heads, P), strided over tokens and heads
        dt_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        B_ptr: tl.tensor,  # (tokens, groups, N), strided over tokens and groups
        log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        bounds_ptr: tl.tensor,
        states_ptr: tl.tensor,  # (slots, heads, P, N), strided over slots
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
        P: tl.constexpr,
        N: tl.constexpr,
        CHUNK: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ) -> None:
        """One program: (BLOCK_P, BLOCK_N) of one head's state, along all chunks of one sequence."""
        blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        p = (tl.program_id(0) // blocks_n) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        head = tl.program_id(1).to(tl.int64)
        sequence = tl.program_id(2)
        mask = (p < P)[:, None] & (n < N)[None, :]
        dtype = states_ptr.dtype.element_ty
        in_slot = head * P * N + p[:, None] * N + n[None, :]
        of_x = x_ptr + head * stride_x_head + p[:, None]
        of_b = B_ptr + (head // heads_of_group) * stride_B_group + n[None, :]

        first = tl.load(first_chunks_ptr + sequence)
        last = tl.load(first_chunks_ptr + sequence + 1)
        source = tl.load(source_slots_ptr + sequence)
        state = tl.load(states_ptr + source * stride_slot + in_slot, mask=mask, other=0.0).to(tl.float32)
        for chunk in range(first, last):
            start = tl.load(bounds_ptr + chunk)
            tokens = tl.load(bounds_ptr + chunk + 1) - start
            tl.store(
                before_ptr + chunk * heads * P * N + in_slot, state.to(dtype).to(before_ptr.dtype.element_ty), mask=mask
            )
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
            tl.store(states_ptr + slot * stride_slot + in_slot, state.to(dtype), mask=mask & (slot >= 0))
        slot = tl.load(live_slots_ptr + sequence)
        tl.store(states_ptr + slot * stride_slot + in_slot, state.to(dtype), mask=mask & (slot >= 0))
