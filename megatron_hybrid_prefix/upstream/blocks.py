"""Megatron's KV block allocator without its bookkeeping: a subclass tracks what is free, held and cached."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.inference_request import DynamicInferenceRequest

from megatron_hybrid_prefix.upstream.capabilities import form_of

_HAS_ONE_POOL = form_of("KV blocks") == "one pool"


class BlockCounts(NamedTuple):
    """Sizes of an allocator, in KV blocks.

    Attributes:
        total: Blocks in the buffer, megatron's dummy block included.
        paused: Blocks that only paused requests may hold.
        active: Blocks that running requests may hold. Where there is one pool, they may hold all but the dummy block.
    """

    total: int
    paused: int
    active: int


def block_counts(allocator: KVBlockAllocator) -> BlockCounts:
    """Sizes of an allocator, megatron's or ours."""
    sizes: Any = allocator
    if _HAS_ONE_POOL:
        return BlockCounts(total=sizes.pool_size, paused=sizes.paused_limit, active=sizes.pool_size - 1)
    return BlockCounts(total=sizes.total_count, paused=sizes.paused_count, active=sizes.active_count)


def blocks_up_to_the_end(request: DynamicInferenceRequest, block_tokens: int) -> int:
    """KV blocks of a request's prompt and of its longest answer."""
    tokens: int = len(request.prompt_tokens) + request.sampling_params.num_tokens_to_generate
    return -(-tokens // block_tokens)


def available_blocks(allocator: KVBlockAllocator) -> int:
    """KV blocks that an allocator, megatron's or ours, can allocate now."""
    free: Any = allocator
    return int(free.pool_avail if _HAS_ONE_POOL else free.total_avail)


class BlockAllocatorSeam(KVBlockAllocator):
    """Megatron's allocator without its free list, counts, hashes and clocks, which a subclass replaces.

    Does not call ``super().__init__``, which makes them. Blocks are ``0 .. total - 2``; the last one is megatron's dummy block.

    Args:
        context: The inference context.
        *counts: Blocks in the buffer, the dummy block included; of these, blocks that only paused requests may hold.
        enable_prefix_caching: Stored for readers only; it does not switch the cache.
        prefix_caching_eviction_policy: Stored for readers only.
        **named_counts: ``counts`` under megatron's names.
    """

    def __init__(
        self,
        context: Any,
        *counts: int,
        enable_prefix_caching: bool = True,
        prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU,
        **named_counts: int,
    ) -> None:
        self.context = context
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_caching_eviction_policy = prefix_caching_eviction_policy
        self.on_blocks_deregistered = None
        names = ("pool_size", "paused_limit") if _HAS_ONE_POOL else ("total_count", "paused_count")
        total, paused = (*counts, *(named_counts[name] for name in names if name in named_counts))
        if _HAS_ONE_POOL:
            self.pool_size, self.paused_limit = total, paused
        else:
            self.total_count, self.paused_count = total, paused
            self.active_count = total - paused - 1
        assert block_counts(self).active >= 1
        self.dummy_block_idx = total - 1
        self.block_routing: dict[int, Any] = {}
        self.enable_handoff_pinning = False
        self._blocks_deregistered_observers: list[Any] = []

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated now, evictable blocks included. A subclass counts them."""
        raise NotImplementedError

    @property
    def total_avail(self) -> int:
        """See `available_blocks` (megatron's own count leaves out evictable blocks)."""
        return self.available_blocks

    pool_avail = total_avail

    def get_allocatable_count(self) -> int:
        """Evictable blocks included."""
        return self.available_blocks

    def is_memory_available(self, num_blocks: int, potential_matched_count: int = 0) -> bool:
        """Counts evictable blocks, too."""
        return num_blocks <= self.available_blocks - potential_matched_count

    def get_active_avail(self) -> int:
        """Blocks for running requests: upstream's limit, or fewer if states use their memory.

        Blocks of paused requests count, too: they keep them when they resume.
        """
        megatrons: Any = super()
        return min(int(megatrons.get_active_avail()), self.available_blocks + int(self.get_paused_used()))

    def update_timestamps(self, block_ids: torch.Tensor) -> None:
        """Do nothing: the cache keeps its own clocks."""

    def register_kv_block_hashes(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks become matchable once the forward that fills them is launched."""

    def evict_lru_blocks(self, num_blocks_needed: int) -> bool:
        """Whether that many blocks can be allocated; the cache evicts on allocation."""
        return num_blocks_needed <= self.available_blocks
