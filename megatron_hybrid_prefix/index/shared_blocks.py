"""`SharedBlocks`: KV blocks that share their memory with states (``pool/pages.py``).

The eviction queue has only *worthless* blocks: no request holds the block, and no state is kept at its node or below. No
request can resume behind it. The other cached blocks are in no queue: they become worthless when the last state below them
is evicted. As in `KVBlocks`, the front of the queue is always a leaf of the tree: a node becomes worthless before its
parent does.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import PageSlots


class SharedBlocks(KVBlocks):
    """KV blocks in shared pages.

    Args:
        pages: The shared pages.
        slots: The slots in the same pages.
    """

    def __init__(self, pages: Pages, slots: PageSlots) -> None:
        self._pages, self._slots = pages, slots
        super().__init__(pages.layout.total_blocks)

    def reset(self) -> None:
        """Frees all blocks, even those that are held. The caller resets the slots."""
        super().reset()
        self._pages.reset()
        self._free = _PagesAsBlocks(self._pages)

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor cached, nor in a page of a state."""
        return self._pages.free_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated: free ones, cached ones, and those in pages of states that can be evicted."""
        stuck = self._slots.stuck_slots * self._pages.layout.page_blocks
        return self.total_blocks - self._pages.held_blocks - stuck

    def take(self, count: int) -> list[int]:
        """See KVBlocks."""
        block_ids = self._pages.take_blocks(count)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def now_worthless(self, node: Node) -> None:
        """No state is kept at the node or below any more."""
        if node.block_id != NO_BLOCK and not self._ref_counts[node.block_id]:
            self._link(node)

    def now_useful(self, node: Node) -> None:
        """A state is kept at the node or below now."""
        if node.older is not None:
            self._unlink(node)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves cached blocks, as `Pages.empty` decided.

        Raises:
            CacheCorruptionError: A request holds a block that moves, or the target is in use.
        """
        for source, target in moves:
            node = self._node[source]
            if node is None or self._ref_counts[source] or self._ref_counts[target] or self._node[target] is not None:
                raise CacheCorruptionError(f"block {source} cannot move to {target}: held, without a key, or in use")
            self._node[source], self._node[target] = None, node
            node.block_id = target

    def check(self) -> None:
        """Checks that each block is exactly one of free, held, cached, or in a page of a state; and the queue.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        self._pages.check(self._ref_counts)
        free = set(self._pages.free_ids())
        queue = list(self.queue())
        worthless = set(queue)
        cached = 0
        for block_id, ref_count in enumerate(self._ref_counts):
            node = self._node[block_id]
            cached += node is not None and not ref_count
            in_state = self._pages.is_state(self._pages.page_of(block_id))
            places = (block_id in free) + in_state + (ref_count > 0) + (node is not None and not ref_count)
            if places != 1 or ref_count < 0:
                raise CacheCorruptionError(f"block {block_id} with ref_count {ref_count} has {places} owners")
            if node is not None and node.block_id != block_id:
                raise CacheCorruptionError(f"block {block_id} and {node} disagree")
            if node is not None and (node in worthless) != (not ref_count and not node.users):
                raise CacheCorruptionError(f"{node} with {node.users} users: whether it is worthless is wrong")
        if cached != self._cached_blocks or len(worthless) != len(queue):
            raise CacheCorruptionError(f"{cached} cached blocks, counted {self._cached_blocks}")
        self._check_order(queue)
        self._check_duplicates()

    def _enqueue(self, node: Node) -> None:
        self._pages.let_go(node.block_id)
        self._cached_blocks += 1
        if not node.users:
            self._link(node)

    def _dequeue(self, node: Node) -> None:
        self._pages.hold(node.block_id)
        self._cached_blocks -= 1
        if node.older is not None:
            self._unlink(node)

    def _evict(self, node: Node) -> None:
        self._pages.evict(node.block_id)
        self._cached_blocks -= 1
        if node.older is not None:
            self._unlink(node)


class _PagesAsBlocks(list[int]):
    """The free list of `SharedBlocks`: holes in pages and empty pages."""

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self._pages = pages

    def append(self, block_id: int) -> None:
        """Frees a held block."""
        self._pages.free(block_id)
