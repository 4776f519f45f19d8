"""A decode of Mamba2 from slots and rings: the convolution of new tokens, and what they read of the states.

Both take several tokens of a row, one after another (its drafts), and append their inputs to its ring. A state and a window are
written where a row's `RingRows.ends` is beyond its origin. Sums run in one order, whatever the number of rows: a row's bits do not
depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid_prefix.ops.convolution import add_taps
from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus, stable_softplus
from megatron_hybrid_prefix.ops.rings import RingRows, at_once, entry_at, sums_after, times
from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, runs_kernel, tl, triton

_CHANNELS = 256  # of a program of the convolution, two a thread
_BYTES = 16384  # of a head's state that a program reads at once
_WARPS, _STAGES, _REGISTERS = 2, 3, None  # of a program; of its loop over heads; of a thread at most
_HEADS, _COLUMNS = 4, 8  # that a program takes at most, and their tokens in all
_PROGRAMS = 8  # of a multiprocessor; a program has fewer heads before there are fewer
_FLUSH, _AHEAD = 16, 4  # rows of a state that are advanced at once, and stages of that loop
_CORES = True  # whether inputs of 16 bits meet on tensor cores


def convolve_tokens(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    recent: torch.Tensor,
    rows: RingRows,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU of each row's tokens, after the inputs in its window and its ring.

    Rounds and sums as `convolve_from_slots`.

    Args:
        inputs: (rows, tokens, dim), floating; contiguous inside a token.
        windows: (slots, dim, taps), the pool of one layer, newest input last, 2 to 4 taps; contiguous inside a slot. A slot's is
            that at the row's origin, and moves on to its end.
        weight: (dim, taps), contiguous; the last column meets the token itself.
        bias: (dim,), or None.
        recent: (rings, at least taps - 1 + tokens, dim) in the windows' type: inputs from the origin on; contiguous inside a ring.
        rows: Which rows these are. An end is the origin, or beyond the position of the step before.

    Returns:
        (rows, tokens, dim) in the inputs' type, contiguous; zero where a row is padding.
    """
    if inputs.dtype == torch.float64 or not runs_kernel(inputs):
        wide, taps, tokens = compute_dtype(inputs), windows.shape[2], inputs.shape[1]
        out, real = torch.zeros_like(inputs, memory_format=torch.contiguous_format), rows.slots >= 0
        own = rows.where(real)
        past = _inputs_at(own.positions - taps + 1, taps - 1, windows, recent, own)
        new = inputs[real].to(windows.dtype)
        all_of = torch.cat([past, new], 1).to(wide)
        kept_weight = weight.to(windows.dtype).to(wide)
        total = all_of.new_zeros(new.shape) if bias is None else bias.to(windows.dtype).to(wide)
        for tap in range(taps):
            total = total + all_of[:, tap : tap + tokens] * kept_weight[:, tap]
        out[real] = silu(total).to(windows.dtype).to(inputs.dtype)
        moved = rows.flushed()
        if len(moved.slots):
            windows[moved.slots] = _inputs_at(moved.ends - taps, taps, windows, recent, moved).transpose(1, 2)
        rows.keep(windows)
        at = own.positions[:, None] + torch.arange(tokens, device=inputs.device)
        recent[own.rings[:, None], at % recent.shape[1]] = new
        return out
    (count, tokens, dim), taps = inputs.shape, windows.shape[2]
    assert windows[0].is_contiguous() and recent[0].is_contiguous() and windows.dtype == recent.dtype
    assert 2 <= taps <= 4 and recent.shape[1] >= taps - 1 + tokens and weight.is_contiguous() and inputs.stride(2) == 1
    out = torch.empty((count, tokens, dim), dtype=inputs.dtype, device=inputs.device)
    if count:
        _convolve_tokens_kernel[(triton.cdiv(dim, _CHANNELS), count)](
            inputs,
            windows,
            recent,
            weight,
            weight if bias is None else bias,
            *rows,
            out,
            *inputs.stride()[:2],
            windows.stride(0),
            recent.stride(0),
            recent.shape[1],
            tokens,
            dim,
            TAPS=taps,
            BIAS=bias is not None,
            CHANNELS=_CHANNELS,
            num_warps=_CHANNELS // 64,
        )
    return out


def flush_windows(windows: torch.Tensor, recent: torch.Tensor, rows: RingRows) -> None:
    """`convolve_tokens` without tokens: windows are written where `RingRows` says so."""
    none = windows.new_empty(len(rows.slots), 0, windows.shape[1])
    convolve_tokens(none, windows, windows[0], None, recent=recent, rows=rows)


def _inputs_at(
    first: torch.Tensor, count: int, windows: torch.Tensor, recent: torch.Tensor, rows: RingRows
) -> torch.Tensor:
    """(rows, count, dim): each row's inputs from position ``first`` on, out of its window before its origin, else of its ring."""
    at = first[:, None] + torch.arange(count, device=first.device)
    since = at - rows.origins[:, None]
    before = windows[rows.slots[:, None], :, (since + windows.shape[2]).clamp(0, windows.shape[2] - 1)]
    return torch.where(since[..., None] < 0, before, recent[rows.rings[:, None], at % recent.shape[1]])


def update_states(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    states: torch.Tensor,
    rows: RingRows,
    *,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row's tokens, one after another: h <- exp(dt A) h + dt x B, y = h C + D x, and y silu(z) with a gate.

    h is not formed: y is the sum of what the slot's state, decayed, and each entry of the ring since give. A state is written at a
    row's end alone, and rounded before its first use.

    Args:
        xBC: (rows, tokens, heads x headdim + 2 x groups x d_state), floating: x of all heads, B and C of all groups; contiguous.
        dt: (rows, tokens, heads), before bias and softplus; contiguous inside a token.
        states: (slots, heads, headdim, d_state), the pool of one layer, contiguous inside a slot.
        rows: Which rows these are.
        inputs: (rings, entries, heads x headdim + groups x d_state) in the type of ``xBC``: its x and B; contiguous inside a ring.
            `rings.ring_entries` says how many entries.
        steps: (rings, entries, 2, heads) float32: dt after softplus, and dt A; contiguous inside a ring.
        A: (heads,) float32, negative.
        D: (heads,), or (heads x headdim,), contiguous.
        dt_bias: (heads,), floating.
        z: (rows, tokens, heads x headdim), the gate; contiguous inside a token. None: no gate.

    Returns:
        (rows, tokens, heads x headdim) in the type of ``xBC``, contiguous; zero where a row is padding.
    """
    (count, tokens), (_, heads, headdim, d_state), ring = xBC.shape[:2], states.shape, (inputs, steps)
    if xBC.dtype == torch.float64 or not runs_kernel(xBC):
        wide, real, moved = compute_dtype(xBC), rows.slots >= 0, rows.flushed()
        out, own, new = xBC.new_zeros(count, tokens, heads * headdim), rows.where(real), xBC[real]
        if len(moved.slots):
            span = moved.ends - moved.origins
            x, B, weight, left = _entries(ring, moved.rings, moved.origins, span, states.shape[1:])
            B = B.repeat_interleave(heads // B.shape[2], 2)
            added = (x * weight.unsqueeze(3)).permute(0, 2, 3, 1) @ B.transpose(1, 2)
            states[moved.slots] = (states[moved.slots].to(wide) * left[..., None, None] + added).to(states.dtype)
        rows.keep(states)
        at = own.rings[:, None], (own.positions[:, None] + torch.arange(tokens, device=xBC.device)) % inputs.shape[1]
        inputs[at] = new[..., : inputs.shape[2]]
        step = softplus(dt[real].to(wide) + dt_bias.to(wide))
        steps[at] = torch.stack([step, step * A.to(wide)], 2).to(steps.dtype)
        C = new[..., inputs.shape[2] :].to(wide).unflatten(-1, (-1, d_state))
        repeat = heads // C.shape[2]
        state, last = states[own.slots].to(wide), own.positions - own.ends
        for token in range(tokens):
            x, B, weight, left = _entries(ring, own.rings, own.ends, last + token + 1, states.shape[1:])
            scores = (B * C[:, token, None]).sum(-1).repeat_interleave(repeat, 2)
            y = (state * C[:, token].repeat_interleave(repeat, 1).unsqueeze(2)).sum(-1) * left.unsqueeze(2)
            y = y + ((weight * scores).unsqueeze(3) * x).sum(1)
            now = new[:, token, : heads * headdim].to(wide)
            y = y.flatten(1) + (D.to(wide).view(heads, -1) * now.unflatten(1, (heads, -1))).flatten(1)
            out[real, token] = (y if z is None else y * silu(z[real, token].to(wide))).to(out.dtype)
        return out
    assert xBC.is_contiguous() and dt.stride(2) == 1 and xBC.dtype == inputs.dtype and (z is None or z.stride(2) == 1)
    assert states[0].is_contiguous() and inputs[0].is_contiguous() and steps[0].is_contiguous()
    assert steps.shape[1] == inputs.shape[1] and steps.dtype == torch.float32
    tile = tile_of(headdim, d_state, states.element_size(), inputs.shape[1] - tokens, tokens)
    repeat = heads * d_state // (inputs.shape[2] - heads * headdim)
    out = torch.empty((count, tokens, heads * headdim), dtype=xBC.dtype, device=xBC.device)
    if count:
        parts, most = triton.cdiv(headdim, tile["BLOCK_P"]), min(_HEADS, tile["COLUMNS"] // tile["BLOCK_T"])
        groups, programs = heads // repeat, _PROGRAMS // max(1, tokens) * multiprocessors(xBC.device)
        together = at_once(most, repeat, count * parts * groups, programs)
        given = xBC, dt, A, D, dt_bias, xBC if z is None else z, out, states, *ring, *rows, *dt.stride()[:2]
        strides = *((0, 0) if z is None else z.stride()[:2]), *(tensor.stride(0) for tensor in (states, *ring))
        tile |= {"REPEAT": repeat, "OF_D": headdim if D.numel() > heads else 1, "GATE": z is not None}
        # Not in Triton's interpreter, whose products of bfloat16 are wrong.
        cores = _CORES and xBC.is_cuda and xBC.dtype == torch.bfloat16 and states.dtype in (xBC.dtype, torch.float32)
        grid = parts, groups * triton.cdiv(repeat, together), count
        _update_kernel[grid](*given, *strides, heads, together, ENTRIES=inputs.shape[1], CORES=cores, **tile)
    return out


def flush_states(states: torch.Tensor, inputs: torch.Tensor, steps: torch.Tensor, rows: RingRows) -> None:
    """`update_states` without tokens: states are written where `RingRows` says so."""
    heads, none = states.shape[1], (len(rows.slots), 0)
    width, of_head = 2 * inputs.shape[2] - heads * states.shape[2], steps[0, 0, 0]
    new = inputs.new_empty(*none, width), inputs.new_empty(*none, heads)
    update_states(*new, states, rows, inputs=inputs, steps=steps, A=of_head, D=of_head, dt_bias=of_head)


def _entries(
    ring: tuple[torch.Tensor, ...], rings: torch.Tensor, first: torch.Tensor, count: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, ...]:
    """``count`` entries of each row from position ``first`` on: x and B by head and group, and what is left of them at the last.

    Returns:
        (rows, entries, heads, headdim), (rows, entries, groups, d_state), dt times decay (rows, entries, heads), and the decay of all
        (rows, heads). Others are zero.
    """
    wide, (heads, headdim, d_state) = compute_dtype(ring[0]), shape
    number = torch.arange(ring[0].shape[1], device=first.device)
    at, inside = (first[:, None] + number) % len(number), (number < count[:, None])[:, :, None, None]
    inputs = torch.where(inside[..., 0], ring[0][rings[:, None], at], 0).to(wide)
    step, decay = torch.where(inside, ring[1][rings[:, None], at], 0).to(wide).unbind(2)
    total, after = sums_after(decay)
    x, B = inputs.split([heads * headdim, inputs.shape[2] - heads * headdim], 2)
    x, B = x.unflatten(2, (heads, headdim)), B.unflatten(2, (-1, d_state))
    return x, B, step * torch.exp(after), torch.exp(total)


def tile_of(headdim: int, d_state: int, itemsize: int, entries: int, tokens: int) -> dict[str, Any]:
    """What a program reads of a matrix (headdim, d_state) and of entries, in so many warps: the same for any number of matrices."""
    width, together = (max(16, triton.next_power_of_2(size)) for size in (d_state, entries))
    rows, columns = triton.next_power_of_2(headdim), triton.next_power_of_2(max(1, tokens))
    rows = min(rows, max(16, _BYTES // (width * itemsize)))
    tile = {"P": headdim, "N": d_state, "TOKENS": tokens, "BLOCK_P": rows, "BLOCK_N": width, "BLOCK_E": together}
    tile |= {"BLOCK_T": columns, "COLUMNS": max(_COLUMNS, 4 * columns), "PART": min(_FLUSH, rows), "AHEAD": _AHEAD}
    tile |= {"PART_N": min(32, width), "STAGES": _STAGES, "maxnreg": _REGISTERS}
    return tile | {"num_warps": _WARPS * (2 if tokens > 1 or together > 32 else 1)}


@jit
def _input_at(
    position: tl.tensor,
    origin: tl.tensor,
    of_window: tl.tensor,
    of_recent: tl.tensor,
    entries: tl.tensor,
    dim: tl.tensor,
    inside: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """(channels,): the input of a position, out of the window before the origin, else of the ring."""
    before = tl.load(of_window + TAPS + position - origin, mask=inside & (position < origin), other=0.0)
    since = tl.load(of_recent + (position % entries).to(tl.int64) * dim, mask=inside & (position >= origin), other=0.0)
    return tl.where(position < origin, before, since)


@jit
def _convolve_tokens_kernel(
    inputs_ptr: tl.tensor,  # (rows, tokens, dim), strided over rows and tokens
    windows_ptr: tl.tensor,  # (slots, dim, TAPS), strided over slots
    recent_ptr: tl.tensor,  # (rings, entries, dim), strided over rings
    weight_ptr: tl.tensor,  # (dim, TAPS)
    bias_ptr: tl.tensor,  # (dim,); unused without BIAS
    slots_ptr: tl.tensor,  # (rows,), as the next
    rings_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    origins_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    out_ptr: tl.tensor,  # (rows, tokens, dim), contiguous
    stride_row: tl.int64,
    stride_token: tl.int64,
    stride_slot: tl.int64,
    stride_ring: tl.int64,
    entries: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """One program: CHANNELS channels of one row's tokens. What it overwrites it has read before."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < dim
    of_inputs, of_out = inputs_ptr + row * stride_row + channel, out_ptr + row * tokens * dim + channel
    slot, kept_slot = tl.load(slots_ptr + row), tl.load(kept_ptr + row)
    position, origin, end = tl.load(positions_ptr + row), tl.load(origins_ptr + row), tl.load(ends_ptr + row)
    if slot < 0:
        for token in range(tokens):
            tl.store(of_out + token * dim, tl.zeros([CHANNELS], dtype=out_ptr.dtype.element_ty), mask=inside)
        return
    kept = windows_ptr.dtype.element_ty
    of_window = windows_ptr + slot * stride_slot + channel * TAPS
    of_kept = windows_ptr + kept_slot * stride_slot + channel * TAPS
    of_recent = recent_ptr + tl.load(rings_ptr + row) * stride_ring + channel
    x1 = _input_at(position - 1, origin, of_window, of_recent, entries, dim, inside, TAPS)
    x2 = _input_at(position - 2, origin, of_window, of_recent, entries, dim, inside & (TAPS > 2), TAPS)
    x3 = _input_at(position - 3, origin, of_window, of_recent, entries, dim, inside & (TAPS > 3), TAPS)
    if (end > origin) | (kept_slot >= 0):
        for column in tl.static_range(TAPS):  # written from the oldest on: a later column is read further right
            x = _input_at(end - TAPS + column, origin, of_window, of_recent, entries, dim, inside, TAPS)
            tl.store(of_window + column, x, mask=inside & (end > origin))
            tl.store(of_kept + column, x, mask=inside & (kept_slot >= 0))
    of_weight = weight_ptr + channel * TAPS + TAPS - 1
    w0 = tl.load(of_weight, mask=inside, other=0.0).to(kept).to(tl.float32)
    w1 = tl.load(of_weight - 1, mask=inside, other=0.0).to(kept).to(tl.float32)
    w2 = tl.load(of_weight - 2, mask=inside & (TAPS > 2), other=0.0).to(kept).to(tl.float32)
    w3 = tl.load(of_weight - 3, mask=inside & (TAPS > 3), other=0.0).to(kept).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside & BIAS, other=0.0).to(kept).to(tl.float32)
    for token in range(tokens):
        x0 = tl.load(of_inputs + token * stride_token, mask=inside, other=0.0).to(kept)
        f3, f2, f1, f0 = x3.to(tl.float32), x2.to(tl.float32), x1.to(tl.float32), x0.to(tl.float32)
        out = add_taps(bias, f3, f2, f1, f0, w3, w2, w1, w0, kept, TAPS)
        tl.store(of_out + token * dim, out.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(of_recent + ((position + token) % entries).to(tl.int64) * dim, x0, mask=inside)
        x3 = x2
        x2 = x1
        x1 = x0


@jit(do_not_specialize=["together"])  # one program for any number: what rows get does not depend on it
def _update_kernel(
    xBC_ptr: tl.tensor,  # (rows, TOKENS, heads x P + 2 x groups x N), contiguous
    dt_ptr: tl.tensor,  # (rows, TOKENS, heads), strided over rows and tokens
    A_ptr: tl.tensor,  # (heads,) float32
    D_ptr: tl.tensor,  # (heads x OF_D,)
    dt_bias_ptr: tl.tensor,  # (heads,)
    z_ptr: tl.tensor,  # (rows, TOKENS, heads x P), strided over rows and tokens; unused without GATE
    out_ptr: tl.tensor,  # (rows, TOKENS, heads x P), contiguous
    states_ptr: tl.tensor,  # (slots, heads, P, N), strided over slots
    inputs_ptr: tl.tensor,  # (rings, ENTRIES, heads x P + groups x N), strided over rings
    steps_ptr: tl.tensor,  # (rings, ENTRIES, 2, heads) float32, strided over rings
    slots_ptr: tl.tensor,  # (rows,), as the next
    rings_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    origins_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    stride_dt_row: tl.int64,
    stride_dt_token: tl.int64,
    stride_z_row: tl.int64,
    stride_z_token: tl.int64,
    stride_slot: tl.int64,
    stride_inputs: tl.int64,
    stride_steps: tl.int64,
    heads: tl.tensor,
    together: tl.tensor,
    P: tl.constexpr,
    N: tl.constexpr,
    REPEAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    OF_D: tl.constexpr,
    GATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    AHEAD: tl.constexpr,
    PART_N: tl.constexpr,
    STAGES: tl.constexpr,
    CORES: tl.constexpr,
) -> None:
    """One program: BLOCK_P rows of ``together`` heads' matrices, or fewer, all of one group, for the tokens of one row.

    A column is a token of a head: all of a head's, then the next head's. What heads share is computed once; the next heads' states
    are on their way while one is used. No program overwrites what another reads.
    """
    part, row, chunks = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.cdiv(REPEAT, together)
    group, in_group = tl.program_id(1) // chunks, tl.program_id(1) % chunks * together
    first_head, some_heads = group * REPEAT + in_group, tl.minimum(together, REPEAT - in_group)
    in_p, in_n, number = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)
    column = tl.arange(0, COLUMNS)
    of_token, of_head = column % BLOCK_T, column // BLOCK_T
    c_mask = (of_head < some_heads) & (of_token < TOKENS)
    # Masks are constants where they can be; what is the same for all elements is added to pointers first.
    p_mask = in_p < P - part * BLOCK_P if P % BLOCK_P else tl.full([BLOCK_P], 1, tl.int1)
    n_mask = in_n < N if N % BLOCK_N else tl.full([BLOCK_N], 1, tl.int1)
    channel, out_mask = first_head * P + part * BLOCK_P, p_mask[:, None] & c_mask[None, :]
    in_out = (of_head * P)[None, :] + in_p[:, None]
    of_out = out_ptr + row * TOKENS * heads * P + channel + (of_token * heads * P)[None, :] + in_out
    slot, ring, kept = tl.load(slots_ptr + row), tl.load(rings_ptr + row), tl.load(kept_ptr + row)
    position, origin, end = tl.load(positions_ptr + row), tl.load(origins_ptr + row), tl.load(ends_ptr + row)
    if slot < 0:
        if TOKENS > 0:
            tl.store(of_out, tl.zeros([BLOCK_P, COLUMNS], dtype=out_ptr.dtype.element_ty), mask=out_mask)
        return
    width = heads * P + heads // REPEAT * N
    of_inputs, of_steps = inputs_ptr + ring * stride_inputs, steps_ptr + ring * stride_steps + first_head
    to_B, to_kept = heads * P + group * N, (kept - slot) * stride_slot
    of_states = states_ptr + slot * stride_slot + channel * N
    h_mask, of_weights = (of_head < some_heads)[None, :], of_steps + of_head[None, :]
    if (end > origin) | (kept >= 0):
        at, after, count = entry_at(origin, number, ENTRIES), entry_at(origin, number + 1, ENTRIES), end - origin
        inside = (number < count)[:, None]
        weight = tl.load(of_weights + (2 * at * heads)[:, None], mask=inside & h_mask, other=0.0)
        decay = tl.load(of_weights + ((2 * at + 1) * heads)[:, None], mask=inside & h_mask, other=0.0)
        of_later, others = of_weights + ((2 * after + 1) * heads)[:, None], (number + 1 < count)[:, None] & h_mask
        weight *= tl.exp(tl.cumsum(tl.load(of_later, mask=others, other=0.0), 0, reverse=True))
        decay = tl.exp(tl.sum(decay, 0))
        of_B = of_inputs + (at * width)[:, None] + to_B + in_n[None, :]
        B = tl.load(of_B, mask=inside & n_mask[None, :], other=0.0)
        for turn in tl.range(0, some_heads * (BLOCK_P // PART), num_stages=AHEAD):
            head, some = turn // (BLOCK_P // PART), turn % (BLOCK_P // PART) * PART + tl.arange(0, PART)
            some_mask = some < P - part * BLOCK_P if P % BLOCK_P else tl.full([PART], 1, tl.int1)
            mask = some_mask[:, None] & n_mask[None, :]
            of_some = of_states + (head * P + some)[:, None] * N + in_n[None, :]
            state = tl.load(of_some, mask=mask, other=0.0).to(tl.float32)
            of_x = of_inputs + (at * width)[None, :] + channel + head * P + some[:, None]
            x = tl.load(of_x, mask=(number < count)[None, :] & some_mask[:, None], other=0.0).to(tl.float32)
            x *= tl.sum(tl.where((column == head * BLOCK_T)[None, :], weight, 0.0), 1)[None, :]
            left = tl.sum(tl.where(column == head * BLOCK_T, decay, 0.0), 0)
            added = times(x, B if CORES else B.to(tl.float32))
            state = tl.where(end > origin, state * left + added, state).to(states_ptr.dtype.element_ty)
            tl.store(of_some, state, mask=mask & (end > origin))
            tl.store(of_some + to_kept, state, mask=mask & (kept >= 0))
        tl.debug_barrier()  # it is read again, by other threads: rounded, and as a step without a flush has it
    if TOKENS > 0:
        # Entries since the end, then the tokens themselves; of those, ``token`` says which, and is negative for others.
        token, of_new = number - (position - end), xBC_ptr + row * TOKENS * (width + heads // REPEAT * N)
        new = (token >= 0) & (token < TOKENS)
        at, after = entry_at(end, number, ENTRIES), entry_at(end, number + 1, ENTRIES)
        of_entry = of_inputs + at * width
        of_each = tl.where(token < 0, of_entry, of_new + token * (width + heads // REPEAT * N))
        of_columns = of_new + of_token * (width + heads // REPEAT * N)
        of_C = of_columns[None, :] + heads // REPEAT * N + to_B + in_n[:, None]
        C = tl.load(of_C, mask=(of_token < TOKENS)[None, :] & n_mask[:, None], other=0.0)
        of_B, of_real = of_each[:, None] + to_B + in_n[None, :], (token < TOKENS)[:, None]
        B = tl.load(of_B, mask=of_real & n_mask[None, :], other=0.0)
        of_step, of_decay = of_weights + (2 * at * heads)[:, None], of_weights + ((2 * at + 1) * heads)[:, None]
        of_later, old = of_weights + ((2 * after + 1) * heads)[:, None], (token < 0)[:, None] & h_mask
        step = tl.load(of_step, mask=old, other=0.0)
        decay = tl.load(of_decay, mask=old, other=0.0)  # under the weights of that time
        later = tl.load(of_later, mask=(token < -1)[:, None] & h_mask, other=0.0)
        x_now = tl.load(of_columns[None, :] + channel + in_out, mask=out_mask, other=0.0)
        A = tl.load(A_ptr + first_head + of_head, mask=of_head < some_heads, other=0.0)
        bias = tl.load(dt_bias_ptr + first_head + of_head, mask=of_head < some_heads, other=0.0).to(tl.float32)
        of_D = D_ptr + (first_head + of_head[None, :] if OF_D == 1 else channel + in_out)
        D = tl.load(of_D, mask=c_mask[None, :] if OF_D == 1 else out_mask, other=0.0).to(tl.float32)
        of_dt = dt_ptr + row * stride_dt_row + first_head + of_head
        for now in tl.static_range(TOKENS):
            dt = tl.load(of_dt + now * stride_dt_token, mask=of_head < some_heads, other=0.0).to(tl.float32)
            dt = stable_softplus(dt + bias)
            step = tl.where((token == now)[:, None], dt[None, :], step)
            decay = tl.where((token == now)[:, None], (dt * A)[None, :], decay)
            later = tl.where((token + 1 == now)[:, None], (dt * A)[None, :], later)
        if part == 0:
            tl.store(of_step, step, mask=new[:, None] & h_mask & (of_token == 0)[None, :])
            tl.store(of_decay, decay, mask=new[:, None] & h_mask & (of_token == 0)[None, :])
            if in_group == 0:
                tl.store(of_entry[:, None] + to_B + in_n[None, :], B, mask=new[:, None] & n_mask[None, :])
        of_now = of_inputs + entry_at(position, of_token, ENTRIES)[None, :] * width + channel + in_out
        tl.store(of_now, x_now, mask=out_mask)
        left = tl.exp(tl.sum(tl.where(token[:, None] <= of_token[None, :], decay, 0.0), 0))
        later = tl.where(token[:, None] < of_token[None, :], later, 0.0)
        weights = step * tl.exp(tl.cumsum(later, 0, reverse=True))
        weights *= times(B if CORES else B.to(tl.float32), C if CORES else C.to(tl.float32))
        if TOKENS > 1:
            weights = tl.where(token[:, None] <= of_token[None, :], weights, 0.0)
        in_parts = tl.arange(0, BLOCK_N // PART_N)[:, None] * PART_N + tl.arange(0, PART_N)[None, :]
        wide: tl.tuple = ()  # C of each token, for a state that meets it without tensor cores: each thread first adds its own products
        if not CORES or states_ptr.dtype.element_ty == tl.float32:
            for now in tl.static_range(TOKENS):
                of_C = of_new + now * (width + heads // REPEAT * N) + heads // REPEAT * N + to_B + in_parts
                wide += (tl.load(of_C, mask=in_parts < N, other=0.0).to(tl.float32)[None, :, :],)
        y = D * x_now.to(tl.float32)
        for head in tl.range(0, some_heads, num_stages=STAGES):
            of_entries = of_each[None, :] + channel + head * P + in_p[:, None]
            if not CORES or states_ptr.dtype.element_ty == tl.float32:
                of_state = of_states + head * (P * N) + in_p[:, None, None] * N + in_parts[None, :, :]
                mask = p_mask[:, None, None] & (in_parts < N)[None, :, :]
                state = tl.load(of_state, mask=mask, other=0.0).to(tl.float32)
                added = tl.zeros([BLOCK_P, COLUMNS], tl.float32)
                for now in tl.static_range(TOKENS):
                    met = tl.sum(tl.sum(state * wide[now], 1), 1)
                    added = tl.where((of_token == now)[None, :], met[:, None], added)
            else:
                of_state = of_states + head * (P * N) + in_p[:, None] * N + in_n[None, :]
                added = tl.dot(tl.load(of_state, mask=p_mask[:, None] & n_mask[None, :], other=0.0), C)
            added *= left[None, :]
            x = tl.load(of_entries, mask=(token < TOKENS)[None, :] & p_mask[:, None], other=0.0)
            for now in tl.static_range(TOKENS):
                seen = x if CORES else x.to(tl.float32)
                if TOKENS > 1:  # of later ones not even NaN
                    seen = tl.where((token <= now)[None, :], seen, 0.0).to(seen.dtype)
                mine = ((of_head == head) & (of_token == now))[None, :]
                y += tl.where(mine, added + times(seen, weights), 0.0)
        if GATE:
            of_z = z_ptr + row * stride_z_row + (of_token * stride_z_token)[None, :] + channel + in_out
            z = tl.load(of_z, mask=out_mask, other=0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        tl.store(of_out, y.to(out_ptr.dtype.element_ty), mask=out_mask)
