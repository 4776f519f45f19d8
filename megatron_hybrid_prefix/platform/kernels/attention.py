"""Attention over a paged KV cache, on any device, as upstream's dynamic path calls flash-attn 2.

Stands in for `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache` at the call sites of
`megatron.core.transformer.attention.Attention.flash_decode_and_prefill`: both read keys and values through a block
table, align the causal mask to the bottom right, and may return the log-sum-exp for attention sinks.

Requests are computed one at a time from their own pages, in blocks of query rows: a result does not depend on the rest
of the batch, and a long prompt needs no square matrix. What lies outside a request's valid length is never read.
"""

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div

from .elementwise import compute_dtype

# Scores held at once: rows are blocked so that heads * rows * keys stays below this (64 MiB of float32).
SCORES_PER_BLOCK = 2**24
MAX_ROWS_PER_BLOCK = 1024


def check_unused(function, **options):
    """Raises NotImplementedError for a flash-attn option that is set and that the call sites never set.

    Args:
        function: name for the message.
        **options: option name to (value given, value that means "off").
    """
    for name, (value, off) in options.items():
        if value is not off and value != off:
            raise NotImplementedError(f"{function} does not implement {name}={value!r}")


def window_of(causal, window_size):
    """Returns (left, right) tokens visible around a query's own position, -1 for no limit; causal means right = 0."""
    left, right = (-1, -1) if window_size is None else window_size
    return int(left), 0 if causal else int(right)


def gather_pages(cache, block_ids, tokens):
    """Returns the first `tokens` rows that a block table row points at.

    Args:
        cache: (blocks, block_size_tokens, heads, head_dim).
        block_ids: (max_blocks,), integer; entries past the needed ones are ignored.
        tokens: rows wanted.

    Returns: (tokens, heads, head_dim), a copy.
    """
    block_size_tokens = cache.shape[1]
    blocks = ceil_div(tokens, block_size_tokens)
    return cache[block_ids[:blocks].long()].reshape(-1, *cache.shape[2:])[:tokens]


def _attend(q, k, v, scale, left, right):
    """Attention of one request.

    Args:
        q: (rows, heads, head_dim), the last `rows` positions of the request.
        k: (keys, kv_heads, head_dim), keys > 0.
        v: (keys, kv_heads, head_dim).
        scale: multiplies the scores.
        left: tokens visible before a query's position, -1 for all.
        right: tokens visible after it, -1 for all.

    Returns:
        (out, lse) in the compute dtype: (rows, heads, head_dim) and (heads, rows). A row that sees no key has out 0 and
        lse +inf, as flash-attn 2 has it.
    """
    rows, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    dtype = compute_dtype(q)
    heads_per_kv = heads // kv_heads
    q = (q.to(dtype) * scale).view(rows, kv_heads, heads_per_kv, head_dim).permute(1, 2, 0, 3)
    k = k.to(dtype).permute(1, 2, 0).contiguous()  # (kv_heads, head_dim, keys)
    v = v.to(dtype).transpose(0, 1).contiguous()  # (kv_heads, keys, head_dim)
    out = torch.zeros(rows, heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((heads, rows), float("inf"), dtype=dtype, device=q.device)

    rows_per_block = max(1, min(MAX_ROWS_PER_BLOCK, SCORES_PER_BLOCK // (heads * keys)))
    for first in range(0, rows, rows_per_block):
        last = min(first + rows_per_block, rows)
        # Key positions that any row of the block sees: bottom-right alignment puts row i at position i + keys - rows.
        low = max(0, first + keys - rows - left) if left >= 0 else 0
        high = min(keys, last + keys - rows + right) if right >= 0 else keys
        if low >= high:
            continue
        n = last - first
        scores = q[:, :, first:last].reshape(kv_heads, heads_per_kv * n, head_dim) @ k[:, :, low:high]
        position = torch.arange(first, last, device=q.device)[:, None] + (keys - rows)
        key = torch.arange(low, high, device=q.device)[None, :]
        hidden = torch.zeros(n, high - low, dtype=torch.bool, device=q.device)
        if right >= 0:
            hidden |= key > position + right
        if left >= 0:
            hidden |= key < position - left
        scores.view(kv_heads, heads_per_kv, n, high - low).masked_fill_(hidden, float("-inf"))
        blind = hidden.all(dim=1).repeat(heads_per_kv)  # rows that see nothing: -inf everywhere, softmax is 0/0
        top = scores.amax(dim=-1, keepdim=True).masked_fill_(blind[:, None], 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True).masked_fill_(blind[:, None], float("inf"))
        mixed = (weights @ v[:, low:high]) / total  # (kv_heads, heads_per_kv * n, head_dim)
        out[first:last] = mixed.view(kv_heads, heads_per_kv, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)
        lse[:, first:last] = (top + torch.log(total)).view(heads, n)
    return out, lse


@torch.no_grad()
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention of packed queries over a paged cache.

    Args:
        q: (total_q, heads, head_dim), floating. Rows past `cu_seqlens_q[-1]` are padding.
        k: (blocks, block_size_tokens, kv_heads, head_dim), floating; kv_heads divides heads.
        v: as k.
        cu_seqlens_q: (requests + 1,), integer; repeats mark requests without queries.
        cu_seqlens_k: (requests + 1,), integer: only the differences matter, the valid tokens of each request.
        max_seqlen_q: ignored; kernels need it, a loop does not.
        max_seqlen_k: ignored.
        softmax_scale: multiplies the scores; None means head_dim ** -0.5.
        causal: whether keys after a query's position are hidden; the last query sits at the last key.
        window_size: (left, right) tokens visible around a query's position, -1 for no limit.
        return_attn_probs: whether to return the log-sum-exp too.
        block_table: (requests, max_blocks), integer. Required.

    Returns:
        out (total_q, heads, head_dim) in q's dtype, zero for rows that see no key and for padding; or (out, lse, None)
        with lse (heads, total_q), float32 (float64 for float64 queries), +inf for those rows.

    Raises:
        NotImplementedError: dropout, softcap, ALiBi, or no block table.
    """
    check_unused(
        "flash_attn_varlen_func",
        dropout_p=(dropout_p, 0.0),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
    )
    if block_table is None:
        raise NotImplementedError("flash_attn_varlen_func is implemented for a paged cache only: block_table is None")
    left, right = window_of(causal, window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=compute_dtype(q), device=q.device)
    starts = cu_seqlens_q.tolist()
    key_starts = cu_seqlens_k.tolist()
    for request in range(len(starts) - 1):
        rows = slice(starts[request], starts[request + 1])
        keys = key_starts[request + 1] - key_starts[request]
        if rows.stop <= rows.start or keys <= 0:
            continue
        pages = block_table[request]
        mixed, row_lse = _attend(
            q[rows], gather_pages(k, pages, keys), gather_pages(v, pages, keys), scale, left, right
        )
        out[rows] = mixed.to(q.dtype)
        lse[:, rows] = row_lse
    return (out, lse, None) if return_attn_probs else out


@torch.no_grad()
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of equally many queries per request over a paged cache (decode).

    Args:
        q: (requests, steps, heads, head_dim), floating: the last `steps` positions of each request.
        k_cache: (blocks, block_size_tokens, kv_heads, head_dim), floating; kv_heads divides heads.
        v_cache: as k_cache.
        cache_seqlens: (requests,), integer, or one int: valid tokens, the queries' own included. Required.
        block_table: (requests, max_blocks), integer. Required.
        softmax_scale: multiplies the scores; None means head_dim ** -0.5.
        causal: whether keys after a query's position are hidden; the last query sits at the last key.
        window_size: (left, right) tokens visible around a query's position, -1 for no limit.
        num_splits: ignored; a matter of speed only.
        return_softmax_lse: whether to return the log-sum-exp too.

    Returns:
        out (requests, steps, heads, head_dim) in q's dtype, zero for rows that see no key; or (out, lse) with lse
        (requests, heads, steps), float32 (float64 for float64 queries), +inf for those rows.

    Raises:
        NotImplementedError: any other option that is set, or no block table or lengths.
    """
    check_unused(
        "flash_attn_with_kvcache",
        k=(k, None),
        v=(v, None),
        rotary_cos=(rotary_cos, None),
        rotary_sin=(rotary_sin, None),
        cache_batch_idx=(cache_batch_idx, None),
        cache_leftpad=(cache_leftpad, None),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
    )
    if block_table is None or cache_seqlens is None:
        raise NotImplementedError("flash_attn_with_kvcache is implemented for block_table and cache_seqlens only")
    requests, steps, heads, head_dim = q.shape
    lengths = torch.as_tensor(cache_seqlens, device=q.device).expand(requests)
    out, lse, _ = flash_attn_varlen_func(
        q.reshape(requests * steps, heads, head_dim),
        k_cache,
        v_cache,
        torch.arange(requests + 1, device=q.device) * steps,
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        steps,
        None,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        return_attn_probs=True,
        block_table=block_table,
    )
    out = out.view(requests, steps, heads, -1)
    return (out, lse.view(heads, requests, steps).transpose(0, 1)) if return_softmax_lse else out
