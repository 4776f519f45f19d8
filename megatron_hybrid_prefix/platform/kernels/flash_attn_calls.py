"""flash-attn 2's two functions over a paged KV cache, on top of any attention of packed queries.

They have the parameters of `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache` that
`megatron.core.transformer.attention.Attention.flash_decode_and_prefill` gives. Both read keys and values through a block
table, align the causal mask to the bottom right, and may return the log-sum-exp for attention sinks.
"""

from collections.abc import Callable

import torch

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # see `flash_attn_functions`
FlashAttention = Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]]


def window_of(causal: bool, window_size: tuple[int, int] | None) -> tuple[int, int]:
    """Returns (left, right) tokens visible around a query's own position, -1 for no limit; causal means right = 0."""
    left, right = (-1, -1) if window_size is None else window_size
    return int(left), 0 if causal else int(right)


def flash_attn_functions(attend: Attend) -> tuple[FlashAttention, FlashAttention]:
    """Returns `flash_attn_varlen_func` and `flash_attn_with_kvcache`, computed by `attend`.

    Their parameters mean the same. Both are causal with `causal`: the last query sits at the last key.

    Args:
        attend: called with the positional arguments
            q: (total_q, heads, head_dim), floating; rows past `cu_seqlens_q[-1]` are padding;
            k: (blocks, block_size_tokens, kv_heads, head_dim), floating; kv_heads divides heads;
            v: as k;
            cu_seqlens_q: (requests + 1,), integer; repeats mark requests without queries;
            lengths: (requests,), integer: valid tokens of each request; its queries are the last of them;
            max_seqlen_q: the maximum queries of a request;
            softmax_scale: multiplies the scores; None means head_dim ** -0.5;
            window: (left, right) tokens visible around a query's position, -1 for no limit;
            block_table: (requests, max_blocks), integer;
            return_lse: whether the log-sum-exp is needed.
            It returns (out, lse or None): out (total_q, heads, head_dim) in q's dtype, zero for rows that see no key and
            for padding; lse (heads, total_q), float32 (float64 for float64 queries), +inf for those rows. It raises
            NotImplementedError for a window or a log-sum-exp that it does not support.
    """

    @torch.no_grad()
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Attention of packed queries over a paged cache: `attend`.

        Of `cu_seqlens_k`, (requests + 1,), only the differences matter, the valid tokens of each request; `max_seqlen_k` is
        ignored.

        Returns:
            out, or with `return_attn_probs` (out, lse, None).
        """
        window = window_of(causal, window_size)
        out, lse = attend(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff(),
            max_seqlen_q,
            softmax_scale,
            window,
            block_table,
            return_attn_probs,
        )
        return (out, lse, None) if return_attn_probs else out

    @torch.no_grad()
    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Attention over a paged cache with the same number of queries per request (decode).

        Args:
            q: (requests, steps, heads, head_dim), floating: the last `steps` positions of each request.
            cache_seqlens: (requests,), integer: valid tokens, the queries included.
            num_splits: ignored; it affects speed only.

        Returns:
            out, of q's shape; or with `return_softmax_lse` (out, lse) with lse (requests, heads, steps).
        """
        requests, steps, heads, _ = q.shape
        starts = torch.arange(requests + 1, device=q.device) * steps
        where = cache_seqlens, steps, softmax_scale, window_of(causal, window_size), block_table, return_softmax_lse
        out, lse = attend(q.flatten(0, 1), k_cache, v_cache, starts, *where)
        out = out.view(q.shape)
        return out if lse is None else (out, lse.view(heads, requests, steps).transpose(0, 1))

    return flash_attn_varlen_func, flash_attn_with_kvcache
