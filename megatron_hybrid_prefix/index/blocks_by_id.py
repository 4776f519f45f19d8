"""`BlocksById`: KV blocks by id, for megatron's allocator, which does not name the request that it allocates for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.loads import Loads
from megatron_hybrid_prefix.index.requests import RequestBook
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import NO_BLOCK


class BlocksById:
    """KV blocks by id (``cache.blocks``).

    Args:
        store: The cached blocks and states.
        requests: The live requests.
        loads: Loads of waiting requests. They are given up when running requests need the blocks.
    """

    def __init__(self, store: PrefixStore, requests: RequestBook, loads: Loads) -> None:
        self._store, self._requests, self._loads = store, requests, loads
        self._unattached: set[int] = set()

    def allocate(self, count: int) -> list[int] | None:
        """Allocates blocks that the caller attaches to a request or frees. None: there are too few."""
        if not self._loads.make_room(count):
            return None
        block_ids = self._store.take_blocks(count)
        self._unattached.update(block_ids)
        return block_ids

    def attach(self, request_id: int, block_ids: Iterable[int]) -> None:
        """Appends blocks from `allocate` to a request.

        Raises:
            ValueError: The request is not live.
            CacheCorruptionError: A block was not allocated, or belongs to a request already.
        """
        live = self._requests[request_id]
        for block_id in block_ids:
            if block_id not in self._unattached:
                raise CacheCorruptionError(f"block {block_id} was not allocated, or belongs to a request already")
            self._unattached.remove(block_id)
            live.block_ids.append(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Frees unattached blocks, or the last block of a request if it has no key (a rewind).

        Raises:
            CacheCorruptionError: A block is neither.
        """
        for block_id in block_ids:
            if block_id in self._unattached:
                self._unattached.remove(block_id)
            else:
                self._cut_last_block(block_id)
            self._store.blocks.release((block_id,))

    def set_on_move(self, on_move: Callable[[int, int], None]) -> None:
        """Sets a function that is called at once when a cached block moves: (from block, to block).

        For what the engine keeps by block id on the host. The copy of the KV itself comes with `take_copies`.
        """
        self._store.on_move = on_move

    @property
    def unattached(self) -> tuple[int, ...]:
        """Allocated blocks that are neither attached nor freed, in any order."""
        return tuple(self._unattached)

    @property
    def available_count(self) -> int:
        """Blocks that running requests can get now: free, evictable, or held by loads that can be given up."""
        return self._store.blocks.available_blocks + self._loads.waiting_blocks

    @property
    def most_per_request(self) -> int:
        """Blocks that a request can have if no other runs: all but those whose memory its own state takes."""
        return self._store.blocks.total_blocks - self._store.slots_per_request * self._store.pages.page_blocks

    def fit_together(self, blocks: Sequence[int]) -> bool:
        """Whether requests that need this many blocks each can all run at once. Blocks that they share count for each."""
        store = self._store
        of_states = len(blocks) * store.slots_per_request * store.pages.page_blocks
        return sum(blocks) <= store.blocks.total_blocks - of_states

    @property
    def free_count(self) -> int:
        """Blocks that are neither held nor cached."""
        return self._store.blocks.free_blocks

    @property
    def cached_count(self) -> int:
        """Blocks that a prompt can match, held or not."""
        return self._store.blocks.keyed_blocks

    @property
    def evictable_count(self) -> int:
        """Blocks that a prompt can match and no request holds."""
        return self._store.blocks.cached_blocks

    def cached_block(self, key: bytes) -> int | None:
        """The block with this key; None if it is not on the device."""
        node = self._store.tree.get(key)
        return None if node is None or node.block_id == NO_BLOCK else node.block_id

    def cached_keys(self) -> Iterator[bytes]:
        """Keys of all blocks on the device, in any order."""
        return (node.key for node in self._store.tree if node.block_id != NO_BLOCK)

    def ref_counts(self) -> bytes:
        """Ref counts of all blocks: a copy, int32 in native byte order."""
        return self._store.blocks.ref_counts()

    def forget_unattached(self) -> None:
        """Forgets unattached blocks, after the cache was reset."""
        self._unattached.clear()

    def _cut_last_block(self, block_id: int) -> None:
        # Rare: a rewind of speculative tokens past a block boundary. So a search over the live requests is fast enough.
        for live in self._requests.live.values():
            if len(live.block_ids) > len(live.path) and live.block_ids[-1] == block_id:
                live.block_ids.pop()
                return
        raise CacheCorruptionError(f"block {block_id} is neither unattached nor the last block of a request")
