"""`BlocksById`: KV blocks by id, for megatron's allocator, which does not name the request that it allocates for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.requests.book import RequestBook
from megatron_hybrid_prefix.tiers.device import DeviceTier


class BlocksById:
    """KV blocks by id (``cache.blocks``).

    Args:
        device: The cached blocks and states.
        requests: The live requests.

    Attributes:
        unattached: Allocated blocks that are neither attached nor freed.
    """

    def __init__(self, device: DeviceTier, requests: RequestBook) -> None:
        self._device, self._requests = device, requests
        self.unattached: set[int] = set()

    def allocate(self, count: int) -> list[int] | None:
        """Allocates blocks that the caller attaches to a request or frees. None: there are too few."""
        if count > self._device.blocks.available_blocks:
            return None
        block_ids = self._device.take_blocks(count)
        self.unattached.update(block_ids)
        return block_ids

    def attach(self, request_id: int, block_ids: Iterable[int]) -> None:
        """Appends blocks from `allocate` to a request.

        Raises:
            ValueError: The request is not live.
            CacheCorruptionError: A block was not allocated, or belongs to a request already.
        """
        live = self._requests[request_id]
        for block_id in block_ids:
            if block_id not in self.unattached:
                raise CacheCorruptionError(f"block {block_id} was not allocated, or belongs to a request already")
            self.unattached.remove(block_id)
            live.block_ids.append(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Frees unattached blocks, or the last block of a request if it has no key (a rewind).

        Raises:
            CacheCorruptionError: A block is neither.
        """
        for block_id in block_ids:
            if block_id in self.unattached:
                self.unattached.remove(block_id)
            else:
                self._cut_last_block(block_id)
            self._device.blocks.release((block_id,))

    @property
    def available_count(self) -> int:
        """Blocks that running requests can get now: free or evictable."""
        return self._device.blocks.available_blocks

    def room_for(self, requests: int) -> int:
        """Blocks that this many running requests can have together: all but those whose memory their states take."""
        device = self._device
        return device.blocks.total_blocks - requests * device.slots_per_request * device.pages.page_blocks

    def ref_counts(self) -> bytes:
        """Ref counts of all blocks: a copy, int32 in native byte order."""
        return self._device.blocks.ref_counts()

    def _cut_last_block(self, block_id: int) -> None:
        # Rare: a rewind of speculative tokens past a block boundary. So a search over the live requests is fast enough.
        for live in self._requests.live.values():
            if len(live.block_ids) > len(live.path) and live.block_ids[-1] == block_id:
                live.block_ids.pop()
                return
        raise CacheCorruptionError(f"block {block_id} is neither unattached nor the last block of a request")
