"""Causal attention over a paged KV cache in float32, in one kernel without host decisions.

For cases that flash-attention does not support: float32, and CUDA graphs on a machine without flash-attention. One program per
query and head, so it is slow for many queries over long contexts.
"""

import torch
import triton
import triton.language as tl

_KEYS = 64


def paged_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float | None,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of packed queries over a paged cache.

    Args:
        q: (total_q, heads, head_dim), CUDA.
        k: (blocks, block_size_tokens, kv_heads, head_dim), contiguous over head_dim.
        v: as k.
        cu_seqlens_q: (requests + 1,), integer.
        lengths: (requests,), integer: valid tokens of each request; its queries are the last of them.
        softmax_scale: multiplies the scores; None means head_dim ** -0.5.
        block_table: (requests, max_blocks), integer, contiguous over blocks.

    Returns:
        (total_q, heads, head_dim) in q's dtype; zero for padding rows and requests without keys.
    """
    rows, heads, head_dim = q.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    if rows == 0:
        return out
    assert k.stride(3) == v.stride(3) == block_table.stride(1) == 1 and k.stride() == v.stride()
    _paged_attention_kernel[(rows, heads)](
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        lengths,
        block_table,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        lengths.shape[0],
        heads,
        heads // k.shape[2],
        k.shape[1],
        head_dim,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        block_table.stride(0),
        DIM=triton.next_power_of_2(head_dim),
        KEYS=_KEYS,
    )
    return out


@triton.jit
def _paged_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cu_seqlens_q_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    scale: tl.tensor,
    requests: tl.tensor,
    heads: tl.tensor,
    heads_per_kv_head: tl.tensor,
    block_tokens: tl.tensor,
    head_dim: tl.tensor,
    stride_block: tl.int64,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_table: tl.int64,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """One program: one query and head, KEYS keys at a time, with an online softmax."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = 0
    for other in range(requests):
        request += (tl.load(cu_seqlens_q_ptr + other + 1) <= row).to(tl.int32)
    keys = 0
    if request < requests:  # else a padding row
        behind = tl.load(cu_seqlens_q_ptr + request + 1).to(tl.int32) - row
        keys = tl.load(lengths_ptr + request).to(tl.int32) - behind + 1
    dims = tl.arange(0, DIM)
    in_dim = dims < head_dim
    in_row = (row.to(tl.int64) * heads + head) * head_dim + dims
    query = tl.load(q_ptr + in_row, mask=in_dim, other=0.0).to(tl.float32) * scale
    of_head = (head // heads_per_kv_head) * stride_head + dims[None, :]
    highest = -float("inf")
    total = 0.0
    mixed = tl.zeros((DIM,), dtype=tl.float32)
    for start in range(0, keys, KEYS):
        positions = start + tl.arange(0, KEYS)
        seen = positions < keys
        block = tl.load(block_table_ptr + request * stride_table + positions // block_tokens, mask=seen, other=0)
        offsets = (block.to(tl.int64) * stride_block + (positions % block_tokens) * stride_token)[:, None] + of_head
        mask = seen[:, None] & in_dim[None, :]
        key = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(query[None, :] * key, axis=1), -float("inf"))
        now_highest = tl.maximum(highest, tl.max(scores, axis=0))
        weights = tl.exp(scores - now_highest)
        keep = tl.exp(highest - now_highest)
        value = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mixed = mixed * keep + tl.sum(weights[:, None] * value, axis=0)
        total = total * keep + tl.sum(weights, axis=0)
        highest = now_highest
    if keys > 0:
        mixed = mixed / total
    tl.store(out_ptr + in_row, mixed.to(out_ptr.dtype.element_ty), mask=in_dim)
