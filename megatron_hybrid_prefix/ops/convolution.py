"""The causal convolution of a prefill, from windows in slots.

Megatron's kernel wants its inputs contiguous. Those of a Gated DeltaNet layer are a part of a wider projection; this one reads
them where they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.elementwise import either, is_wrong, silu, zero_wrong
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_TOKENS, _CHANNELS = 16, 256  # of a program, which is one warp
_MANY = 4096  # tokens from which a program computes twice as many


def convolve_from_slots(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sources: torch.Tensor,
    starts: torch.Tensor,
    wrong: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU of packed sequences, each after the inputs in its slot's window.

    Computes in float32 from inputs in the windows' type, and rounds to that type. Results that no scan may see are zero (`ops/elementwise.py`).

    Args:
        inputs: (tokens, dim), floating; rows may be strided.
        windows: (slots, dim, taps), the pool of one layer, newest input last, 2 to 4 taps; strided over slots, contiguous inside a slot.
        weight: (dim, taps) in the windows' type, contiguous; the last column meets the token itself.
        bias: (dim,), or None.
        sources: (tokens,) integer, the slot of the window before each token's sequence.
        starts: (tokens,) integer, the row where each token's sequence starts.
        wrong: (>= tokens,) int32, gets 1 for each token with such a result.

    Returns:
        (tokens, dim) in the inputs' type, contiguous.
    """
    if inputs.dtype == torch.float64 or not runs_kernel(inputs):
        return zero_wrong(convolve_reference(inputs, windows, weight, bias, sources, starts), wrong)
    tokens, dim = inputs.shape
    assert windows[0].is_contiguous() and weight.is_contiguous() and 2 <= windows.shape[2] <= 4
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    out = torch.empty((tokens, dim), dtype=inputs.dtype, device=inputs.device)
    together = _TOKENS if tokens < _MANY else 2 * _TOKENS
    if tokens:
        _convolve_kernel[(triton.cdiv(dim, _CHANNELS), triton.cdiv(tokens, together))](
            inputs,
            windows,
            weight,
            weight if bias is None else bias,
            sources,
            starts,
            wrong,
            out,
            inputs.stride(0),
            windows.stride(0),
            tokens,
            dim,
            TAPS=windows.shape[2],
            BIAS=bias is not None,
            TOKENS=together,
            CHANNELS=_CHANNELS,
            num_warps=1,
        )
    return out


def convolve_reference(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sources: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """The same in plain PyTorch. Adds the taps from the oldest on, as a decode does: the bits are the same."""
    taps = windows.shape[2]
    wide = torch.promote_types(windows.dtype, torch.float32)
    x = inputs.to(windows.dtype).to(wide)
    rows, padded = torch.arange(len(x), device=x.device), F.pad(x, (0, 0, taps - 1, 0))
    total = x.new_zeros(x.shape) if bias is None else bias.to(windows.dtype).to(wide).expand_as(x)
    for tap in range(taps):
        at, values = rows - (taps - 1) + tap, padded[tap : tap + len(x)]
        before = torch.nonzero(at < starts).squeeze(1)
        if len(before):
            columns, values = (taps + at - starts)[before], values.clone()
            values[before] = windows[sources[before].long(), :, columns.long()].to(wide)
        total = total + values * weight[:, tap].to(wide)
    return silu(total).to(windows.dtype).to(inputs.dtype)


@jit
def _lagged(
    recent: tl.tensor,
    windows_ptr: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    since: tl.tensor,
    LAG: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """The input LAG tokens back: ``recent`` if the sequence has it, else from its window."""
    if LAG >= TAPS:
        return recent
    column = TAPS + since - LAG
    before = tl.load(windows_ptr + channel * TAPS + column, mask=inside & (since < LAG), other=0.0)
    return tl.where(since < LAG, before.to(tl.float32), recent)


@jit
def add_taps(
    bias: tl.tensor,
    x3: tl.tensor,
    x2: tl.tensor,
    x1: tl.tensor,
    x0: tl.tensor,
    w3: tl.tensor,
    w2: tl.tensor,
    w1: tl.tensor,
    w0: tl.tensor,
    kept: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """A token's output from its input and those up to three tokens back, added from the oldest on."""
    # Written as FMAs: which of two products a compiler fuses would depend on where this is used, and bits with it.
    total = bias
    if TAPS > 3:
        total = tl.fma(x3, w3, total)
    if TAPS > 2:
        total = tl.fma(x2, w2, total)
    total = tl.fma(x1, w1, total)
    total = tl.fma(x0, w0, total)
    return (total / (1.0 + tl.exp(-total))).to(kept)


@jit
def _store(at: tl.tensor, values: tl.tensor, mask: tl.tensor, bit: tl.tensor) -> tl.tensor:
    """Stores what is not wrong; returns this bit, set where a value was."""
    bad = is_wrong(values) & mask
    tl.store(at, tl.where(bad, 0.0, values.to(tl.float32)).to(values.dtype), mask=mask)
    return bad.to(tl.int32) << bit


@jit
def _convolve_kernel(
    inputs_ptr: tl.tensor,  # (tokens, dim), strided over tokens
    windows_ptr: tl.tensor,  # (slots, dim, TAPS), strided over slots
    weight_ptr: tl.tensor,  # (dim, TAPS)
    bias_ptr: tl.tensor,  # (dim,); unused without BIAS
    sources_ptr: tl.tensor,  # (tokens,)
    starts_ptr: tl.tensor,  # (tokens,)
    wrong_ptr: tl.tensor,  # (tokens,)
    out_ptr: tl.tensor,  # (tokens, dim), contiguous
    stride_inputs: tl.int64,
    stride_slot: tl.int64,
    tokens: tl.tensor,
    dim: tl.tensor,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """One program: CHANNELS channels of TOKENS tokens, one after another; the inputs of the last tokens are in registers."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < dim
    kept = windows_ptr.dtype.element_ty
    first = tl.program_id(1) * TOKENS
    of_weight = weight_ptr + channel * TAPS + TAPS - 1
    w0 = tl.load(of_weight, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(of_weight - 1, mask=inside, other=0.0).to(tl.float32)
    w2, w3 = tl.zeros_like(w0), tl.zeros_like(w0)
    if TAPS > 2:
        w2 = tl.load(of_weight - 2, mask=inside, other=0.0).to(tl.float32)
    if TAPS > 3:
        w3 = tl.load(of_weight - 3, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros_like(w0)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(kept).to(tl.float32)
    of_inputs = inputs_ptr + first.to(tl.int64) * stride_inputs + channel
    of_out = out_ptr + first.to(tl.int64) * dim + channel
    # What came before the first token; nothing of it counts where another sequence starts.
    x1 = tl.load(of_inputs - stride_inputs, mask=inside & (first > 0), other=0.0).to(kept).to(tl.float32)
    x2 = tl.load(of_inputs - 2 * stride_inputs, mask=inside & (first > 1), other=0.0).to(kept).to(tl.float32)
    x3 = tl.load(of_inputs - 3 * stride_inputs, mask=inside & (first > 2), other=0.0).to(kept).to(tl.float32)
    start = tl.load(starts_ptr + first)
    last = tl.minimum(first + TOKENS, tokens) - 1
    row = first + tl.arange(0, TOKENS)
    own = tl.load(starts_ptr + row, mask=row < tokens, other=0)  # not sorted: padding has a start of 0
    bad = tl.zeros([CHANNELS], tl.int32)  # a bit for each token
    others = tl.sum(((own != start) & (row < tokens)).to(tl.int32), 0)
    if (first - start >= TAPS - 1) & (others == 0):
        # All of them in one sequence, and none near its start: no windows, and loads can run ahead.
        for token in tl.static_range(0, TOKENS, 4):  # four loads on their way at a time
            left = last + 1 - first - token
            at = of_inputs + token * stride_inputs
            a = tl.load(at, mask=inside & (left > 0), other=0.0).to(kept).to(tl.float32)
            b = tl.load(at + stride_inputs, mask=inside & (left > 1), other=0.0).to(kept).to(tl.float32)
            c = tl.load(at + 2 * stride_inputs, mask=inside & (left > 2), other=0.0).to(kept).to(tl.float32)
            d = tl.load(at + 3 * stride_inputs, mask=inside & (left > 3), other=0.0).to(kept).to(tl.float32)
            to = of_out + token * dim
            y = add_taps(bias, x3, x2, x1, a, w3, w2, w1, w0, kept, TAPS)
            bad |= _store(to, y, inside & (left > 0), token)
            y = add_taps(bias, x2, x1, a, b, w3, w2, w1, w0, kept, TAPS)
            bad |= _store(to + dim, y, inside & (left > 1), token + 1)
            to += 2 * dim
            y = add_taps(bias, x1, a, b, c, w3, w2, w1, w0, kept, TAPS)
            bad |= _store(to, y, inside & (left > 2), token + 2)
            y = add_taps(bias, a, b, c, d, w3, w2, w1, w0, kept, TAPS)
            bad |= _store(to + dim, y, inside & (left > 3), token + 3)
            x3, x2, x1 = b, c, d
    else:
        for token in range(first, last + 1):
            since = token - tl.load(starts_ptr + token)
            of_window = windows_ptr + tl.load(sources_ptr + token).to(tl.int64) * stride_slot
            x0 = tl.load(of_inputs, mask=inside, other=0.0).to(kept).to(tl.float32)
            a3 = _lagged(x3, of_window, channel, inside, since, 3, TAPS)
            a2 = _lagged(x2, of_window, channel, inside, since, 2, TAPS)
            a1 = _lagged(x1, of_window, channel, inside, since, 1, TAPS)
            y = add_taps(bias, a3, a2, a1, x0, w3, w2, w1, w0, kept, TAPS)
            bad |= _store(of_out, y, inside, token - first)
            of_inputs += stride_inputs
            of_out += dim
            x3, x2, x1 = x2, x1, x0
    bad = tl.reduce(bad, 0, either)
    if bad != 0:
        token = tl.arange(0, TOKENS)
        tl.store(wrong_ptr + first + token, tl.full([TOKENS], 1, tl.int32), mask=((bad >> token) & 1) != 0)


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
    kept: torch.Tensor | None = None,
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
        kept: Where windows after chunks go, (slots, dim, d_conv) as ``windows``, of the same dtype; None: ``windows``.
    """
    kept, (_, dim, d_conv) = windows if kept is None else kept, windows.shape
    if not runs_kernel(inputs):
        initial = windows[source_slots].clone()
        for sequence in range(source_slots.shape[0]):
            first, last = int(first_chunks[sequence]), int(first_chunks[sequence + 1])
            start = int(chunk_bounds[first])
            ends = [(kept, int(chunk_slots[chunk]), int(chunk_bounds[chunk + 1])) for chunk in range(first, last)]
            ends.append((windows, int(live_slots[sequence]), int(chunk_bounds[last])))
            for target, slot, end in ends:
                if slot >= 0:
                    own = inputs[max(start, end - d_conv) : end].T  # (dim, up to d_conv)
                    left = d_conv - own.shape[1]
                    target[slot, :, :left] = initial[sequence, :, d_conv - left :]
                    target[slot, :, left:] = own.to(windows.dtype)
        return
    assert windows[0].is_contiguous() and kept[0].is_contiguous() and inputs.stride(1) == 1
    slots = first_chunks, chunk_bounds, source_slots, live_slots, chunk_slots
    strides = inputs.stride(0), windows.stride(0), kept.stride(0)
    sizes = {"D_CONV": d_conv, "WIDTH": triton.next_power_of_2(d_conv), "BLOCK": _BLOCK}
    grid = triton.cdiv(dim, _BLOCK), source_slots.shape[0]
    _write_conv_windows_kernel[grid](inputs, windows, kept, *slots, dim, *strides, **sizes)


@jit
def _write_conv_windows_kernel(
    inputs_ptr: tl.tensor,  # (tokens, dim), strided over tokens
    windows_ptr: tl.tensor,  # (slots, dim, d_conv), strided over slots
    kept_windows_ptr: tl.tensor,
    first_chunks_ptr: tl.tensor,
    chunk_bounds_ptr: tl.tensor,
    source_slots_ptr: tl.tensor,
    live_slots_ptr: tl.tensor,
    chunk_slots_ptr: tl.tensor,
    dim: tl.tensor,
    stride_inputs: tl.int64,
    stride_slot: tl.int64,
    stride_kept: tl.int64,
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
        target_ptr = kept_windows_ptr + slot * stride_kept
        if is_live:
            slot = tl.load(live_slots_ptr + sequence)
            target_ptr = windows_ptr + slot * stride_slot
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
            target_ptr + in_slot,
            tl.where(own[None, :], values, earlier),
            mask=mask & (slot >= 0),
        )
