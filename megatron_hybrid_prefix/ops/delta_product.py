"""The gated delta product, from and to slots: the gated delta rule with several pairs of key and value a token.

A head's state S, (K, V), decays at each token, and moves towards the token's values, one pair j after another
(https://arxiv.org/abs/2502.10297):

    S <- exp(g) S
    S <- S + k_j (beta_j (v_j - S^T k_j))^T, for each j
    o  = S^T q

A token of n pairs is n tokens of ``delta_rule``, its *steps*: the first one decays, and the last one's output is the token's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.delta_rule import flush_delta_rule, scan_delta_rule, update_delta_rule
from megatron_hybrid_prefix.ops.rings import RingRows

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of n pairs a token: q (tokens, key heads, K); k (tokens, n, key heads, K); v (tokens, n, value heads, V); log-decays (tokens, value heads)
float32; beta (tokens, n, value heads). A decode's have a dimension of rows before that of tokens."""
Rings = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of k, of what is written and of log-decays, as of `update_delta_rule`: (rings, entries, n, *shape). An entry is a token."""


def scan_pairs(
    inputs: Inputs,
    states: torch.Tensor,
    *,
    chunk_bounds: torch.Tensor,
    kept: torch.Tensor | None = None,
    **slots: torch.Tensor,
) -> torch.Tensor:
    """All sequences of a prefill. Queries and keys are made unit vectors.

    Args:
        inputs: Packed.
        states: (slots, value heads, K, V), the pool of one layer.
        chunk_bounds: (chunks + 1,) integer, in steps: chunks are cut at multiples of 64 steps, also inside of a token.
        kept: As of `scan_delta_rule`.
        **slots: Likewise.

    Returns:
        (tokens, value heads, V) in v's type; zero in rows of no sequence.
    """
    y = scan_delta_rule(*steps_of(*inputs), states, normalise=True, chunk_bounds=chunk_bounds, kept=kept, **slots)
    return y.unflatten(0, inputs[1].shape[:2])[:, -1]


def update_pairs(inputs: Inputs, states: torch.Tensor, rows: RingRows, rings: Rings) -> torch.Tensor:
    """A token or several of each row, see `update_delta_rule`. Returns (rows, tokens, value heads, V) in v's type; zero in padding."""
    (keys, written, decays), pairs = (ring.flatten(1, 2) for ring in rings), inputs[1].shape[1:3]
    steps, rows = steps_of(*inputs), _rows_of_steps(rows, pairs[1])
    y = update_delta_rule(*steps, states, rows, keys=keys, written=written, decays=decays, normalise=True)
    return y.unflatten(1, pairs)[:, :, -1]


def flush_pairs(states: torch.Tensor, rings: Rings, rows: RingRows) -> None:
    """`update_pairs` without tokens: states are written where `RingRows` says so."""
    keys, written, decays = (ring.flatten(1, 2) for ring in rings)
    flush_delta_rule(states, keys, written, decays, _rows_of_steps(rows, rings[0].shape[2]))


def steps_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> Inputs:
    """The `Inputs` of a delta rule's tokens, n for one: its dimensions of tokens and of pairs are one."""
    at, n = q.dim() - 3, k.shape[-3]
    q = q.unsqueeze(at + 1).expand(k.shape)  # only the last output of a token counts
    log_decay = F.pad(log_decay.unsqueeze(at + 1), (0, 0, 0, n - 1))
    q, k, v, log_decay, beta = (each.flatten(at, at + 1) for each in (q, k, v, log_decay, beta))
    return q, k, v, log_decay, beta


def _rows_of_steps(rows: RingRows, n: int) -> RingRows:
    return rows._replace(positions=rows.positions * n, origins=rows.origins * n, ends=rows.ends * n)
