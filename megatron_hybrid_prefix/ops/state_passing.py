"""State passing of a chunked scan, from and to slots.

A chunked scan (SSD, https://arxiv.org/abs/2405.21060, section 6) computes what each chunk adds to the state, passes the
state from chunk to chunk, and then computes the outputs. This file is the middle part. A sequence starts from any slot of the
state pool. The state after its last chunk, and after each chunk that has a slot, is written directly to its slot: no
gather, no scatter, no extra buffer.

The state is carried in float32 and rounded to the pool's dtype when it is written. So with a float32 pool, a request that
resumes continues from exactly the bits that a request without a hit would have.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_BLOCK = 1024


def pass_states(
    added: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
    *,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
) -> torch.Tensor:
    """Pass states along the chunks of each sequence; updates ``states`` in place.

    A sequence may read and write the same slot. Two sequences may share a slot only if both just read it.

    Args:
        added: (chunks, heads, size) float32, what each chunk adds to a state of zeros; ``size`` is headdim * d_state.
        log_decay: (heads, chunks, chunk_tokens) float32, cumulative over each chunk, constant after its last token.
        states: (slots, heads, headdim, d_state), the pool of one layer; strided over slots, contiguous inside a slot.
        first_chunks: (sequences + 1,) int64, the chunks of sequence i are [first_chunks[i], first_chunks[i + 1]).
        source_slots: (sequences,) int64, slot of the state that each sequence starts from.
        live_slots: (sequences,) int64, slot for its final state; negative: none.
        chunk_slots: (chunks,) int64, slot for the state after a chunk; negative: none.

    Returns:
        (chunks, heads, size) in the dtype of ``states``: the state before each chunk; undefined for chunks of no sequence.
    """
    before = torch.empty(added.shape, dtype=states.dtype, device=added.device)
    if not runs_kernel(added):
        _pass_states_reference(added, log_decay, states, first_chunks, source_slots, live_slots, chunk_slots, before)
        return before
    _, heads, size = added.shape
    sequences = source_slots.shape[0]
    assert states[0].is_contiguous() and added.is_contiguous()
    # Not autotuned: autotuning runs a kernel several times, and this one writes slots in place.
    _pass_states_kernel[(triton.cdiv(size, _BLOCK), heads, sequences)](
        added,
        log_decay,
        states,
        before,
        first_chunks,
        source_slots,
        live_slots,
        chunk_slots,
        size,
        heads,
        states.stride(0),
        log_decay.stride(0),
        log_decay.stride(1),
        log_decay.shape[2],
        BLOCK=_BLOCK,
    )
    return before


def _pass_states_reference(
    added: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
    before: torch.Tensor,
) -> None:
    """The same in plain PyTorch, one chunk at a time."""
    shape = states.shape[1:]
    initial = states[source_slots].clone()
    for sequence in range(source_slots.shape[0]):
        state = initial[sequence].reshape(before.shape[1:]).float()
        for chunk in range(int(first_chunks[sequence]), int(first_chunks[sequence + 1])):
            before[chunk] = state
            state = torch.exp(log_decay[:, chunk, -1])[:, None] * state + added[chunk]
            if chunk_slots[chunk] >= 0:
                states[chunk_slots[chunk]] = state.view(shape).to(states.dtype)
        if live_slots[sequence] >= 0:
            states[live_slots[sequence]] = state.view(shape).to(states.dtype)


if triton is not None:

    @triton.jit
    def _pass_states_kernel(
        added_ptr: tl.tensor,  # (chunks, heads, size)
        log_decay_ptr: tl.tensor,  # (heads, chunks, chunk_tokens)
        states_ptr: tl.tensor,  # (slots, heads, size), strided over slots
        before_ptr: tl.tensor,  # (chunks, heads, size)
        first_chunks_ptr: tl.tensor,
        source_slots_ptr: tl.tensor,
        live_slots_ptr: tl.tensor,
        chunk_slots_ptr: tl.tensor,
        size: tl.tensor,
        heads: tl.tensor,
        stride_slot: tl.int64,
        stride_decay_head: tl.int64,
        stride_decay_chunk: tl.int64,
        chunk_tokens: tl.tensor,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: BLOCK elements of one head's state, along all chunks of one sequence."""
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        head = tl.program_id(1).to(tl.int64)
        sequence = tl.program_id(2)
        mask = offsets < size
        dtype = states_ptr.dtype.element_ty
        in_slot = head * size + offsets

        first = tl.load(first_chunks_ptr + sequence)
        last = tl.load(first_chunks_ptr + sequence + 1)
        source = tl.load(source_slots_ptr + sequence)
        state = tl.load(states_ptr + source * stride_slot + in_slot, mask=mask, other=0.0).to(tl.float32)
        decay_ptr = log_decay_ptr + head * stride_decay_head + (chunk_tokens - 1)
        for chunk in range(first, last):
            in_chunk = (chunk * heads + head) * size + offsets
            tl.store(before_ptr + in_chunk, state.to(dtype), mask=mask)
            decay = tl.exp(tl.load(decay_ptr + chunk * stride_decay_chunk))
            state = decay * state + tl.load(added_ptr + in_chunk, mask=mask, other=0.0)
            slot = tl.load(chunk_slots_ptr + chunk)
            tl.store(states_ptr + slot * stride_slot + in_slot, state.to(dtype), mask=mask & (slot >= 0))
        slot = tl.load(live_slots_ptr + sequence)
        tl.store(states_ptr + slot * stride_slot + in_slot, state.to(dtype), mask=mask & (slot >= 0))
