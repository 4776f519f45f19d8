"""Attention over a paged KV cache, on any device, as upstream's dynamic path calls flash-attn 2.

Replaces `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache`; `flash_attn_calls` has their parameters.

Requests are computed one at a time from their pages, in blocks of query rows. So a result does not depend on the rest of the
batch, and a long prompt needs no square matrix. Nothing beyond a request's valid length is read.
"""

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype

from .flash_attn_calls import flash_attn_functions

# Maximum scores in memory: a block of rows has heads * rows * keys below this (64 MiB of float32).
SCORES_PER_BLOCK = 2**24
MAX_ROWS_PER_BLOCK = 1024


def gather_pages(cache: torch.Tensor, block_ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the first `tokens` rows that a block table row points at.

    Args:
        cache: (blocks, block_size_tokens, heads, head_dim).
        block_ids: (max_blocks,), integer; entries past the needed ones are ignored.
        tokens: number of rows.

    Returns:
        (tokens, heads, head_dim), a copy.
    """
    block_size_tokens = cache.shape[1]
    blocks = -(-tokens // block_size_tokens)
    return cache.index_select(0, block_ids[:blocks]).view(-1, *cache.shape[2:])[:tokens]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention of one request. Rows that see no key are not written where the whole block of rows sees none.

    Args:
        q: (rows, heads, head_dim), the last `rows` positions of the request.
        k: (keys, kv_heads, head_dim), keys > 0.
        v: (keys, kv_heads, head_dim).
        scale: multiplies the scores.
        left: tokens visible before a query's position, -1 for all.
        right: tokens visible after it, -1 for all.
        out: (rows, heads, head_dim), zeros of any floating dtype: receives the result, 0 for a row that sees no key.
        lse: (heads, rows), +inf in the compute dtype: receives the log-sum-exp, +inf for a row that sees no key, as in
            flash-attn 2. None: nobody needs it.
    """
    rows, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    dtype = compute_dtype(q)
    heads_per_kv = heads // kv_heads
    q = (q.to(dtype) * scale).view(rows, kv_heads, heads_per_kv, head_dim).permute(1, 2, 0, 3)
    k = k.to(dtype).permute(1, 2, 0).contiguous()  # (kv_heads, head_dim, keys)
    v = v.to(dtype).transpose(0, 1).contiguous()  # (kv_heads, keys, head_dim)

    rows_per_block = max(1, min(MAX_ROWS_PER_BLOCK, SCORES_PER_BLOCK // (heads * keys)))
    for first in range(0, rows, rows_per_block):
        last = min(first + rows_per_block, rows)
        n = last - first
        start, end = first + keys - rows, last + keys - rows  # positions: bottom-right alignment
        # Key positions that any row of the block sees.
        low = max(0, start - left) if left >= 0 else 0
        high = min(keys, end + right) if right >= 0 else keys
        if low >= high:
            continue
        scores = q[:, :, first:last].reshape(kv_heads, heads_per_kv * n, head_dim) @ k.narrow(2, low, high - low)
        blind = None
        if (right >= 0 and high - 1 > start + right) or (left >= 0 and low < end - 1 - left):  # a row sees fewer keys
            position = torch.arange(start, end, device=q.device)[:, None]
            key = torch.arange(low, high, device=q.device)[None, :]
            hidden = torch.zeros(n, high - low, dtype=torch.bool, device=q.device)
            if right >= 0:
                hidden |= key > position + right
            if left >= 0:
                hidden |= key < position - left
            scores.view(kv_heads, heads_per_kv, n, high - low).masked_fill_(hidden, float("-inf"))
            if right >= 0 and start + right < 0:  # rows that see no key: all scores are -inf, and softmax is 0/0
                blind = hidden.all(dim=1).repeat(heads_per_kv)[:, None]
        top = scores.amax(dim=-1, keepdim=True)
        if blind is not None:
            top.masked_fill_(blind, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if blind is not None:
            total.masked_fill_(blind, float("inf"))
        mixed = (weights @ v.narrow(1, low, high - low)) / total  # (kv_heads, heads_per_kv * n, head_dim)
        out[first:last] = mixed.view(kv_heads, heads_per_kv, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)
        if lse is not None:
            lse[:, first:last] = (top + torch.log(total)).view(heads, n)


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None,
    window: tuple[int, int],
    block_table: torch.Tensor,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of packed queries over a paged cache, one request at a time; the `attend` of `flash_attn_functions`."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.zeros_like(q), None
    if return_lse:
        lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=compute_dtype(q), device=q.device)
    starts = cu_seqlens_q.tolist()
    for request, keys in enumerate(lengths.tolist()):
        first, last = starts[request], starts[request + 1]
        if last <= first or keys <= 0:
            continue
        pages = block_table[request]
        own_k, own_v = gather_pages(k, pages, keys), gather_pages(v, pages, keys)
        own_lse = None if lse is None else lse[:, first:last]
        _attend(q[first:last], own_k, own_v, scale, *window, out[first:last], own_lse)
    return out, lse


flash_attn_varlen_func, flash_attn_with_kvcache = flash_attn_functions(_attend_packed)
