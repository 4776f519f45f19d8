"""The gates of each token before the gated delta rule, or product: one kernel on a GPU, eight operations of PyTorch."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.elementwise import is_wrong, sigmoid, softplus, stable_softplus, zero_wrong
from megatron_hybrid_prefix.ops.gated_norm import packed_rows
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

_ROWS = 8  # tokens of a program


def gates(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    wrong: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-exp(a_log) * softplus(alpha + dt_bias)`` and ``scale * sigmoid(beta)``, computed in float32.

    Args:
        alpha: (..., heads), floating; rows may be strided.
        beta: (..., width), likewise: as wide as alpha, or several times.
        a_log: (heads,), floating, contiguous.
        dt_bias: (heads,), floating, contiguous.
        wrong: (>= tokens,) int32, gets 1 for each token with a result that no scan may see (`ops/elementwise.py`); it is zero then. None: a
            decode, whose tokens do not meet.
        scale: Of beta: 2 allows negative eigenvalues (https://arxiv.org/abs/2411.12537).

    Returns:
        log_decay: (..., heads) float32 (float64 of float64), contiguous.
        beta: (..., width) in beta's type, contiguous.
    """
    if alpha.dtype == torch.float64 or not runs_kernel(alpha):
        wide = torch.promote_types(alpha.dtype, torch.float32)
        log_decay, rate = -a_log.to(wide).exp() * softplus(alpha.to(wide) + dt_bias), scale * sigmoid(beta.to(wide))
        found = log_decay, rate.to(beta.dtype)
        return found if wrong is None else (zero_wrong(found[0], wrong), zero_wrong(found[1], wrong))
    log_decay = torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device)
    rate = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    alpha, beta = packed_rows(alpha), packed_rows(beta)
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
            scale,
            tokens,
            heads,
            beta.shape[-1],
            MARKS=wrong is not None,
            ROWS=_ROWS,
            BLOCK=triton.next_power_of_2(heads),
            WIDTH=triton.next_power_of_2(beta.shape[-1]),
        )
    return log_decay, rate


@jit
def _gates_kernel(
    alpha_ptr: tl.tensor,  # (tokens, heads), strided over tokens
    beta_ptr: tl.tensor,  # (tokens, width), likewise
    a_log_ptr: tl.tensor,  # (heads,)
    dt_bias_ptr: tl.tensor,  # (heads,)
    log_decay_ptr: tl.tensor,  # (tokens, heads) float32, contiguous
    rate_ptr: tl.tensor,  # (tokens, width), contiguous
    wrong_ptr: tl.tensor,  # (tokens,); unused without MARKS
    stride_alpha: tl.int64,
    stride_beta: tl.int64,
    scale: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    MARKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program: ROWS tokens."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns, in_beta = tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    of_head = columns < heads
    mask, mask_beta = (rows < tokens) & of_head[None, :], (rows < tokens) & (in_beta < width)
    a = tl.exp(tl.load(a_log_ptr + columns, mask=of_head, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + columns, mask=of_head, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + rows * stride_alpha + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + rows * stride_beta + in_beta, mask=mask_beta, other=0.0).to(tl.float32)
    log_decay = -a[None, :] * stable_softplus(alpha + bias[None, :])
    rate = scale / (1.0 + tl.exp(-beta))
    if MARKS:
        bad_decay, bad_rate = is_wrong(log_decay) | is_wrong(alpha), is_wrong(rate)  # softplus would hide NaN
        bad = tl.max((bad_decay & mask).to(tl.int32), 1) | tl.max((bad_rate & mask_beta).to(tl.int32), 1)
        bad = bad[:, None]
        tl.store(wrong_ptr + rows, bad, mask=bad > 0)
        log_decay, rate = tl.where(bad_decay, 0.0, log_decay), tl.where(bad_rate, 0.0, rate)
    tl.store(log_decay_ptr + rows * heads + columns[None, :], log_decay, mask=mask)
    tl.store(rate_ptr + rows * width + in_beta, rate.to(rate_ptr.dtype.element_ty), mask=mask_beta)
