"""`HybridPrefixBlockAllocator`: megatron's block allocator on top of the prefix cache.

Megatron allocates and frees blocks by id. Every such call goes to the cache, the only place that tracks which blocks are free,
held and cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, override

import numpy as np
import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.upstream.blocks import BlockAllocatorSeam, block_counts
from megatron_hybrid_prefix.upstream.context import AdmittedChunk


class _CachedKeys(Mapping[str, int]):
    """Ids of cached blocks by key in hex: a view for megatron's scheduler and log, without a copy."""

    def __init__(self, cache: HybridPrefixCache) -> None:
        self._cache = cache

    def __getitem__(self, key: str) -> int:
        try:
            node = self._cache.node(bytes.fromhex(key))
        except (TypeError, ValueError):  # not hexadecimal, so not a key
            node = None
        if node is None or node.block_id == NO_BLOCK:
            raise KeyError(key)
        return node.block_id

    def __iter__(self) -> Iterator[str]:
        return (node.key.hex() for node in self._cache.nodes() if node.block_id != NO_BLOCK)

    def __len__(self) -> int:
        return self._cache.memory_use().keyed_blocks


class HybridPrefixBlockAllocator(BlockAllocatorSeam):
    """Megatron's allocator over a cache.

    Args:
        *sizes: The inference context and megatron's sizes.
        cache: Owns the blocks. By default a new cache that keeps nothing after a request ends, for code that puts this class
            in place of megatron's.
    """

    def __init__(self, *sizes: Any, cache: HybridPrefixCache | None = None, **named_sizes: Any) -> None:
        super().__init__(*sizes, **named_sizes)
        if cache is None:
            blocks = block_counts(self).total - 1
            cache = HybridPrefixCache(CacheSettings(block_tokens=1, kv_blocks=blocks, state_slots=0, live_states=False))
        self.cache = cache
        self._cached_keys = _CachedKeys(cache)  # the scheduler asks for it once per key

    @property
    def available_blocks(self) -> int:
        return self.cache.blocks.available_count

    @override
    def get_evictable_block_count(self) -> int:
        """Cached blocks that no request holds."""
        return self.cache.memory_use().cached_blocks

    @property
    @override
    def kv_hash_to_block_id(self) -> Mapping[str, int]:
        """Ids of cached blocks, by key in hex."""
        return self._cached_keys

    @property
    @override
    def block_ref_counts(self) -> torch.Tensor:
        """(total_count,) int32: live requests that hold each block. A copy: megatron's writes to it have no effect."""
        counts = torch.zeros(block_counts(self).total, dtype=torch.int32)  # no request holds the dummy block
        counts[:-1] = torch.frombuffer(bytearray(self.cache.blocks.ref_counts()), dtype=torch.int32)
        return counts

    @override
    def store_routing_per_block(self, flat_routing: np.ndarray[Any, Any] | None) -> None:
        """Routes are kept in the blocks themselves, and go with them to other blocks and tiers.

        Raises:
            RuntimeError: A router recorded nothing.
        """
        memory: SharedMemory | None = getattr(self.context, "shared_memory", None)
        if memory is None or not self.context.moe_enable_routing_replay or memory.layout is None:
            super().store_routing_per_block(flat_routing)
            return
        count = self.context.active_token_count
        if flat_routing is None or len(flat_routing) != count:
            raise RuntimeError(
                "moe_enable_routing_replay=True: a router did not record the experts of this step's tokens"
            )
        of_tokens = self.context.token_to_block_idx, self.context.token_to_local_position_within_kv_block
        blocks, positions = (each[:count].to(memory.routes.device, torch.int64) for each in of_tokens)
        memory.routes[blocks, positions] = torch.from_numpy(flat_routing).to(memory.routes)

    def routes_of(self, block_ids: torch.Tensor) -> np.ndarray[Any, Any]:
        """Routes of a request's blocks, in their order: (tokens, layers with experts, experts of a token) int16, as megatron's."""
        routes: torch.Tensor = self.context.shared_memory.routes
        found = routes[block_ids.to(routes.device, torch.int64)].flatten(0, 1)
        return found.to(torch.int16).cpu().numpy()

    @override
    def allocate_memory_blocks(self, num_blocks: int) -> torch.Tensor | None:
        """None if there are not enough blocks, evictable blocks included.

        A chunk being admitted already has its blocks. Other blocks are attached to their requests later.
        """
        chunk: AdmittedChunk | None = getattr(self.context, "admitted_chunk", None)
        own = self.cache.blocks.allocate(num_blocks) if chunk is None else chunk.own
        if own is None:
            return None
        block_ids = own if chunk is None else chunk.block_ids
        assert len(block_ids) == num_blocks, (len(block_ids), num_blocks)
        return torch.tensor(block_ids, dtype=torch.int32)

    @override
    def release_memory_blocks(self, blocks: torch.Tensor) -> None:
        """Free blocks that are not attached to a request, or that a rewind cut off."""
        self.cache.blocks.free(blocks.tolist())

    @override
    def reset(self) -> None:
        """Drop all blocks and states."""
        self.cache.reset()
        self.block_routing.clear()
