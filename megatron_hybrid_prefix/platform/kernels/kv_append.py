"""Writing new keys and values into the paged cache.

Replaces `megatron.core.inference.contexts.fused_kv_append_kernel.triton_append_key_value_cache`.
"""

import torch
from torch import Tensor

from .rows import rows_and_slots


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

    Raises:
        ValueError: shapes do not agree.
    """
    if key.size(1) != 1 or value.size(1) != 1:
        raise ValueError(f"expected one token per row, got {key.size(1)} keys and {value.size(1)} values")
    if memory_buffer.dim() != 6 or key.shape[-2:] != memory_buffer.shape[-2:]:
        raise ValueError(f"keys {tuple(key.shape)} do not fit the cache {tuple(memory_buffer.shape)}")
    tokens = padded_active_token_count
    if tokens == 0:
        return
    rows, block = rows_and_slots(token_to_block_idx[:tokens], key[:tokens])
    position = token_to_local_position_within_kv_block[:tokens].long()[rows]
    for which, new in enumerate((key, value)):
        memory_buffer[which, layer_number, block, position] = new[:tokens, 0][rows].to(memory_buffer.dtype)
