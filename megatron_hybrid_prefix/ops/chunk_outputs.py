"""Outputs of a chunked scan, from the state before each chunk.

The first and the last part of a chunked scan (SSD, https://arxiv.org/abs/2405.21060, section 6); ``state_passing.py`` is between them.
A program computes the scores of a chunk's tokens once and uses them for several heads of their group, so they are never in memory.
Tiles depend on types and sizes only: the bits of a token depend on its chunk and the state before it, not on what else is in the step.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.delta_gates import stable_softplus
from megatron_hybrid_prefix.ops.elementwise import softplus
from megatron_hybrid_prefix.ops.finite import zero_wrong
from megatron_hybrid_prefix.ops.triton_or_torch import multiprocessors, runs_kernel, tl, triton

if triton is not None:
    from megatron_hybrid_prefix.ops.finite import is_wrong

_HEADS = 8  # of a program of the decays
_MOST_HEADS = 8  # of a program of the outputs, if there are enough programs


def chunk_decays(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    bounds: torch.Tensor,
    chunk_tokens: int,
    wrong: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes ``softplus(dt + dt_bias)`` and the logarithms of decays ``cumsum(A * step)`` along each chunk.

    A step that no scan may see is zero (`ops/finite.py`).

    Args:
        dt: (tokens, heads), packed; strided over tokens.
        A: (heads,) float32, negative.
        dt_bias: (heads,).
        bounds: (chunks + 1,) integer, chunk i is rows [bounds[i], bounds[i + 1]) of dt.
        chunk_tokens: Maximum tokens of a chunk, a power of 2.
        wrong: (>= tokens,) int32, gets 1 for each token with such a step.

    Returns:
        Both (heads, chunks, chunk_tokens) float32, contiguous. After a chunk's last token the step is 0, and the sum stays.
    """
    heads, chunks = dt.shape[1], bounds.shape[0] - 1
    steps = torch.empty(heads, chunks, chunk_tokens, dtype=torch.float32, device=dt.device)
    log_decay = torch.empty_like(steps)
    if not runs_kernel(dt):
        steps.zero_()
        for chunk in range(chunks):
            own = slice(int(bounds[chunk]), int(bounds[chunk + 1]))
            rows = zero_wrong(softplus(dt[own].float() + dt_bias.float()), wrong[own])
            steps[:, chunk, : len(rows)] = rows.T
        return steps, torch.cumsum(steps * A.view(-1, 1, 1), 2, out=log_decay)
    assert dt.stride(1) == 1 and A.is_contiguous() and dt_bias.is_contiguous()
    _chunk_decays_kernel[(chunks, triton.cdiv(heads, _HEADS))](
        dt, A, dt_bias, bounds, wrong, steps, log_decay, dt.stride(0), heads, chunks, CHUNK=chunk_tokens, HEADS=_HEADS
    )
    return steps, log_decay


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
    """
    heads, chunks, chunk_tokens = log_decay.shape
    headdim, (groups, d_state) = x.shape[2], B.shape[1:]
    if not runs_kernel(x):
        _chunk_outputs_reference(x, steps, log_decay, B, C, before, bounds, D, z, out)
        return
    gate = x if z is None else z
    assert x.stride(2) == B.stride(2) == C.stride(2) == gate.stride(2) == 1
    assert all(each.is_contiguous() for each in (steps, log_decay, before, D, out))
    tiles = _tiles(x.dtype, headdim, d_state, chunk_tokens)
    blocks = triton.cdiv(chunk_tokens, tiles["BLOCK_M"]) * triton.cdiv(headdim, tiles["BLOCK_P"])
    together = min(_MOST_HEADS, heads // groups)
    while (heads // groups) % together or (
        together > 1 and heads // together * chunks * blocks < 2 * multiprocessors(x.device)
    ):
        together -= 1
    _chunk_outputs_kernel[(blocks, heads // together, chunks)](
        x,
        steps,
        log_decay,
        B,
        C,
        before,
        bounds,
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
        P=headdim,
        N=d_state,
        CHUNK=chunk_tokens,
        OF_D=D.numel() // heads,
        GATE=z is not None,
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


def _chunk_outputs_reference(
    x: torch.Tensor,
    steps: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    before: torch.Tensor,
    bounds: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same in plain PyTorch, one chunk at a time."""
    of_group = x.shape[1] // B.shape[1]
    for chunk in range(len(before)):
        rows = slice(int(bounds[chunk]), int(bounds[chunk + 1]))
        own = slice(0, rows.stop - rows.start)
        keys, queries = (each[rows].float().repeat_interleave(of_group, 1) for each in (B, C))
        decay, values = log_decay[:, chunk, own], x[rows].float()
        weights = torch.einsum("thn,shn->hts", queries, keys) * (decay[:, :, None] - decay[:, None]).clamp(max=0).exp()
        weights = (weights * steps[:, chunk, None, own]).tril().to(x.dtype).float()
        state = before[chunk].to(x.dtype).float()
        y = torch.einsum("thn,hpn,ht->thp", queries, state, decay.exp())
        y = y + torch.einsum("hts,shp->thp", weights, values) + D.float().view(x.shape[1], -1) * values
        out[rows] = (y if z is None else y * torch.nn.functional.silu(z[rows].float())).to(out.dtype)


if triton is not None:
    # One program for prompts of any length: none is compiled while requests wait.
    _NUMBERS = ["heads", "chunks"]

    @triton.jit(do_not_specialize=_NUMBERS)
    def _chunk_decays_kernel(
        dt_ptr: tl.tensor,  # (tokens, heads), strided over tokens
        A_ptr: tl.tensor,  # (heads,)
        dt_bias_ptr: tl.tensor,  # (heads,)
        bounds_ptr: tl.tensor,  # (chunks + 1,)
        wrong_ptr: tl.tensor,  # (tokens,)
        steps_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        stride_dt: tl.int64,
        heads: tl.tensor,
        chunks: tl.tensor,
        CHUNK: tl.constexpr,
        HEADS: tl.constexpr,
    ) -> None:
        """One program: HEADS heads of one chunk."""
        chunk = tl.program_id(0).to(tl.int64)
        head, token = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, CHUNK)
        start = tl.load(bounds_ptr + chunk).to(tl.int64)
        tokens = (tl.load(bounds_ptr + chunk + 1) - start).to(tl.int32)
        of_head = head < heads
        mask = of_head[:, None] & (token < tokens)[None, :]
        dt = tl.load(dt_ptr + (start + token)[None, :] * stride_dt + head[:, None], mask=mask, other=0.0)
        bias = tl.load(dt_bias_ptr + head, mask=of_head, other=0.0).to(tl.float32)
        dt = dt.to(tl.float32) + bias[:, None]
        steps = tl.where(mask, stable_softplus(dt), 0.0)
        bad = is_wrong(dt)  # its softplus would hide NaN
        steps = tl.where(bad, 0.0, steps)
        bad_tokens = tl.max(bad.to(tl.int32), 0)
        tl.store(wrong_ptr + start + token, bad_tokens, mask=bad_tokens > 0)
        A = tl.load(A_ptr + head, mask=of_head, other=0.0)
        at = (head[:, None].to(tl.int64) * chunks + chunk) * CHUNK + token[None, :]
        tl.store(steps_ptr + at, steps, mask=of_head[:, None])
        tl.store(log_decay_ptr + at, tl.cumsum(steps * A[:, None], 1), mask=of_head[:, None])

    @triton.jit
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

    @triton.jit
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

    @triton.jit(do_not_specialize=[*_NUMBERS, "heads_of_group", "heads_of_program"])
    def _chunk_outputs_kernel(
        x_ptr: tl.tensor,  # (tokens, heads, P), strided over tokens and heads
        steps_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        log_decay_ptr: tl.tensor,  # (heads, chunks, CHUNK)
        B_ptr: tl.tensor,  # (tokens, groups, N), strided over tokens and groups
        C_ptr: tl.tensor,  # (tokens, groups, N), likewise
        before_ptr: tl.tensor,  # (chunks, heads, P, N)
        bounds_ptr: tl.tensor,  # (chunks + 1,)
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
        P: tl.constexpr,
        N: tl.constexpr,
        CHUNK: tl.constexpr,
        OF_D: tl.constexpr,
        GATE: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ) -> None:
        """One program: BLOCK_M tokens of a chunk, BLOCK_P channels of some heads of one group."""
        blocks_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
        first_m = tl.program_id(0) // blocks_p * BLOCK_M
        first_head, chunk = (tl.program_id(1) * heads_of_program).to(tl.int64), tl.program_id(2).to(tl.int64)
        start = tl.load(bounds_ptr + chunk).to(tl.int64)
        tokens = (tl.load(bounds_ptr + chunk + 1) - start).to(tl.int32)
        if first_m >= tokens:
            return
        m, k, n = first_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
        p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
        m_mask, n_mask, p_mask = m < tokens, n < N, p < P
        row, group = start + m, first_head // heads_of_group
        of_c = C_ptr + row[:, None] * stride_C + group * stride_C_group + n[None, :]
        C = tl.load(of_c, mask=m_mask[:, None] & n_mask[None, :], other=0.0)
        of_b = B_ptr + start * stride_B + group * stride_B_group + n[:, None]
        if BLOCK_K >= CHUNK:
            scores = _scores(C, of_b, stride_B, n_mask, m, k, tokens)
        mask = m_mask[:, None] & p_mask[None, :]
        for head in range(first_head, first_head + heads_of_program):
            of_chunk = (head * chunks + chunk) * CHUNK
            decay_m = tl.load(log_decay_ptr + of_chunk + m, mask=m_mask, other=0.0)
            of_state = ((chunk * heads + head) * P + p[None, :]) * N + n[:, None]
            state = tl.load(before_ptr + of_state, mask=n_mask[:, None] & p_mask[None, :], other=0.0)
            of_x = x_ptr + start * stride_x + head * stride_x_head + p[None, :]
            y = tl.dot(C, state.to(C.dtype)) * tl.exp(decay_m)[:, None]
            if BLOCK_K >= CHUNK:
                y += _from_tokens(
                    scores, decay_m, of_chunk, steps_ptr, log_decay_ptr, of_x, stride_x, p_mask, k, tokens
                )
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
            of_out = out_ptr + (row[:, None] * heads + head) * P + p[None, :]
            tl.store(of_out, y.to(out_ptr.dtype.element_ty), mask=mask)
