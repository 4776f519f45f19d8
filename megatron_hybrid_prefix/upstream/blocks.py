"""Megatron's KV block allocator without its bookkeeping: a subclass tracks what is free, held and cached."""

from __future__ import annotations

from typing import Any, NamedTuple, override

import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.inference_request import DynamicInferenceRequest

from megatron_hybrid_prefix.upstream.capabilities import form_of, only_in


class BlockCounts(NamedTuple):
    """Sizes of an allocator, in KV blocks.

    Attributes:
        total: Blocks in the buffer, megatron's dummy block included.
        paused: Blocks that paused requests may keep; where there is no pool for all, only they may hold them.
        active: Blocks that running requests may hold. Where there is one pool, they may hold all but the dummy block.
    """

    total: int
    paused: int
    active: int


_HAS_ONE_POOL = form_of("KV blocks") == "one pool"


def block_counts(allocator: Any) -> BlockCounts:
    """Sizes of an allocator, megatron's or ours."""
    if _HAS_ONE_POOL:
        return BlockCounts(allocator.pool_size, allocator.paused_limit, active=allocator.pool_size - 1)
    return BlockCounts(allocator.total_count, allocator.paused_count, active=allocator.active_count)


def blocks_up_to_the_end(request: DynamicInferenceRequest, block_tokens: int) -> int:
    """KV blocks of a request's prompt and of its longest answer."""
    tokens: int = len(request.prompt_tokens) + request.sampling_params.num_tokens_to_generate
    return -(-tokens // block_tokens)


def available_blocks(allocator: Any) -> int:
    """KV blocks that an allocator, megatron's or ours, can allocate now."""
    return int(allocator.pool_avail if _HAS_ONE_POOL else allocator.total_avail)


class BlockAllocatorSeam(KVBlockAllocator):
    """Megatron's allocator without its free list, counts, hashes and clocks, which a subclass replaces.

    Blocks are ``0 .. total - 2``; the last one is megatron's dummy block.

    Args:
        *sizes: The inference context; blocks in the buffer, the dummy block included; those that paused requests may keep.
        **named_sizes: These by megatron's names. ``enable_prefix_caching`` is stored for readers only: it does not switch the cache.
    """

    def __init__(self, *sizes: Any, **named_sizes: Any) -> None:
        super().__init__(*sizes, **named_sizes | {"enable_prefix_caching": False})  # makes no hashes, counts and clocks
        self.enable_prefix_caching = named_sizes.get("enable_prefix_caching", True)
        replaced: KVBlockAllocator = getattr(self.context, "kv_block_allocator", self)
        self._blocks_deregistered_observers = getattr(replaced, "_blocks_deregistered_observers", [])

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated now, evictable blocks included. A subclass counts them."""
        raise NotImplementedError

    @property
    @only_in("KV blocks", "one pool")
    def pool_avail(self) -> int:
        """See `available_blocks` (megatron's own count leaves out evictable blocks)."""
        return self.available_blocks

    @pool_avail.setter
    def pool_avail(self, blocks: int) -> None:
        """Megatron's constructor sets its own count."""

    @property
    @only_in("KV blocks", "two pools")
    def total_avail(self) -> int:
        """See `available_blocks`."""
        return self.available_blocks

    @total_avail.setter
    def total_avail(self, blocks: int) -> None:
        """As of `pool_avail`."""

    @only_in("KV blocks", "one pool")
    def get_allocatable_count(self) -> int:
        """Evictable blocks included."""
        return self.available_blocks

    @override
    def is_memory_available(self, num_blocks: int, potential_matched_count: int = 0) -> bool:
        """Counts evictable blocks, too."""
        return num_blocks <= self.available_blocks - potential_matched_count

    @only_in("KV blocks", "two pools")
    def get_active_avail(self) -> int:
        """Blocks for running requests: upstream's limit, or fewer if states use their memory.

        Blocks of paused requests count, too: they keep them when they resume.
        """
        # Needless from ee3864907a (0.20): with one pool megatron asks `get_allocatable_count` alone.
        return min(int(super().get_active_avail()), self.available_blocks + int(self.get_paused_used()))

    @override
    def update_timestamps(self, block_ids: torch.Tensor) -> None:
        """Do nothing: the cache keeps its own clocks."""

    @override
    def register_kv_block_hashes(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks become matchable once the forward that fills them is launched."""

    def tell_observers(self, hashes: set[int]) -> None:
        """These hashes of blocks are not cached any more."""
        for observer in self._blocks_deregistered_observers:
            observer([], hashes)

    @override
    def evict_lru_blocks(self, num_blocks_needed: int) -> bool:
        """Whether that many blocks can be allocated; the cache evicts on allocation."""
        return num_blocks_needed <= self.available_blocks
