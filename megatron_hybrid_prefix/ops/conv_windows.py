"""Windows of a causal convolution, from and to slots.

The convolution's state after a token is its last ``d_conv`` inputs. If this step computed fewer inputs, the rest come from the
window that the sequence started from. (megatron-core pads with zeros there.)
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_BLOCK = 256


def write_conv_windows(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    *,
    first_chunks: torch.Tensor,
    chunk_bounds: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
) -> None:
    """Write the window after each sequence, and after each chunk that has a slot; updates ``windows`` in place.

    A sequence may read and write the same slot. Two sequences may share a slot only if both just read it.

    Args:
        inputs: (tokens, dim), the convolution's inputs, packed sequences; rows may be strided.
        windows: (slots, dim, d_conv), the pool of one layer, newest input last; strided over slots, contiguous inside a slot.
        first_chunks: (sequences + 1,) int64, the chunks of sequence i are [first_chunks[i], first_chunks[i + 1]).
        chunk_bounds: (chunks + 1,) integer, chunk i is rows [chunk_bounds[i], chunk_bounds[i + 1]) of ``inputs``.
        source_slots: (sequences,) int64, slot of the window before each sequence.
        live_slots: (sequences,) int64, slot for its final window; negative: none.
        chunk_slots: (chunks,) int64, slot for the window after a chunk; negative: none.
    """
    if not runs_kernel(inputs):
        _write_conv_windows_reference(
            inputs, windows, first_chunks, chunk_bounds, source_slots, live_slots, chunk_slots
        )
        return
    _, dim, d_conv = windows.shape
    assert windows[0].is_contiguous() and inputs.stride(1) == 1
    _write_conv_windows_kernel[(triton.cdiv(dim, _BLOCK), source_slots.shape[0])](
        inputs,
        windows,
        first_chunks,
        chunk_bounds,
        source_slots,
        live_slots,
        chunk_slots,
        dim,
        inputs.stride(0),
        windows.stride(0),
        D_CONV=d_conv,
        WIDTH=triton.next_power_of_2(d_conv),
        BLOCK=_BLOCK,
    )


def _write_conv_windows_reference(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    first_chunks: torch.Tensor,
    chunk_bounds: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
) -> None:
    """The same in plain PyTorch, one sequence at a time."""
    d_conv = windows.shape[2]
    initial = windows[source_slots].clone()
    for sequence in range(source_slots.shape[0]):
        first, last = int(first_chunks[sequence]), int(first_chunks[sequence + 1])
        start = int(chunk_bounds[first])
        slots = [(int(chunk_slots[chunk]), int(chunk_bounds[chunk + 1])) for chunk in range(first, last)]
        slots.append((int(live_slots[sequence]), int(chunk_bounds[last])))
        for slot, end in slots:
            if slot >= 0:
                own = inputs[max(start, end - d_conv) : end].T  # (dim, up to d_conv)
                kept = d_conv - own.shape[1]
                windows[slot, :, :kept] = initial[sequence, :, d_conv - kept :]
                windows[slot, :, kept:] = own.to(windows.dtype)


if triton is not None:

    @triton.jit
    def _write_conv_windows_kernel(
        inputs_ptr: tl.tensor,  # (tokens, dim), strided over tokens
        windows_ptr: tl.tensor,  # (slots, dim, d_conv), strided over slots
        first_chunks_ptr: tl.tensor,
        chunk_bounds_ptr: tl.tensor,
        source_slots_ptr: tl.tensor,
        live_slots_ptr: tl.tensor,
        chunk_slots_ptr: tl.tensor,
        dim: tl.tensor,
        stride_inputs: tl.int64,
        stride_slot: tl.int64,
        D_CONV: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: BLOCK channels of all windows of one sequence, so that it reads its source before it writes."""
        channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        sequence = tl.program_id(1)
        columns = tl.arange(0, WIDTH)
        mask = (channels < dim)[:, None] & (columns < D_CONV)[None, :]
        in_slot = channels[:, None] * D_CONV + columns[None, :]

        first = tl.load(first_chunks_ptr + sequence)
        last = tl.load(first_chunks_ptr + sequence + 1)
        start = tl.load(chunk_bounds_ptr + first).to(tl.int64)
        source_ptr = windows_ptr + tl.load(source_slots_ptr + sequence) * stride_slot
        # Only windows that end within the first D_CONV - 1 tokens read the source. At most one chunk ends there, and the
        # final window if the span is that short.
        for write in range(first, last + 1):
            is_live = write == last
            slot = tl.load(chunk_slots_ptr + write, mask=write < last, other=-1)
            if is_live:
                slot = tl.load(live_slots_ptr + sequence)
            end = tl.load(chunk_bounds_ptr + tl.minimum(write + 1, last)).to(tl.int64)
            rows = end - D_CONV + columns  # (WIDTH,)
            own = rows >= start
            values = tl.load(
                inputs_ptr + tl.maximum(rows, 0)[None, :] * stride_inputs + channels[:, None],
                mask=mask & own[None, :] & (slot >= 0),
                other=0.0,
            ).to(windows_ptr.dtype.element_ty)
            back = rows - start + D_CONV  # column of the source's window
            earlier = tl.load(
                source_ptr + channels[:, None] * D_CONV + tl.maximum(back, 0)[None, :],
                mask=mask & (~own)[None, :] & (back >= 0)[None, :] & (slot >= 0),
                other=0.0,
            )
            tl.debug_barrier()  # a program reads all of this window's inputs before it writes the window
            tl.store(
                windows_ptr + slot * stride_slot + in_slot,
                tl.where(own[None, :], values, earlier),
                mask=mask & (slot >= 0),
            )
