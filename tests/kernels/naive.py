"""Operations of layers as plain loops, one token at a time."""

import math

import torch


def softplus(x):
    """Returns log(1 + e^x) of one number, x above 20."""
    return x if x > 20 else math.log1p(math.exp(x))


def mamba_sequence(x, dt, A, B, C, state, D=None, z=None):
    """Runs h = exp(dt A) h + dt B x, y = C h + D x, y *= silu(z) over one sequence.

    Args: x, z (tokens, heads, dim); dt (tokens, heads), final; A (heads,); B, C (tokens, groups, dstate);
        state (heads, dim, dstate); D (heads, dim). The dtype is x's.

    Returns:
        y (tokens, heads, dim) and the list of states, one per token.
    """
    tokens, heads, _ = x.shape
    groups = B.shape[1]
    state = state.clone()
    y = torch.zeros_like(x)
    states = []
    for t in range(tokens):
        state = state.clone()
        for h in range(heads):
            g = h // (heads // groups)
            state[h] = torch.exp(dt[t, h] * A[h]) * state[h] + dt[t, h] * torch.outer(x[t, h], B[t, g])
            y[t, h] = state[h] @ C[t, g]
            if D is not None:
                y[t, h] += D[h] * x[t, h]
            if z is not None:
                y[t, h] *= z[t, h] * torch.sigmoid(z[t, h])
        states.append(state)
    return y, states


def conv_sequence(x, weight, bias, before):
    """Depthwise convolution and SiLU of one sequence; x (tokens, dim), before (dim, d_conv - 1)."""
    tokens, dim = x.shape
    d_conv = weight.shape[1]
    inputs = [before[:, j] for j in range(d_conv - 1)] + [x[t] for t in range(tokens)]
    out = torch.zeros_like(x)
    for t in range(tokens):
        y = bias.clone() if bias is not None else torch.zeros(dim, dtype=x.dtype)
        for j in range(d_conv):
            y = y + weight[:, j] * inputs[t + j]
        out[t] = y * torch.sigmoid(y)
    return out


def attention_rows(q, keys, values, scale, left, right):
    """Attention of the last len(q) positions; q (rows, heads, dim), keys, values (n, kv_heads, dim), float64.

    Returns:
        out (rows, heads, dim) and lse (heads, rows); rows that see nothing give 0 and +inf.
    """
    rows, heads, dim = q.shape
    n, kv_heads, _ = keys.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.full((heads, rows), float("inf"), dtype=torch.float64)
    for i in range(rows):
        position = i + n - rows
        seen = [j for j in range(n) if (left < 0 or j >= position - left) and (right < 0 or j <= position + right)]
        if not seen:
            continue
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = torch.stack([scale * (q[i, h] @ keys[j, kv]) for j in seen])
            lse[h, i] = torch.logsumexp(scores, 0)
            weights = torch.exp(scores - lse[h, i])
            for weight, j in zip(weights, seen, strict=True):
                out[i, h] += weight * values[j, kv]
    return out, lse


def pages(cache, table, tokens):
    """Returns the first `tokens` rows of a paged cache (blocks, block_size, heads, dim), one by one, in float64."""
    size = cache.shape[1]
    rows = [cache[int(table[t // size]), t % size] for t in range(tokens)]
    return torch.stack(rows).double() if rows else cache.new_zeros((0, *cache.shape[2:])).double()


def gated_rms_norm(x, weight, z, eps, group_size, norm_before_gate):
    """Gated RMS norm of rows; x (rows, dim)."""
    rows, dim = x.shape
    out = torch.zeros_like(x)
    for r in range(rows):
        gate = torch.ones(dim, dtype=x.dtype) if z is None else z[r] * torch.sigmoid(z[r])
        y = x[r] if norm_before_gate else x[r] * gate
        for first in range(0, dim, group_size):
            group = y[first : first + group_size]
            scaled = group / torch.sqrt((group * group).sum() / group_size + eps)
            out[r, first : first + group_size] = scaled * weight[first : first + group_size]
        if norm_before_gate:
            out[r] *= gate
    return out


def delta_rule_sequence(q, k, v, log_decay, beta, state, normalise):
    """Runs the gated delta rule over one sequence, one head of one token at a time.

    S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K).

    Args: q, k (tokens, key heads, K); v (tokens, heads, V); log_decay g, beta (tokens, heads); state (heads, K, V).
        Value head i reads key head i // (heads / key heads). ``normalise``: q and k become unit vectors, with 1e-6 under the
        root. The dtype is v's.

    Returns:
        Outputs (tokens, heads, V), and the states after each token (tokens, heads, K, V).
    """
    tokens, heads, _ = v.shape
    repeat = heads // k.shape[1]
    outputs, states = torch.zeros_like(v), v.new_zeros(tokens, *state.shape)
    for head in range(heads):
        matrix = state[head].clone()
        for t in range(tokens):
            key, query = k[t, head // repeat], q[t, head // repeat]
            if normalise:
                key, query = key / torch.sqrt(key.dot(key) + 1e-6), query / torch.sqrt(query.dot(query) + 1e-6)
            matrix = matrix * torch.exp(log_decay[t, head])
            missing = v[t, head] - matrix.T @ key
            matrix = matrix + torch.outer(key, beta[t, head] * missing)
            outputs[t, head] = matrix.T @ query / len(key) ** 0.5
            states[t, head] = matrix
    return outputs, states
