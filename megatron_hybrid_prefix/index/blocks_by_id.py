"""`BlocksById`: KV blocks by id, for megatron's allocator, which does not say for whom it asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.loads import Loads
from megatron_hybrid_prefix.index.requests import RequestBook
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import NO_BLOCK


class BlocksById:
    """See the module; ``cache.blocks``.

    Args:
        store: What is cached.
        requests: Whose blocks are attached and cut.
        loads: Waiting requests give up loads where running ones need blocks.
    """

    def __init__(self, store: PrefixStore, requests: RequestBook, loads: Loads) -> None:
        self._store, self._requests, self._loads = store, requests, loads
        self._unattached: set[int] = set()

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for the caller, to be attached to a request or freed; None when there are not enough."""
        if not self._loads.make_room(count):
            return None
        block_ids = self._store.take_blocks(count)
        self._unattached.update(block_ids)
        return block_ids

    def attach(self, request_id: int, block_ids: Iterable[int]) -> None:
        """Blocks from `allocate` become the next blocks of a request.

        Raises:
            ValueError: The request is not live.
            CacheCorruptionError: A block was not given out, or belongs to a request already.
        """
        live = self._requests[request_id]
        for block_id in block_ids:
            if block_id not in self._unattached:
                raise CacheCorruptionError(f"block {block_id} was not given out, or belongs to a request already")
            self._unattached.remove(block_id)
            live.block_ids.append(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives back blocks that were not attached, or the last, unkeyed block of a request (a rewind). Free at once.

        Raises:
            CacheCorruptionError: A block is neither.
        """
        for block_id in block_ids:
            if block_id in self._unattached:
                self._unattached.remove(block_id)
            else:
                self._cut_last_block(block_id)
            self._store.blocks.release((block_id,))

    @property
    def unattached(self) -> tuple[int, ...]:
        """Blocks from `allocate` that were neither attached nor freed, in any order."""
        return tuple(self._unattached)

    @property
    def available_count(self) -> int:
        """Blocks that running requests can have now: free ones, cached ones that nobody holds, those of loads."""
        return self._store.blocks.available_blocks + self._loads.waiting_blocks

    @property
    def free_count(self) -> int:
        """Blocks that hold nothing."""
        return self._store.blocks.free_blocks

    @property
    def cached_count(self) -> int:
        """Blocks that a prompt can match, held or not."""
        return self._store.blocks.keyed_blocks

    def cached_block(self, key: bytes) -> int | None:
        """Id of the block with this key, if it is cached on the device."""
        node = self._store.tree.get(key)
        return None if node is None or node.block_id == NO_BLOCK else node.block_id

    def cached_keys(self) -> Iterator[bytes]:
        """Keys of all cached blocks, in any order."""
        return (node.key for node in self._store.tree if node.block_id != NO_BLOCK)

    def ref_counts(self) -> bytes:
        """How many live requests hold each block, as int32 in native order; a copy."""
        return self._store.blocks.ref_counts()

    def forget_unattached(self) -> None:
        """The blocks belong to nobody: the cache was reset."""
        self._unattached.clear()

    def _cut_last_block(self, block_id: int) -> None:
        # Only a rewind of speculative tokens over a block's edge, so a walk over the live requests will do.
        for live in self._requests.live.values():
            if len(live.block_ids) > len(live.path) and live.block_ids[-1] == block_id:
                live.block_ids.pop()
                return
        raise CacheCorruptionError(f"block {block_id} is neither unattached nor the last block of a request")
