"""Experts of few tokens, as fast as memory gives their weights: each weight is read once, and only where a token goes.

Tensor cores multiply tiles of an expert's weights, as rows, by its tokens, as columns. A token's sums are one chain over ascending
channels in float32 whatever the batch, and the activation and the router's weight are applied before they are rounded, once.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl, triton

MOST_TOKENS = 1024
"""With more, products of many rows are faster. Not with ``exact="bits"``, where all tokens go one way."""
# Of 33 tried on an H200 at 32 to 256 tokens. All gave the same bits.
_TILE = {"COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 6}


def can_run(tokens: torch.Tensor) -> bool:
    """Whether `experts_of_few` takes these tokens, (tokens, hidden)."""
    hopper = not tokens.is_cuda or (tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] == 9)
    few = scope.is_on() or len(tokens) <= MOST_TOKENS
    return len(tokens) > 0 and few and runs_kernel(tokens) and hopper and not torch.is_grad_enabled()


def experts_of_few(
    x: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor, up: torch.Tensor, down: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The activation of ``x @ up.T`` times the router's weight, times ``down.T``: the sum over each token's experts.

    Args:
        x: (tokens, hidden), see `can_run`.
        chosen: (tokens, experts) bool, ``top_k`` of them True for each token.
        probs: (tokens, experts), the router's weights.
        up: (experts, width, hidden), the dtype of x: squared ReLU. (experts, 2 x width, hidden), gates first: SwiGLU.
        down: (experts, hidden, width), likewise.
        top_k: Experts of a token.

    Returns:
        (tokens, hidden), the dtype of x: experts are rounded, then added in the order of their numbers.
    """
    experts, hidden, width = down.shape
    counts = torch.empty(experts, dtype=torch.int32, device=x.device)
    pairs = torch.empty(experts, len(x), dtype=torch.int32, device=x.device)
    chosen, probs, x = chosen.contiguous(), probs.contiguous(), x.contiguous()
    block = triton.next_power_of_2(experts)
    _sort_kernel[(experts,)](chosen.view(torch.uint8), counts, pairs, len(x), EXPERTS=experts, BLOCK=block, TOP_K=top_k)
    inner, out = (x.new_empty(len(x) * top_k, columns) for columns in (width, hidden))
    most = 64 if len(x) <= MOST_TOKENS else 128
    rows = min(max(triton.next_power_of_2(2 * len(inner) // experts), 16), most)  # twice the mean of an expert
    lists = counts, pairs, probs, len(x), experts
    for given, weight, products, each in ((x, up, inner, top_k), (inner, down, out, 1)):
        columns, parts = products.shape[1], weight.shape[1] // products.shape[1]
        grid = (experts * triton.cdiv(columns * parts, _TILE["COLUMNS"]),)
        sizes = *lists, columns, weight.shape[2], each, weight is up, parts, rows
        _product_kernel[grid](given, weight, products, *sizes, **_TILE)
    return out.view(-1, top_k, hidden).sum(1)


@jit(do_not_specialize=["tokens"])
def _sort_kernel(
    chosen_ptr: tl.tensor,  # (tokens, EXPERTS)
    counts_ptr: tl.tensor,  # (EXPERTS,), gets the tokens of each
    pairs_ptr: tl.tensor,  # (EXPERTS, tokens), gets token x TOP_K + place among the token's experts
    tokens: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
) -> None:
    """One program: the tokens of an expert."""
    expert, columns, count = tl.program_id(0), tl.arange(0, BLOCK)[None, :], 0
    for start in range(0, tokens, 32):
        token = start + tl.arange(0, 32)
        mask = (token < tokens)[:, None] & (columns < EXPERTS)
        chosen = tl.load(chosen_ptr + token[:, None] * EXPERTS + columns, mask=mask, other=0).to(tl.int32)
        before = tl.sum(tl.where(columns < expert, chosen, 0), 1)
        own = tl.sum(tl.where(columns == expert, chosen, 0), 1)
        place = count + tl.cumsum(own, 0) - own
        tl.store(pairs_ptr + expert * tokens + place, token * TOP_K + before, mask=own > 0)
        count += tl.sum(own, 0)
    tl.store(counts_ptr + expert, count)


@jit(do_not_specialize=["tokens"])
def _product_kernel(
    x_ptr: tl.tensor,  # (pairs / EACH, depth)
    weight_ptr: tl.tensor,  # (experts, PARTS x columns, depth)
    out_ptr: tl.tensor,  # (pairs, columns)
    counts_ptr: tl.tensor,  # of `_sort_kernel`, as pairs_ptr
    pairs_ptr: tl.tensor,
    probs_ptr: tl.tensor,  # (tokens, experts)
    tokens: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    EACH: tl.constexpr,
    UP: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One program: COLUMNS outputs of an expert's tokens, ROWS tokens at a time; half of them gates where there are PARTS."""
    WIDTH: tl.constexpr = COLUMNS // PARTS
    expert, tile = tl.program_id(0) // tl.cdiv(columns, WIDTH), tl.program_id(0) % tl.cdiv(columns, WIDTH)
    place, feature = tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    column = tile * WIDTH + place % WIDTH
    weight_at = weight_ptr + ((expert.to(tl.int64) * PARTS + place // WIDTH) * columns + column) * depth
    count = tl.load(counts_ptr + expert)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        pair = tl.load(pairs_ptr + expert * tokens + row, mask=row < count, other=0)
        x_at = x_ptr + (pair // EACH).to(tl.int64) * depth
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for first in range(0, depth, DEPTH):
            inside = first + feature < depth
            mask = (column < columns)[:, None] & inside[None, :]
            weight = tl.load(weight_at[:, None] + (first + feature)[None, :], mask=mask, other=0.0)
            x = tl.load(x_at[None, :] + (first + feature)[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(weight, x, total, input_precision="ieee")
        if PARTS == 2:
            gate, total = tl.split(total.reshape(2, WIDTH, ROWS).permute(1, 2, 0))
            total = gate / (1.0 + tl.exp(-gate)) * total
        elif UP:
            total = tl.where(total < 0.0, 0.0, total)  # NaN stays NaN
            total = total * total
        if UP:
            total *= tl.load(probs_ptr + pair // EACH * experts + expert).to(tl.float32)[None, :]
        column_out = tile * WIDTH + tl.arange(0, WIDTH)
        out_at = out_ptr + pair.to(tl.int64)[None, :] * columns + column_out[:, None]
        mask = (column_out < columns)[:, None] & (row < count)[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=mask)
