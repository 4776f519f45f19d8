"""A decode of Mamba2, from and to slots: the convolution of new tokens, and the update of the states.

Both take several tokens of a row, one after another (its drafts). Sums run in one order, whatever the number of rows: a row's
bits do not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid_prefix.ops.convolution import add_taps
from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus, stable_softplus
from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, runs_kernel, tl, triton

_CHANNELS = 128  # of a program of the convolution, one a thread: no value moves between threads
_ELEMENTS = 4096  # of a state that a program updates, and fewer where programs would not fill the GPU
_PROGRAMS = 4  # of a multiprocessor, before a state is split further
_LOAD_BYTES = 16  # the widest load of a thread


def convolve_tokens(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    slots: torch.Tensor,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU of each row's tokens after the window in its slot, which moves on in place.

    Rounds and sums as `convolve_from_slots`.

    Args:
        inputs: (rows, tokens, dim), floating; contiguous inside a token.
        windows: (slots, dim, taps), the pool of one layer, newest input last, 2 to 4 taps; contiguous inside a slot.
        weight: (dim, taps), contiguous; the last column meets the token itself.
        bias: (dim,), or None.
        slots: (rows,) integer, each slot at most once; negative: the row is padding, and zero in the result.
        after: Given the window after each token, at the row's slot: (slots, tokens, dim, taps), contiguous inside a token.

    Returns:
        (rows, tokens, dim) in the inputs' type, contiguous.
    """
    if inputs.dtype == torch.float64 or not runs_kernel(inputs):
        wide, taps = compute_dtype(inputs), windows.shape[2]
        out, kept = torch.zeros(inputs.shape, dtype=inputs.dtype, device=inputs.device), slots >= 0
        own = slots[kept].long()
        window = windows[own]
        for token in range(inputs.shape[1]):
            new = inputs[kept, token].to(windows.dtype)
            window = torch.cat([window[..., 1:], new.unsqueeze(-1)], -1)
            total = torch.zeros_like(new, dtype=wide) if bias is None else bias.to(windows.dtype).to(wide)
            for tap in range(taps):
                total = total + window[..., tap].to(wide) * weight[:, tap].to(windows.dtype).to(wide)
            out[kept, token] = silu(total).to(windows.dtype).to(inputs.dtype)
            if after is not None:
                after[own, token] = window.to(after.dtype)
        windows[own] = window
        return out
    rows, tokens, dim = inputs.shape
    taps = windows.shape[2]
    assert windows[0].is_contiguous() and weight.is_contiguous() and inputs.stride(2) == 1 and 2 <= taps <= 4
    assert after is None or after[0, 0].is_contiguous()
    out = torch.empty((rows, tokens, dim), dtype=inputs.dtype, device=inputs.device)
    if rows:
        _convolve_tokens_kernel[(triton.cdiv(dim, _CHANNELS), rows)](
            inputs,
            windows,
            weight,
            weight if bias is None else bias,
            slots,
            windows if after is None else after,
            out,
            *inputs.stride()[:2],
            windows.stride(0),
            *((0, 0) if after is None else after.stride()[:2]),
            tokens,
            dim,
            TAPS=taps,
            WIDTH=triton.next_power_of_2(taps),
            BIAS=bias is not None,
            AFTER=after is not None,
            CHANNELS=_CHANNELS,
            num_warps=_CHANNELS // 32,
        )
    return out


def update_states(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row's tokens, one after another: h <- exp(dt A) h + dt x B, y = h C + D x, and y silu(z) with a gate.

    The state is float32 from its first token to its last, and rounded where it is written.

    Args:
        xBC: (rows, tokens, heads x headdim + 2 x groups x d_state), floating: x of all heads, B and C of all groups; contiguous.
        dt: (rows, tokens, heads), before bias and softplus; contiguous inside a token.
        states: (slots, heads, headdim, d_state), the pool of one layer, contiguous inside a slot; updated in place.
        slots: (rows,) integer, each slot at most once; negative: the row is padding, and zero in the result.
        A: (heads,) float32, negative.
        D: (heads,), or (heads x headdim,), contiguous.
        dt_bias: (heads,), floating.
        z: (rows, tokens, heads x headdim), the gate; contiguous inside a token. None: no gate.
        after: Given the state after each token, at the row's slot: (slots, tokens, heads, headdim, d_state), contiguous inside a token.

    Returns:
        (rows, tokens, heads x headdim) in the type of ``xBC``, contiguous.
    """
    if xBC.dtype == torch.float64 or not runs_kernel(xBC):
        wide, (_, heads, headdim, d_state) = compute_dtype(xBC), states.shape
        groups = (xBC.shape[2] - heads * headdim) // (2 * d_state)
        sizes, kept = [heads * headdim, groups * d_state, groups * d_state], slots >= 0
        out = torch.zeros((*xBC.shape[:2], sizes[0]), dtype=xBC.dtype, device=xBC.device)
        own = slots[kept].long()
        x, B, C = xBC[kept].to(wide).split(sizes, -1)
        x = x.unflatten(-1, (heads, headdim))
        B, C = (part.unflatten(-1, (groups, d_state)).repeat_interleave(heads // groups, 2) for part in (B, C))
        step = softplus(dt[kept].to(wide) + dt_bias.to(wide))
        decay = torch.exp(step * A.to(wide))
        state = states[own].to(wide)
        for token in range(xBC.shape[1]):
            new = (B[:, token] * step[:, token, :, None]).unsqueeze(2) * x[:, token].unsqueeze(3)
            state = state * decay[:, token, :, None, None] + new
            y = (state * C[:, token].unsqueeze(2)).sum(-1) + D.to(wide).view(heads, -1) * x[:, token]
            y = y.flatten(1) if z is None else y.flatten(1) * silu(z[kept, token].to(wide))
            out[kept, token] = y.to(out.dtype)
            if after is not None:
                after[own, token] = state.to(after.dtype)
        states[own] = state.to(states.dtype)
        return out
    rows, tokens, width = xBC.shape
    _, heads, headdim, d_state = states.shape
    groups = (width - heads * headdim) // (2 * d_state)
    assert states[0].is_contiguous() and xBC.is_contiguous() and dt.stride(2) == 1
    assert (z is None or z.stride(2) == 1) and (after is None or after[0, 0].is_contiguous())
    out = torch.empty((rows, tokens, heads * headdim), dtype=xBC.dtype, device=xBC.device)
    if rows:
        tile = tile_of(rows * heads, headdim, d_state, states.element_size(), multiprocessors(xBC.device))
        _update_kernel[(triton.cdiv(headdim, tile["BLOCK_P"]), heads, rows)](
            xBC,
            dt,
            A,
            D,
            dt_bias,
            xBC if z is None else z,
            states,
            slots,
            states if after is None else after,
            out,
            *dt.stride()[:2],
            *((0, 0) if z is None else z.stride()[:2]),
            states.stride(0),
            *((0, 0) if after is None else after.stride()[:2]),
            tokens,
            heads,
            groups,
            P=headdim,
            N=d_state,
            OF_D=headdim if D.numel() > heads else 1,
            GATE=z is not None,
            AFTER=after is not None,
            **tile,
        )
    return out


def tile_of(matrices: int, headdim: int, d_state: int, itemsize: int, processors: int) -> dict[str, Any]:
    """How many rows of a matrix (headdim, d_state) a program updates, and in how many warps.

    Fewer rows for a few matrices, but so many that each thread has a whole load: how a row lies on threads, and with it the
    order of its sum, then is the same for any number of matrices.
    """
    most, width = triton.next_power_of_2(headdim), triton.next_power_of_2(d_state)
    of_warp = 32 * _LOAD_BYTES // itemsize
    warps = max(1, min(4, most * width // of_warp))
    least = max(1, min(most, warps * of_warp // width))
    rows = max(least, min(most, _ELEMENTS // width))
    while rows > least and matrices * triton.cdiv(headdim, rows) < _PROGRAMS * processors:
        rows //= 2
    return {"BLOCK_P": rows, "BLOCK_N": width, "num_warps": warps}


@jit
def _window(x4: tl.tensor, x3: tl.tensor, x2: tl.tensor, x1: tl.tensor, TAPS: tl.constexpr) -> tl.tensor:
    """(channels, 2 or 4): the last TAPS inputs, the newest of which is ``x1``; of three a column more, to be masked."""
    if TAPS == 2:
        window = tl.join(x2, x1)
    elif TAPS == 3:
        window = tl.reshape(tl.join(tl.join(x3, x1), tl.join(x2, x1)), [x1.shape[0], 4])
    else:
        window = tl.reshape(tl.join(tl.join(x4, x2), tl.join(x3, x1)), [x1.shape[0], 4])
    return window


@jit
def _convolve_tokens_kernel(
    inputs_ptr: tl.tensor,  # (rows, tokens, dim), strided over rows and tokens
    windows_ptr: tl.tensor,  # (slots, dim, TAPS), strided over slots
    weight_ptr: tl.tensor,  # (dim, TAPS)
    bias_ptr: tl.tensor,  # (dim,); unused without BIAS
    slots_ptr: tl.tensor,  # (rows,)
    after_ptr: tl.tensor,  # (slots, tokens, dim, TAPS), strided over slots and tokens
    out_ptr: tl.tensor,  # (rows, tokens, dim), contiguous
    stride_row: tl.int64,
    stride_token: tl.int64,
    stride_slot: tl.int64,
    stride_after_slot: tl.int64,
    stride_after_token: tl.int64,
    tokens: tl.tensor,
    dim: tl.tensor,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """One program: CHANNELS channels of one row's tokens. A window is loaded and written whole, and split into its inputs."""
    row = tl.program_id(1).to(tl.int64)
    channel, tap = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    inside = channel < dim
    of_inputs, of_out = inputs_ptr + row * stride_row + channel, out_ptr + row * tokens * dim + channel
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        for token in range(tokens):
            tl.store(of_out + token * dim, tl.zeros([CHANNELS], dtype=out_ptr.dtype.element_ty), mask=inside)
        return
    kept = windows_ptr.dtype.element_ty
    in_window = channel[:, None] * TAPS + tap[None, :]
    mask = inside[:, None] & (tap < TAPS)[None, :]
    window = tl.load(windows_ptr + slot * stride_slot + in_window, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + in_window, mask=mask, other=0.0).to(kept).to(tl.float32)
    if TAPS == 2:
        x2, x1 = tl.split(window)
        w1, w0 = tl.split(weight)
        x3, x4, w2, w3 = x2, x2, w1, w1
    else:
        even, odd = tl.split(tl.reshape(window, [CHANNELS, 2, 2]))
        x4, x2 = tl.split(even)
        x3, x1 = tl.split(odd)
        even, odd = tl.split(tl.reshape(weight, [CHANNELS, 2, 2]))
        w3, w1 = tl.split(even)
        w2, w0 = tl.split(odd)
        if TAPS == 3:
            x3, x2, x1 = x4, x3, x2
            w2, w1, w0 = w3, w2, w1
    bias = tl.zeros([CHANNELS], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(kept).to(tl.float32)
    for token in range(tokens):
        x0 = tl.load(of_inputs + token * stride_token, mask=inside, other=0.0).to(kept)
        f3, f2, f1, f0 = x3.to(tl.float32), x2.to(tl.float32), x1.to(tl.float32), x0.to(tl.float32)
        out = add_taps(bias, f3, f2, f1, f0, w3, w2, w1, w0, kept, TAPS)
        tl.store(of_out + token * dim, out.to(out_ptr.dtype.element_ty), mask=inside)
        x4 = x3
        x3 = x2
        x2 = x1
        x1 = x0
        if AFTER:
            of_after = after_ptr + slot * stride_after_slot + token * stride_after_token + in_window
            tl.store(of_after, _window(x4, x3, x2, x1, TAPS).to(after_ptr.dtype.element_ty), mask=mask)
    tl.store(windows_ptr + slot * stride_slot + in_window, _window(x4, x3, x2, x1, TAPS), mask=mask)


@jit
def _update_kernel(
    xBC_ptr: tl.tensor,  # (rows, tokens, heads x P + 2 x groups x N), contiguous
    dt_ptr: tl.tensor,  # (rows, tokens, heads), strided over rows and tokens
    A_ptr: tl.tensor,  # (heads,) float32
    D_ptr: tl.tensor,  # (heads x OF_D,)
    dt_bias_ptr: tl.tensor,  # (heads,)
    z_ptr: tl.tensor,  # (rows, tokens, heads x P), strided over rows and tokens; unused without GATE
    states_ptr: tl.tensor,  # (slots, heads, P, N), strided over slots
    slots_ptr: tl.tensor,  # (rows,)
    after_ptr: tl.tensor,  # (slots, tokens, heads, P, N), strided over slots and tokens; unused without AFTER
    out_ptr: tl.tensor,  # (rows, tokens, heads x P), contiguous
    stride_dt_row: tl.int64,
    stride_dt_token: tl.int64,
    stride_z_row: tl.int64,
    stride_z_token: tl.int64,
    stride_slot: tl.int64,
    stride_after_slot: tl.int64,
    stride_after_token: tl.int64,
    tokens: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    P: tl.constexpr,
    N: tl.constexpr,
    OF_D: tl.constexpr,
    GATE: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_P rows of one head's matrix, along the tokens of one row."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    in_p, in_n = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    p_mask, n_mask = in_p < P, in_n < N
    in_head = head * P + in_p
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        for token in range(tokens):
            of_out = out_ptr + (row * tokens + token) * heads * P + in_head
            tl.store(of_out, tl.zeros([BLOCK_P], dtype=out_ptr.dtype.element_ty), mask=p_mask)
        return
    mask = p_mask[:, None] & n_mask[None, :]
    in_state = in_head[:, None] * N + in_n[None, :]
    of_states = states_ptr + slot * stride_slot + in_state
    state = tl.load(of_states, mask=mask, other=0.0).to(tl.float32)
    A, bias = tl.load(A_ptr + head), tl.load(dt_bias_ptr + head).to(tl.float32)
    of_D = D_ptr + (head if OF_D == 1 else in_head)
    D = tl.load(of_D).to(tl.float32) if OF_D == 1 else tl.load(of_D, mask=p_mask, other=0.0).to(tl.float32)
    group = head // (heads // groups)
    for token in range(tokens):
        of_x = xBC_ptr + (row * tokens + token) * (heads * P + 2 * groups * N)
        of_B = of_x + heads * P + group * N + in_n
        x = tl.load(of_x + in_head, mask=p_mask, other=0.0).to(tl.float32)
        B = tl.load(of_B, mask=n_mask, other=0.0).to(tl.float32)
        C = tl.load(of_B + groups * N, mask=n_mask, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * stride_dt_row + token * stride_dt_token + head).to(tl.float32)
        dt = stable_softplus(dt + bias)
        state = state * tl.exp(dt * A) + (dt * B)[None, :] * x[:, None]
        y = tl.sum(state * C[None, :], 1) + D * x
        if GATE:
            of_z = z_ptr + row * stride_z_row + token * stride_z_token + in_head
            z = tl.load(of_z, mask=p_mask, other=0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        of_out = out_ptr + (row * tokens + token) * heads * P + in_head
        tl.store(of_out, y.to(out_ptr.dtype.element_ty), mask=p_mask)
        if AFTER:
            of_after = after_ptr + slot * stride_after_slot + token * stride_after_token + in_state
            tl.store(of_after, state.to(after_ptr.dtype.element_ty), mask=mask)
    tl.store(of_states, state.to(states_ptr.dtype.element_ty), mask=mask)
