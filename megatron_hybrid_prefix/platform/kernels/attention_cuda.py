"""Attention over a paged KV cache on a CUDA device without flash-attn, in one Triton kernel, and fixes of FlashAttention 4.

Replaces `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache`; `flash_attn_calls` has their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, tl, triton

from .flash_attn_calls import flash_attn_functions, window_of

FlashAttention4 = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_FEW_QUERIES, _MANY_QUERIES = 16, 64  # of a program
_KEYS, _KEY_BYTES = 64, 8192  # that a program multiplies at a time


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of packed queries over a paged cache, without decisions of the host: a CUDA graph can capture it.

    Scores and sums are float32. In float32 all programs have as many queries, so a row's bits do not depend on the others.

    Args:
        q: (total_q, heads, head_dim).
        k: (blocks, block_size_tokens, kv_heads, head_dim), contiguous over head_dim.
        v: as k.
        cu_seqlens_q: (requests + 1,), integer.
        lengths: (requests,), integer: valid tokens of each request; its queries are the last of them.
        max_seqlen_q: maximum queries of a request.
        softmax_scale: multiplies the scores; None means head_dim ** -0.5.
        block_table: (requests, max_blocks), integer, contiguous over blocks.

    Returns:
        (total_q, heads, head_dim) in q's dtype; zero for padding rows and requests without keys.
    """
    _, heads, head_dim = q.shape
    q = q.contiguous()
    out = torch.zeros_like(q)
    requests = lengths.shape[0]
    if not q.numel() or not requests:
        return out
    assert k.stride(3) == v.stride(3) == block_table.stride(1) == 1 and k.stride() == v.stride()
    tiles = tiles_of(q.dtype, head_dim, max_seqlen_q)
    _paged_attention_kernel[(triton.cdiv(max_seqlen_q, tiles["QUERIES"]), heads, requests)](
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        lengths,
        block_table,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        heads,
        heads // k.shape[2],
        k.shape[1],
        head_dim,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        block_table.stride(0),
        **tiles,
    )
    return out


def tiles_of(dtype: torch.dtype, head_dim: int, max_seqlen_q: int) -> dict[str, int]:
    """What a program multiplies at a time, so that registers suffice, and what runs it."""
    dim = max(16, triton.next_power_of_2(head_dim))
    queries = _MANY_QUERIES if dtype.itemsize == 2 and max_seqlen_q > _FEW_QUERIES else _FEW_QUERIES
    keys = max(16, min(_KEYS, _KEY_BYTES // (dim * dtype.itemsize)))
    return {"DIM": dim, "QUERIES": queries, "KEYS": keys, "num_warps": 4 if dim <= 64 else 8, "num_stages": 2}


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None,
    window: tuple[int, int],
    block_table: torch.Tensor,
    return_lse: bool = False,
) -> tuple[torch.Tensor, None]:
    """The `attend` of `flash_attn_functions`."""
    if window != (-1, 0) or return_lse:
        raise NotImplementedError(
            f"attention without flash-attn on CUDA supports no window, only causal attention ({window=}), and returns no log-sum-exp"
        )
    return paged_attention(q, k, v, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, block_table), None


flash_attn_varlen_func, flash_attn_with_kvcache = flash_attn_functions(_attend)


_TILE = 128  # keys that FA4 multiplies at a time on Hopper, for heads of up to 128 channels
_DECODE = 16  # FA4 has one kernel for queries that fit into a tile with their heads, and another for more


def flash_attn4_varlen_func(original: FlashAttention4, hopper: bool) -> FlashAttention4:
    """FA4's entry point with fixes: no split KV on Hopper; what it does not support by `paged_attention`.

    On a paged cache FA4 supports 16-bit types and heads whose size is a multiple of 16, up to 256.

    Args:
        original: ``flash_attn.cute.flash_attn_varlen_func``.
        hopper: Always call it with ``num_splits=1``, and never with pages as long as its tile.

    Returns:
        A function of the same arguments; (output, log-sum-exp or None).
    """

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 16 == 0 and q.shape[-1] <= 256:
            if hopper:
                kwargs["num_splits"] = 1
                k, v, kwargs["page_table"] = _not_in_tiles(k, v, kwargs["page_table"])
                if kwargs["max_seqlen_q"] > _DECODE:
                    # A bound only. FA4 compiles another kernel where it lets one tile hold all queries of a request.
                    kwargs["max_seqlen_q"] = max(kwargs["max_seqlen_q"], 2 * _TILE)
            return original(q, k, v, **kwargs)
        where = kwargs["cu_seqlens_q"], kwargs["seqused_k"], kwargs["max_seqlen_q"], kwargs["softmax_scale"]
        return _attend(q, k, v, *where, window_of(kwargs["causal"], kwargs["window_size"]), kwargs["page_table"])

    return call


def _not_in_tiles(
    k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same memory in pages of half a tile, where pages are tiles, and the table of these pages.

    FA4 loads a page that is a tile whole, by Hopper's copy unit, and multiplies what is after a request's last token by zero. If an earlier
    request left NaN or infinity there, it spreads. Other pages are loaded row by row: 113 in place of 97 us for 300 tokens after 8,192.
    """
    if k.shape[1] != _TILE or k.shape[-1] > _TILE or k.stride()[:2] != v.stride()[:2]:
        return k, v, block_table
    half = _TILE // 2
    step = math.gcd(k.stride(0), half * k.stride(1))  # pages overlap where blocks are spaced otherwise
    apart, next_page = k.stride(0) // step, half * k.stride(1) // step
    count = (len(k) - 1) * apart + next_page + 1
    k, v = (each.as_strided((count, half, *each.shape[2:]), (step, *each.stride()[1:])) for each in (k, v))
    inside = torch.arange(0, 2 * next_page, next_page, dtype=block_table.dtype, device=block_table.device)
    return k, v, torch.add(inside, block_table.unsqueeze(-1), alpha=apart).flatten(1)


@jit
def _paged_attention_kernel(
    q_ptr: tl.tensor,  # (total_q, heads, head_dim)
    k_ptr: tl.tensor,  # (blocks, block_tokens, kv_heads, head_dim), strided over all but head_dim
    v_ptr: tl.tensor,  # likewise
    out_ptr: tl.tensor,  # (total_q, heads, head_dim)
    cu_seqlens_q_ptr: tl.tensor,  # (requests + 1,)
    lengths_ptr: tl.tensor,  # (requests,)
    block_table_ptr: tl.tensor,  # (requests, most blocks), strided over requests
    scale: tl.tensor,
    heads: tl.tensor,
    heads_per_kv_head: tl.tensor,
    block_tokens: tl.tensor,
    head_dim: tl.tensor,
    stride_block: tl.int64,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_table: tl.int64,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """One program: QUERIES queries of a request and head, KEYS keys at a time, with an online softmax."""
    first, head, request = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens_q_ptr + request).to(tl.int32)
    rows = tl.load(cu_seqlens_q_ptr + request + 1).to(tl.int32) - start
    if first >= rows:
        return
    keys = tl.load(lengths_ptr + request).to(tl.int32)
    row, dims = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
    position = keys - rows + row
    in_dim = dims < head_dim
    in_rows = ((start + row).to(tl.int64)[:, None] * heads + head) * head_dim + dims[None, :]
    inside = (row < rows)[:, None] & in_dim[None, :]
    query = tl.load(q_ptr + in_rows, mask=inside, other=0.0)
    of_head = (head // heads_per_kv_head) * stride_head
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    for begin in range(0, tl.minimum(keys, keys - rows + first + QUERIES), KEYS):
        at = begin + tl.arange(0, KEYS)
        valid = at < keys
        block = tl.load(block_table_ptr + request * stride_table + at // block_tokens, mask=valid, other=0)
        offsets = block.to(tl.int64) * stride_block + (at % block_tokens) * stride_token + of_head
        key = tl.load(k_ptr + offsets[None, :] + dims[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(at[None, :] <= position[:, None], scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # of a row that sees no key
        weights, keep = tl.exp(scores - base[:, None]), tl.exp(highest - base)
        value = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)
        mixed = mixed * keep[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
        highest = now
    mixed = tl.where((total > 0.0)[:, None], mixed / total[:, None], 0.0)
    tl.store(out_ptr + in_rows, mixed.to(out_ptr.dtype.element_ty), mask=inside)
