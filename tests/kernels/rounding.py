"""Bounds on the rounding error of a kernel against the float64 reference, for any processor.

The bound is the forward error bound of numerical analysis (N. Higham, "Accuracy and Stability of Numerical Algorithms",
2nd ed., chapter 3): a result that sums terms, each of which went through n roundings on its way, is off by at most

    sum over terms of |term| * gamma_n,    gamma_n = n u / (1 - n u),    u = unit roundoff.

It holds in whatever order a library sums, with fused multiply-adds or without, for any blocking; so it needs no figure
from any machine. The functions below return "weighted" conditions, the sum of |term| * n, computed in float64 from the
inputs' magnitudes; `allowed` turns them into a bound for each element. Rounding in practice stays far below (errors
have either sign); arithmetic in bfloat16 is 65,536 times coarser and does not: every test of a bound has mutants.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

EXP = 4  # roundings that one exp, log or sqrt counts for: 2 units in the last place, the worst of the libraries in use
SILU = EXP + 3  # exp, 1 +, division, product
SOFTPLUS = 2 * EXP + 6  # exp and log, 1 +, - 1, division, product, and what is left of the error in 1 + exp(x)


def unit_roundoff(dtype):
    """Returns u: the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def allowed(exact, weighted, stored, *, computed=torch.float32, truncated=False):
    """Returns the largest error of each element.

    Args:
        exact: the reference, float64.
        weighted: sum of |term| * roundings, the shape of `exact`.
        stored: dtype that the result was rounded to at the end.
        computed: dtype of the arithmetic.
        truncated: whether storing cuts bits off instead of rounding to nearest, as Triton's interpreter does.
    """
    arithmetic = 1.01 * unit_roundoff(computed) * weighted + torch.finfo(computed).tiny  # 1 / (1 - n u) <= 1.01
    if stored == computed:
        return arithmetic
    stored_u = (2 if truncated else 1) * unit_roundoff(stored)
    return arithmetic + stored_u * (exact.abs() + arithmetic) + torch.finfo(stored).smallest_normal


def check(got, exact, bound):
    """Raises AssertionError if an element of `got` is further from `exact` than `bound` allows, or no number."""
    assert got.shape == exact.shape == bound.shape
    error = (got.double() - exact).abs()
    wrong = ~(error <= bound)
    ratio = (error / bound)[wrong].max().item() if wrong.any() else 0.0
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off, by up to {ratio:.3g} times the bound"


def only(mutant) -> AbstractContextManager:
    """A context in which `check` must fail if there is a mutant, and must not without one."""
    return nullcontext() if mutant is None else pytest.raises(AssertionError, match="times the bound")


def softplus_roundings(argument):
    """Returns roundings of softplus(a + b) for the float64 sum `argument`: its own, and those of the sum, amplified."""
    amplified = argument.abs() * torch.sigmoid(argument) / torch.nn.functional.softplus(argument).clamp(min=1e-300)
    return SOFTPLUS + torch.where(argument > 20, 1.0, amplified)


def mamba(x, dt, dt_roundings, A, B, C, state, D=None, z=None):
    """Weighted conditions of `naive.mamba_sequence`, computed token by token.

    Args:
        x, dt, A, B, C, state, D, z: as `naive.mamba_sequence` takes them, float64.
        dt_roundings: (tokens, heads), what went into dt, see `softplus_roundings`.

    Returns:
        weighted y (tokens, heads, dim); weighted states, a list.
    """
    tokens, heads, _ = x.shape
    repeat = heads // B.shape[1]
    magnitude, count = state.abs(), torch.zeros_like(state)
    y_weighted, states = torch.zeros_like(x), []
    for t in range(tokens):
        B_t, C_t = B[t].repeat_interleave(repeat, 0), C[t].repeat_interleave(repeat, 0).abs()
        steps = (dt[t] * A).abs()
        decay = torch.exp(dt[t] * A)[:, None, None]
        term = dt[t][:, None, None] * x[t][:, :, None] * B_t[:, None, :]
        count = decay * (count + magnitude * (steps * (dt_roundings[t] + 1))[:, None, None])
        count = count + term.abs() * (dt_roundings[t] + 3)[:, None, None]
        magnitude = decay * magnitude + term.abs()
        count = count + magnitude * (EXP + 4)
        states.append(count)
        y = (magnitude * C_t[:, None, :]).sum(-1)
        weighted = ((states[-1] + magnitude * (C.shape[2] + EXP + 3)) * C_t[:, None, :]).sum(-1)
        if D is not None:
            y, weighted = y + (D * x[t]).abs(), weighted + 3 * (D * x[t]).abs()
        if z is not None:
            gate = (z[t] * torch.sigmoid(z[t])).abs()
            weighted = (weighted + SILU * y) * gate
        y_weighted[t] = weighted
    return y_weighted, states


def convolution(x, weight, bias, before):
    """Weighted condition of `naive.conv_sequence`, all float64; silu is nowhere steeper than 1.1."""
    d_conv = weight.shape[1]
    inputs = torch.cat([before.T, x])
    taps = torch.stack([weight[:, j] * inputs[j : j + len(x)] for j in range(d_conv)])
    total = taps.sum(0) + bias
    return 1.1 * (taps.abs().sum(0) + bias.abs()) * (d_conv + 1) + SILU * (total * torch.sigmoid(total)).abs()


def gated_norm(exact, group_size):
    """Weighted condition of `naive.gated_rms_norm` without bias: a mean of squares is a sum of terms of one sign."""
    gated = SILU + 1
    root = (2 * gated + 1 + group_size + 2) / 2 + EXP + 1
    return exact.abs() * (gated + root + 2)


def attention(q, keys, values, scale, rescalings=0):
    """Weighted conditions of causal `naive.attention_rows` without a window, all float64.

    A score's error is an absolute one of the exponent, so a relative one of its weight. What is off in the highest
    score cancels between the weights and their sum.

    Args:
        q, keys, values, scale: as `naive.attention_rows` takes them.
        rescalings: how often sums so far were rescaled to a new highest score.

    Returns:
        weighted out (rows, heads, dim) and lse (heads, rows).
    """
    rows, heads, dim = q.shape
    n = len(keys)
    keys, values = (t.repeat_interleave(heads // t.shape[1], 1) for t in (keys, values))
    hidden = torch.arange(n)[None, :] > torch.arange(rows)[:, None] + n - rows
    scores = scale * torch.einsum("ihd,jhd->hij", q, keys)
    magnitude = scale * torch.einsum("ihd,jhd->hij", q.abs(), keys.abs())
    scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.softmax(-1)
    count = (dim + 2) * magnitude + (top - scores).masked_fill(hidden, 0.0) + (EXP + n + 1) + rescalings * (EXP + 3)
    total = (weights * count).sum(-1, keepdim=True)  # of the sum of weights, relative to it
    out = torch.einsum("hij,jhd->ihd", weights * (count + total + 1), values.abs())
    lse = torch.logsumexp(scores, -1)
    return out, total[..., 0] + 2 * lse.abs() + EXP * (lse - top[..., 0]) + top[..., 0].abs()


def attended(q, keys, values, scale):
    """Sum of |weight * value| of causal `naive.attention_rows`: (rows, heads, dim)."""
    rows, heads, _ = q.shape
    keys, values = (t.repeat_interleave(heads // t.shape[1], 1) for t in (keys, values))
    hidden = torch.arange(len(keys))[None, :] > torch.arange(rows)[:, None] + len(keys) - rows
    scores = scale * torch.einsum("ihd,jhd->hij", q, keys)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), values.abs())
