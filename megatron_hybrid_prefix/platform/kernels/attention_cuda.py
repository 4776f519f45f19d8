"""Attention over a paged KV cache on a CUDA device without flash-attn, by `torch.nn.attention.varlen`.

Replaces `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache`; `flash_attn_calls` has their parameters.

Pages are first gathered into packed keys and values, because torch 2.11's `varlen_attn` has no block table. This is correct,
but copies the context in every step and layer. This package's Triton kernel runs instead for float32, which no fused kernel
supports, and in CUDA graphs, in which no size may depend on a value.

Supports causal attention without a window and without log-sum-exp only, the case that agrees with FA4 on an H200.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from .flash_attn_calls import flash_attn_functions, window_of

FlashAttention4 = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def _gather_packed(cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, heads: int) -> torch.Tensor:
    """Pack the valid rows of all requests.

    Args:
        cache: (blocks, block_size_tokens, kv_heads, head_dim).
        block_table: (requests, max_blocks), integer.
        lengths: (requests,), int64, on the cache's device.
        heads: query heads, a multiple of kv_heads.

    Returns:
        (sum of lengths, heads, head_dim), each kv head repeated for its query heads.
    """
    block_size_tokens = cache.shape[1]
    request = torch.repeat_interleave(torch.arange(lengths.shape[0], device=cache.device), lengths)
    start = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(request.shape[0], device=cache.device) - start[request]
    packed = cache[block_table[request, position // block_size_tokens].long(), position % block_size_tokens]
    return packed.repeat_interleave(heads // cache.shape[2], dim=1)


def paged_varlen_attention_cuda(
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
    """Causal attention of packed queries over a paged cache: the `attend` of `flash_attn_functions`.

    Raises:
        NotImplementedError: another window than (-1, 0), or `return_lse` is True.
    """
    if window != (-1, 0):
        raise NotImplementedError(
            f"attention without flash-attn on CUDA supports no window, and only causal attention: got {window=}"
        )
    if return_lse:
        raise NotImplementedError("attention without flash-attn on CUDA returns no log-sum-exp")
    if q.is_cuda and (q.dtype not in (torch.float16, torch.bfloat16) or torch.cuda.is_current_stream_capturing()):
        from megatron_hybrid_prefix.platform.kernels.attention_triton import paged_attention_triton

        return paged_attention_triton(q, k, v, cu_seqlens_q, lengths, softmax_scale, block_table), None
    from torch.nn.attention.varlen import (
        varlen_attn,
    )  # not at the top: torch < 2.10 lacks it, and CPU runs do not need it

    max_seqlen_k = int(lengths.max()) if lengths.numel() else 0
    if max_seqlen_k == 0 or q.shape[0] == 0:
        return torch.zeros_like(q), None
    cu_seqlens_q = cu_seqlens_q.to(torch.int32)
    cu_seqlens_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    out = varlen_attn(
        q.contiguous(),
        _gather_packed(k, block_table, lengths, q.shape[1]),
        _gather_packed(v, block_table, lengths, q.shape[1]),
        cu_seqlens_q,
        cu_seqlens_k,
        max(1, int(max_seqlen_q)),
        max_seqlen_k,
        scale=softmax_scale,
        window_size=window,  # aligned to the bottom right
    )
    assert isinstance(out, torch.Tensor)  # no log-sum-exp was requested
    # The kernel leaves padding rows uninitialised; a NaN there would spread through norms and matmuls.
    padding = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
    return out.masked_fill(padding[:, None, None], 0.0), None


flash_attn_varlen_func, flash_attn_with_kvcache = flash_attn_functions(paged_varlen_attention_cuda)


_TILE = 128  # keys that FA4 multiplies at a time on Hopper, for heads of up to 128 channels
_DECODE = 16  # FA4 has one kernel for queries that fit into a tile with their heads, and another for more


def flash_attn4_varlen_func(original: FlashAttention4, hopper: bool) -> FlashAttention4:
    """FA4's entry point with fixes: no split KV on Hopper; what it does not support by the gathering attention.

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
        return paged_varlen_attention_cuda(
            q,
            k,
            v,
            kwargs["cu_seqlens_q"],
            kwargs["seqused_k"].long(),
            kwargs["max_seqlen_q"],
            kwargs["softmax_scale"],
            window_of(kwargs["causal"], kwargs["window_size"]),
            kwargs["page_table"],
        )

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
