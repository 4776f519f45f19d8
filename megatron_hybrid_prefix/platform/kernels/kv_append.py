"""Writing new keys and values into the paged cache.

Replaces `megatron.core.inference.contexts.fused_kv_append_kernel.triton_append_key_value_cache`.
"""

import torch
from torch import Tensor


@torch.no_grad()
def triton_append_key_value_cache(
    layer_number: int,
    key: Tensor,
    value: Tensor,
    memory_buffer: Tensor,
    padded_active_token_count: int,
    token_to_block_idx: Tensor,
    token_to_local_position_within_kv_block: Tensor,
) -> None:
    """Scatter the first `padded_active_token_count` keys and values to their (block, position).

    Padding tokens have the dummy block's index. If several tokens have the same position, it is undefined which is written,
    as upstream. Tokens with a negative block index are skipped (upstream would write before the layer).

    Args:
        layer_number: index of the attention layer in the buffer. Upstream's docstring calls it 1-based, but the code
            uses it as a 0-based index.
        key: (tokens, 1, heads, head_dim), floating.
        value: as key.
        memory_buffer: (2, layers, blocks, block_size_tokens, heads, head_dim): keys at 0, values at 1. Updated in place.
        padded_active_token_count: tokens to write.
        token_to_block_idx: (>= tokens,), integer.
        token_to_local_position_within_kv_block: (>= tokens,), integer.
    """
    rows = torch.nonzero(token_to_block_idx[:padded_active_token_count] >= 0).squeeze(1)
    at = token_to_block_idx[rows].long(), token_to_local_position_within_kv_block[rows].long()
    for which, new in enumerate((key, value)):
        memory_buffer[which, layer_number].index_put_(at, new[rows, 0].to(memory_buffer.dtype))
