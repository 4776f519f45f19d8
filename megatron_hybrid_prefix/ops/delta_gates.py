"""Operations around the gated delta rule in a layer: the gates of each token before it, and the gated norm of each head after it.

Each is one kernel on a GPU. As operations of PyTorch they are eight and five, and the latter pass tensors of float32 as large as
the outputs of all heads.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.elementwise import sigmoid, silu, softplus
from megatron_hybrid_prefix.ops.finite import zero_wrong
from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

if triton is not None:
    from megatron_hybrid_prefix.ops.finite import is_wrong

_ROWS = 8  # tokens of a program of `gates`
_FEATURES = 2048  # of a program of `gated_head_norm`


def gates(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    wrong: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-exp(a_log) * softplus(alpha + dt_bias)`` and ``sigmoid(beta)``, computed in float32.

    Args:
        alpha: (..., heads), floating; rows may be strided.
        beta: (..., heads), likewise.
        a_log: (heads,), floating, contiguous.
        dt_bias: (heads,), floating, contiguous.
        wrong: (>= tokens,) int32, gets 1 for each token with a result that no scan may see (`ops/finite.py`); it is zero then. None: a
            decode, whose tokens do not meet.

    Returns:
        log_decay: (..., heads) float32 (float64 of float64), contiguous.
        beta: (..., heads) in beta's type, contiguous.
    """
    if alpha.dtype == torch.float64 or not runs_kernel(alpha):
        wide = torch.promote_types(alpha.dtype, torch.float32)
        found = -a_log.to(wide).exp() * softplus(alpha.to(wide) + dt_bias), sigmoid(beta.to(wide)).to(beta.dtype)
        return found if wrong is None else (zero_wrong(found[0], wrong), zero_wrong(found[1], wrong))
    log_decay = torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device)
    rate = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    alpha, beta = _rows(alpha), _rows(beta)
    tokens, heads = alpha.shape
    if tokens:
        _gates_kernel[(triton.cdiv(tokens, _ROWS),)](
            alpha,
            beta,
            a_log,
            dt_bias,
            log_decay,
            rate,
            log_decay if wrong is None else wrong,
            alpha.stride(0),
            beta.stride(0),
            tokens,
            heads,
            MARKS=wrong is not None,
            ROWS=_ROWS,
            BLOCK=triton.next_power_of_2(heads),
        )
    return log_decay, rate


def gated_head_norm(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm of each head's channels, times the SiLU of its gate; computed in float32, rounded once.

    Args:
        y: (..., heads, V), contiguous.
        z: (..., heads, V), the gates; contiguous but for its rows, which may be strided.
        weight: (V,), the same for all heads.
        epsilon: Added to the mean square.

    Returns:
        (..., heads x V) in y's type, contiguous.
    """
    heads, size = y.shape[-2:]
    if y.dtype == torch.float64 or not runs_kernel(y):
        wide = torch.promote_types(y.dtype, torch.float32)
        scale = torch.rsqrt(y.to(wide).square().mean(-1, keepdim=True) + epsilon)
        return (y.to(wide) * scale * weight.to(wide) * silu(z.to(wide))).to(y.dtype).flatten(-2)
    out = torch.empty((*y.shape[:-2], heads * size), dtype=y.dtype, device=y.device)
    y, z = _rows(y.flatten(-2)), _rows(z.flatten(-2))
    rows, block = y.shape[0], triton.next_power_of_2(size)
    together = max(1, min(triton.next_power_of_2(heads), _FEATURES // block))
    if rows:
        _gated_head_norm_kernel[(rows, triton.cdiv(heads, together))](
            y, z, weight, out, y.stride(0), z.stride(0), heads, size, epsilon, HEADS=together, BLOCK=block
        )
    return out


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, width), strided over rows, contiguous inside one; a view where the strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


if triton is not None:

    @triton.jit
    def stable_softplus(x: tl.tensor) -> tl.tensor:
        """log(1 + exp(x)), also where 1 + exp(x) rounds to 1: then log(u) is corrected by what u = 1 + exp(x) lost."""
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        lost = u - 1.0
        found = tl.where(lost == 0.0, e, tl.log(u) * (e / tl.where(lost == 0.0, 1.0, lost)))
        return tl.where(x > 20.0, x, found)

    @triton.jit
    def _gates_kernel(
        alpha_ptr: tl.tensor,  # (tokens, heads), strided over tokens
        beta_ptr: tl.tensor,  # (tokens, heads), likewise
        a_log_ptr: tl.tensor,  # (heads,)
        dt_bias_ptr: tl.tensor,  # (heads,)
        log_decay_ptr: tl.tensor,  # (tokens, heads) float32, contiguous
        rate_ptr: tl.tensor,  # (tokens, heads), contiguous
        wrong_ptr: tl.tensor,  # (tokens,); unused without MARKS
        stride_alpha: tl.int64,
        stride_beta: tl.int64,
        tokens: tl.tensor,
        heads: tl.tensor,
        MARKS: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: ROWS tokens."""
        rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        columns = tl.arange(0, BLOCK)
        of_head = columns < heads
        mask = (rows < tokens) & of_head[None, :]
        a = tl.exp(tl.load(a_log_ptr + columns, mask=of_head, other=0.0).to(tl.float32))
        bias = tl.load(dt_bias_ptr + columns, mask=of_head, other=0.0).to(tl.float32)
        alpha = tl.load(alpha_ptr + rows * stride_alpha + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + rows * stride_beta + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        out = rows * heads + columns[None, :]
        log_decay = -a[None, :] * stable_softplus(alpha + bias[None, :])
        rate = 1.0 / (1.0 + tl.exp(-beta))
        if MARKS:
            bad_decay, bad_rate = is_wrong(log_decay) | is_wrong(alpha), is_wrong(rate)  # softplus would hide NaN
            bad = tl.max(((bad_decay | bad_rate) & mask).to(tl.int32), 1)[:, None]
            tl.store(wrong_ptr + rows, bad, mask=bad > 0)
            log_decay, rate = tl.where(bad_decay, 0.0, log_decay), tl.where(bad_rate, 0.0, rate)
        tl.store(log_decay_ptr + out, log_decay, mask=mask)
        tl.store(rate_ptr + out, rate.to(rate_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _gated_head_norm_kernel(
        y_ptr: tl.tensor,  # (rows, heads x size), strided over rows
        z_ptr: tl.tensor,  # (rows, heads x size), likewise
        weight_ptr: tl.tensor,  # (size,)
        out_ptr: tl.tensor,  # (rows, heads x size), contiguous
        stride_y: tl.int64,
        stride_z: tl.int64,
        heads: tl.tensor,
        size: tl.tensor,
        epsilon: tl.tensor,
        HEADS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: HEADS heads of one row."""
        row = tl.program_id(0).to(tl.int64)
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        mask = (head < heads) & (column < size)
        at = head * size + column
        y = tl.load(y_ptr + row * stride_y + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * stride_z + at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(y * y, 1) / size + epsilon)
        out = y * scale[:, None] * weight * (z / (1.0 + tl.exp(-z)))
        tl.store(out_ptr + row * heads * size + at, out.to(out_ptr.dtype.element_ty), mask=mask)
