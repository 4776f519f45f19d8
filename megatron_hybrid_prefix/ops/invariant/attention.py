"""Attention over a paged KV cache on a CPU, in tiles of queries and keys that lie at fixed positions of a request.

A query's place in its tile and a key's place in its tile depend on their positions in the request alone. All products have one
shape, and the tiles of keys are added in ascending order. Keys that a query does not see add exact zeros. So a row has the same
bits in a prefill of any span and in a decode.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.support.arithmetic import ceil_div

TILE_QUERIES, TILE_KEYS = 16, 64


def attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    starts: list[int],
    lengths: list[int],
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries, each request's being its last positions.

    Args:
        q: (tokens, heads, head_dim), floating; rows after ``starts[-1]`` are padding.
        k: (blocks, block_tokens, kv_heads, head_dim).
        v: As k.
        starts: Of each request its first row, and then the end of the last request's rows.
        lengths: Of each request its valid tokens, the queries included.
        block_table: (requests, most blocks), integer.
        scale: Multiplies the scores.

    Returns:
        (tokens, heads, head_dim) in q's dtype; zero in padding.
    """
    out = torch.zeros_like(q)
    for request, keys in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.stop > rows.start and keys > 0:
            blocks = block_table[request, : ceil_div(keys, k.shape[1])].long()
            own_k, own_v = (_key_tiles(cache[blocks].flatten(0, 1)[:keys]) for cache in (k, v))
            out[rows] = _attend(q[rows], own_k, own_v, keys - (rows.stop - rows.start), scale)
    return out


def _key_tiles(x: torch.Tensor) -> torch.Tensor:
    """(keys, kv_heads, head_dim) to (tiles, kv_heads, TILE_KEYS, head_dim), zeros after the last key."""
    padded = x.new_zeros(ceil_div(len(x), TILE_KEYS) * TILE_KEYS, *x.shape[1:])
    padded[: len(x)] = x
    return padded.view(-1, TILE_KEYS, *x.shape[1:]).transpose(1, 2).contiguous()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Queries (rows, heads, head_dim) at positions from ``first`` on; k and v as of `_key_tiles`."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    positions = torch.arange(TILE_QUERIES)[:, None]
    keys = torch.arange(TILE_KEYS)[None, :]
    for tile in range(first // TILE_QUERIES, ceil_div(first + rows, TILE_QUERIES)):
        begin = tile * TILE_QUERIES  # position of the tile's first query
        low, high = max(begin, first), min(begin + TILE_QUERIES, first + rows)
        queries = q.new_zeros(TILE_QUERIES, heads, head_dim)
        queries[low - begin : high - begin] = q[low - first : high - first]
        by_head = (queries * scale).view(TILE_QUERIES, kv_heads, group, head_dim).permute(1, 2, 0, 3).contiguous()
        top = q.new_full((heads, TILE_QUERIES, 1), float("-inf"))
        total = q.new_zeros(heads, TILE_QUERIES, 1)
        mixed = q.new_zeros(heads, TILE_QUERIES, head_dim)
        for number in range(ceil_div(high, TILE_KEYS)):
            hidden = number * TILE_KEYS + keys > begin + positions
            scores = _products(by_head, k[number].transpose(1, 2)).masked_fill(hidden, float("-inf"))
            highest = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - highest)  # the first tile of keys has one that every query sees
            faded = torch.exp(top - highest)
            total = total * faded + weights.sum(dim=-1, keepdim=True)
            mixed = mixed * faded + _products(weights.view(kv_heads, group, TILE_QUERIES, TILE_KEYS), v[number])
            top = highest
        result = (mixed / total).transpose(0, 1)
        out[low - first : high - first] = result[low - begin : high - begin]
    return out


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(kv_heads, group, rows, x) times (kv_heads, x, columns): (heads, rows, columns)."""
    kv_heads, group, rows, width = left.shape
    found = torch.bmm(left.reshape(kv_heads, group * rows, width), right)
    return found.view(kv_heads * group, rows, -1)
