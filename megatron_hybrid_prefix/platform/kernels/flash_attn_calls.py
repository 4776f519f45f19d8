"""flash-attn 2's two functions over a paged KV cache, on top of any attention of packed queries.

They have the parameters of `flash_attn.flash_attn_varlen_func` and `flash_attn.flash_attn_with_kvcache`, as
`megatron.core.transformer.attention.Attention.flash_decode_and_prefill` calls them. Both read keys and values through a block
table, align the causal mask to the bottom right, and may return the log-sum-exp for attention sinks.
"""

from collections.abc import Callable
from typing import Any

import torch

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # see `flash_attn_functions`
FlashAttention = Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]]


def _check_unused(function: str, **options: tuple[Any, Any]) -> None:
    """Raises NotImplementedError for a flash-attn option that is set; megatron never sets these.

    Args:
        function: name for the message.
        **options: option name to (value given, value that means "off").
    """
    for name, (value, off) in options.items():
        if value is not off and value != off:
            raise NotImplementedError(f"{function} does not implement {name}={value!r}")


def window_of(causal: bool, window_size: tuple[int, int] | None) -> tuple[int, int]:
    """Returns (left, right) tokens visible around a query's own position, -1 for no limit; causal means right = 0."""
    left, right = (-1, -1) if window_size is None else window_size
    return int(left), 0 if causal else int(right)


def flash_attn_functions(attend: Attend) -> tuple[FlashAttention, FlashAttention]:
    """Returns `flash_attn_varlen_func` and `flash_attn_with_kvcache`, computed by `attend`.

    Their parameters mean the same. Both need a block table, and are causal with `causal`: the last query sits at the last key.

    Args:
        attend: called with the positional arguments
            q: (total_q, heads, head_dim), floating; rows past `cu_seqlens_q[-1]` are padding;
            k: (blocks, block_size_tokens, kv_heads, head_dim), floating; kv_heads divides heads;
            v: as k;
            cu_seqlens_q: (requests + 1,), integer; repeats mark requests without queries;
            lengths: (requests,), int64: valid tokens of each request; its queries are the last of them;
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
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Attention of packed queries over a paged cache: `attend`.

        Of `cu_seqlens_k`, (requests + 1,), only the differences matter, the valid tokens of each request; `max_seqlen_k` is
        ignored.

        Returns:
            out, or with `return_attn_probs` (out, lse, None).

        Raises:
            NotImplementedError: dropout, softcap, ALiBi, no block table, or what `attend` does not support.
        """
        _check_unused(
            "flash_attn_varlen_func",
            dropout_p=(dropout_p, 0.0),
            softcap=(softcap, 0.0),
            alibi_slopes=(alibi_slopes, None),
        )
        if block_table is None:
            raise NotImplementedError(
                "flash_attn_varlen_func is implemented for a paged cache only: block_table is None"
            )
        lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).long()
        window = window_of(causal, window_size)
        out, lse = attend(
            q, k, v, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, window, block_table, return_attn_probs
        )
        return (out, lse, None) if return_attn_probs else out

    @torch.no_grad()
    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | int | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: torch.Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Attention over a paged cache with the same number of queries per request (decode).

        Args:
            q: (requests, steps, heads, head_dim), floating: the last `steps` positions of each request.
            cache_seqlens: (requests,), integer, or one int: valid tokens, the queries included. Required.
            num_splits: ignored; it affects speed only.

        Returns:
            out, of q's shape; or with `return_softmax_lse` (out, lse) with lse (requests, heads, steps).

        Raises:
            NotImplementedError: any other option is set, there is no block table or no lengths, or `attend` does not
                support an option.
        """
        _check_unused(
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
        out, lse = attend(
            q.reshape(requests * steps, heads, head_dim),
            k_cache,
            v_cache,
            torch.arange(requests + 1, device=q.device) * steps,
            torch.as_tensor(cache_seqlens, device=q.device).expand(requests).long(),
            steps,
            softmax_scale,
            window_of(causal, window_size),
            block_table,
            return_softmax_lse,
        )
        out = out.view(q.shape)
        if not return_softmax_lse:
            return out
        assert lse is not None
        return out, lse.view(heads, requests, steps).transpose(0, 1)

    return flash_attn_varlen_func, flash_attn_with_kvcache
