"""One budget for KV and states (``cache_gb``): what megatron is told, and the layout that all ranks use."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks
from megatron_hybrid_prefix.mcore.state.layout import state_bytes
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, padded_block_bytes

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_hybrid_prefix.upstream.config import InferenceConfig

MOST_REQUESTS = 1024
"""Default of ``max_requests``, if their states take at most half of the memory."""
_REQUESTS_MULTIPLE = 4  # megatron rounds batch sizes to it


def one_budget(config: InferenceConfig, cache_gb: float, model_config: TransformerConfig) -> InferenceConfig:
    """What megatron is told: a budget of which it sets nothing aside for states.

    Megatron takes the states of ``max_requests`` requests from ``buffer_size_gb``, and gives the rest to KV. So it is told a
    budget that is larger by these states. It allocates none of it: `HybridPrefixContext` allocates the memory.

    A collective if ``max_requests`` is not set.

    Raises:
        ValueError: ``mamba_memory_ratio`` is set, which is a split.
    """
    if config.mamba_memory_ratio is not None:
        raise ValueError(
            f"mamba_memory_ratio={config.mamba_memory_ratio} splits buffer_size_gb, and cache_gb={cache_gb} has no split: "
            "leave it out, or give mamba_gb instead of cache_gb"
        )
    state = config.mamba_inference_state_config
    assert state is not None
    drafts = config.num_speculative_tokens
    request_bytes = state_bytes(state) * (drafts + 2 if drafts else 1)
    requests = config.max_requests
    if requests is None:
        multiple = math.lcm(_REQUESTS_MULTIPLE, model_config.tensor_model_parallel_size)
        most = min(MOST_REQUESTS, config.max_tokens or MOST_REQUESTS)
        fitting = int(cache_gb * 2**29) // request_bytes if request_bytes else most
        requests = min_over_model_ranks(min(most, fitting), config.pg_collection) or 0
        requests = max(1, requests // multiple) * multiple
    return dataclasses.replace(
        config,
        max_requests=requests,
        buffer_size_gb=cache_gb + (requests * request_bytes) / 2**30,
    )


def agree_on_layout(cache_gb: float, *, block_bytes: int, state_bytes: int, own_slots: int, groups: Any) -> PageLayout:
    """The layout of the memory, with the same numbers of blocks on all ranks. A collective.

    Pipeline stages differ in their layers: a page has as many blocks as the stage with the largest states needs. Each stage
    pads its own blocks, if need be.

    Args:
        cache_gb: Budget per rank, in GiB.
        block_bytes: Bytes of a KV block on this rank, without padding.
        state_bytes: Bytes of a state on this rank; 0 on a stage without recurrent layers.
        own_slots: Slots that the engine keeps for itself.
        groups: Megatron's process groups.

    Raises:
        ValueError: There is no room for a state and a KV block on some rank; raised on all ranks.
    """
    step_bytes = padded_block_bytes(block_bytes, state_bytes, alignment_bytes=ALIGNMENT_BYTES)
    page_blocks = max_over_model_ranks(max(1, ceil_div(state_bytes, step_bytes)), groups)
    if page_blocks * block_bytes >= state_bytes:
        step_bytes = block_bytes  # another stage needs more blocks, so this one needs no padding
    blocks = min_over_model_ranks(int(cache_gb * 2**30) // step_bytes, groups) or 0
    try:
        return PageLayout.of_buffer(
            blocks * step_bytes, block_bytes=step_bytes, page_blocks=page_blocks, own_slots=own_slots
        )
    except ValueError as error:
        reason = "" if own_slots == 1 else f" (the drafts of all requests take {own_slots} states)"
        raise ValueError(f"cache_gb={cache_gb} is too small: {error}{reason}") from None
