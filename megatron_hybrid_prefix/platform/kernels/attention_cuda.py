"""Attention over a paged KV cache on a CUDA device without flash-attn, through `torch.nn.attention.varlen`.

float32, which no fused kernel takes, and CUDA graphs, in which no size may depend on a value, go through a kernel of this
package.

Stands in for `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache` at the call sites of
`megatron.core.transformer.attention.Attention.flash_decode_and_prefill`. Pages are gathered into packed keys and values
first, because torch 2.11's `varlen_attn` takes no block table: right, but with a copy of the context per step and layer.
Only causal attention without a window and without log-sum-exp is offered, the case seen to agree with FA4 on an H200.
"""

import torch

from .attention import check_unused, window_of


def _gather_packed(cache, block_table, lengths, heads):
    """Packs the valid rows of all requests.

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


def paged_varlen_attention_cuda(q, k, v, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, block_table):
    """Causal attention of packed queries over a paged cache.

    Args:
        q: (total_q, heads, head_dim), CUDA.
        k: (blocks, block_size_tokens, kv_heads, head_dim).
        v: as k.
        cu_seqlens_q: (requests + 1,), integer.
        lengths: (requests,), int64: valid tokens of each request.
        max_seqlen_q: the most queries of a request.
        softmax_scale: multiplies the scores; None means head_dim ** -0.5.
        block_table: (requests, max_blocks), integer.

    Returns:
        (total_q, heads, head_dim) in q's dtype; zero for padding rows and requests without keys.
    """
    if q.is_cuda and (q.dtype not in (torch.float16, torch.bfloat16) or torch.cuda.is_current_stream_capturing()):
        from megatron_hybrid_prefix.platform.kernels.attention_triton import paged_attention_triton

        return paged_attention_triton(q, k, v, cu_seqlens_q, lengths, softmax_scale, block_table)
    from torch.nn.attention.varlen import varlen_attn  # here: absent before torch 2.10, and CPU runs never need it

    max_seqlen_k = int(lengths.max()) if lengths.numel() else 0
    if max_seqlen_k == 0 or q.shape[0] == 0:
        return torch.zeros_like(q)
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
        window_size=(-1, 0),  # causal, aligned to the bottom right
    )
    # The kernel leaves rows of no request uninitialised, and NaN there would spread through norms and matmuls.
    padding = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
    return out.masked_fill(padding[:, None, None], 0.0)


def _check_causal(function, causal, window_size):
    if window_of(causal, window_size) != (-1, 0):
        raise NotImplementedError(f"{function} on CUDA is causal without a window, got {causal=}, {window_size=}")


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
    """Attention of packed queries over a paged cache; see `attention.flash_attn_varlen_func` for the arguments.

    Raises:
        NotImplementedError: not causal, a sliding window, log-sum-exp, dropout, softcap, ALiBi, or no block table.
    """
    name = "flash_attn_varlen_func"
    check_unused(
        name,
        dropout_p=(dropout_p, 0.0),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
        return_attn_probs=(return_attn_probs, False),
    )
    _check_causal(name, causal, window_size)
    if block_table is None:
        raise NotImplementedError(f"{name} is implemented for a paged cache only: block_table is None")
    lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).long()
    return paged_varlen_attention_cuda(q, k, v, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, block_table)


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
    """Attention of decode queries over a paged cache; see `attention.flash_attn_with_kvcache` for the arguments.

    Raises:
        NotImplementedError: not causal, a sliding window, log-sum-exp, appending k or v, rotary embedding, batch
            indices, left padding, softcap, ALiBi, or no block table or lengths.
    """
    name = "flash_attn_with_kvcache"
    check_unused(
        name,
        k=(k, None),
        v=(v, None),
        rotary_cos=(rotary_cos, None),
        rotary_sin=(rotary_sin, None),
        cache_batch_idx=(cache_batch_idx, None),
        cache_leftpad=(cache_leftpad, None),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
        return_softmax_lse=(return_softmax_lse, False),
    )
    _check_causal(name, causal, window_size)
    if block_table is None or cache_seqlens is None:
        raise NotImplementedError(f"{name} is implemented for block_table and cache_seqlens only")
    requests, steps, heads, head_dim = q.shape
    lengths = torch.as_tensor(cache_seqlens, device=q.device).expand(requests).long()
    cu_seqlens_q = torch.arange(requests + 1, device=q.device) * steps
    out = paged_varlen_attention_cuda(
        q.reshape(-1, heads, head_dim), k_cache, v_cache, cu_seqlens_q, lengths, steps, softmax_scale, block_table
    )
    return out.view(q.shape)


def flash_attn4_varlen_func(original, one_split):
    """FA4's entry point with two gaps closed: Hopper takes no split KV, and float32 goes to the gathering attention.

    Args:
        original: ``flash_attn.cute.flash_attn_varlen_func``.
        one_split: Call it with ``num_splits=1`` whatever upstream asks for.

    Returns:
        A function of the same arguments; (output, log-sum-exp or None).
    """

    def call(q, k, v, **kwargs):
        if q.dtype in (torch.float16, torch.bfloat16):
            if one_split:
                kwargs["num_splits"] = 1
            return original(q, k, v, **kwargs)
        _check_causal("float32 attention", kwargs["causal"], kwargs["window_size"])
        lengths = kwargs["seqused_k"].long()
        out = paged_varlen_attention_cuda(
            q,
            k,
            v,
            kwargs["cu_seqlens_q"],
            lengths,
            kwargs["max_seqlen_q"],
            kwargs["softmax_scale"],
            kwargs["page_table"],
        )
        return out, None

    return call
