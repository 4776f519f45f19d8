"""`HybridPrefixBlockAllocator`: megatron's block allocator, with the prefix cache as its only book.

Megatron asks for blocks and gives them back by id. Here every such call goes to the cache, which alone knows what is
free, held and cached; nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

from megatron_hybrid_prefix.cache import HybridPrefixCache


class _CachedKeys(Mapping[str, int]):
    """Key of a cached block, in hex -> its id; what megatron's scheduler and log ask for, without a copy."""

    def __init__(self, cache: HybridPrefixCache) -> None:
        self._cache = cache

    def __getitem__(self, key: str) -> int:
        block_id = self._cache.blocks.cached_block(bytes.fromhex(key))
        if block_id is None:
            raise KeyError(key)
        return block_id

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._cache.blocks.cached_block(bytes.fromhex(key)) is not None

    def __iter__(self) -> Iterator[str]:
        return (key.hex() for key in self._cache.blocks.cached_keys())

    def __len__(self) -> int:
        return self._cache.blocks.cached_count


class HybridPrefixBlockAllocator(KVBlockAllocator):
    """Blocks ``0 .. total_count - 2``; the last one is megatron's dummy block.

    Does not call ``super().__init__``: the free list, counts, hashes and clocks that it makes are what the cache replaces.
    Made without a cache (where somebody put this class in place of megatron's), it is megatron's allocator.

    Args:
        context: The inference context.
        total_count: Blocks in the buffer, the dummy block included.
        paused_count: Blocks of the paused buffer.
        cache: Owns the blocks.
    """

    def __new__(cls, *args: Any, cache: HybridPrefixCache | None = None, **kwargs: Any) -> Any:
        """See above."""
        return KVBlockAllocator(*args, **kwargs) if cache is None else super().__new__(cls)

    def __init__(self, context: Any, total_count: int, paused_count: int, *, cache: HybridPrefixCache) -> None:
        self.context = context
        self.cache = cache
        self.enable_prefix_caching = True
        self.prefix_caching_eviction_policy = PrefixCachingEvictionPolicy.LRU
        self.on_blocks_deregistered = None
        self.total_count = total_count
        self.paused_count = paused_count
        self.active_count = total_count - paused_count - 1
        assert self.active_count >= 1
        self.dummy_block_idx = total_count - 1
        self.block_routing = {}
        self._cached_keys = _CachedKeys(cache)
        self._handed_over: list[int] | None = None

    @property
    def total_avail(self) -> int:
        """Blocks that can be had now, evictable ones included (megatron's own count leaves those out)."""
        return self.cache.blocks.available_count

    @property
    def kv_hash_to_block_id(self) -> Mapping[str, int]:
        """Key of a cached block, in hex -> its id."""
        return self._cached_keys

    @property
    def block_ref_counts(self) -> torch.Tensor:
        """(total_count,) int32: live requests that hold each block. A copy: writing to it, as megatron does, is lost."""
        counts = torch.zeros(self.total_count, dtype=torch.int32)  # the dummy block is nobody's
        counts[:-1] = torch.frombuffer(bytearray(self.cache.blocks.ref_counts()), dtype=torch.int32)
        return counts

    def hand_over(self, block_ids: list[int]) -> None:
        """The next allocation gets these blocks, which a request holds already; none: it asks the cache."""
        self._handed_over = block_ids or None
        self._forget_routing(block_ids)

    def take_routing(self, routing: Mapping[int, Any]) -> None:
        """Of each KV block that came back from the host its routing, or None."""
        self._forget_routing(list(routing))
        self.block_routing.update({block_id: found for block_id, found in routing.items() if found is not None})

    def is_memory_available(self, num_blocks: int, potential_matched_count: int = 0) -> bool:
        """See upstream."""
        return num_blocks <= self.cache.blocks.available_count - potential_matched_count

    def allocate_memory_blocks(self, num_blocks: int) -> torch.Tensor | None:
        """See upstream; None when there are not enough blocks, evictable ones included."""
        block_ids = self._handed_over
        if block_ids is not None:
            self._handed_over = None
            assert len(block_ids) == num_blocks, (len(block_ids), num_blocks)
        else:
            block_ids = self.cache.blocks.allocate(num_blocks)
            if block_ids is None:
                return None
            self._forget_routing(block_ids)
        return torch.tensor(block_ids, dtype=torch.int32)

    def release_memory_blocks(self, blocks: torch.Tensor) -> None:
        """Free blocks that no prefix of a request needs: not attached, or cut off by a rewind."""
        self.cache.blocks.free(blocks.tolist())

    def reset(self) -> None:
        """Forget everything: blocks and states alike."""
        self.cache.reset()
        self.block_routing.clear()
        self._handed_over = None

    def get_evictable_block_count(self) -> int:
        """Cached blocks that nobody holds."""
        return self.cache.blocks.available_count - self.cache.blocks.free_count

    def update_timestamps(self, block_ids: torch.Tensor) -> None:
        """Nothing: the cache has clocks of its own."""

    def register_kv_block_hashes(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: blocks become matchable when the forward that fills them succeeded."""

    def evict_lru_blocks(self, num_blocks_needed: int) -> bool:
        """Whether that many blocks can be had; the cache evicts when they are asked for."""
        return num_blocks_needed <= self.cache.blocks.available_count

    def _forget_routing(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.block_routing.pop(block_id, None)
