"""Who holds which KV block: free, held by live requests, or cached and held by nobody.

A block counts the requests that use it (`ref_count`). A block that a finished forward filled is *keyed*: it belongs to a node of the prefix
tree. When nobody holds a keyed block it stays cached, in a queue in the order in which blocks were let go; the front
of the queue is evicted first, in O(1). A request lets go of its blocks deepest first and always holds a prefix of the
tree, so a node comes into the queue before its parent, whoever else held either: the front is always a leaf.

Two requests may compute the same block at the same time. The second finds the key taken; its block is a *duplicate*,
private to it. When the last request lets go of the keyed block while a duplicate is in use, the node takes over the duplicate
and the other block is free at once. So no live request ever sits on a node whose block nobody holds, which is what
keeps the tree evictable from its leaves inward without locking whole paths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node


class KVBlocks:
    """KV blocks ``0 .. total_blocks - 1``.

    Args:
        total_blocks: How many there are.

    Raises:
        ValueError: The count is negative.
    """

    def __init__(self, total_blocks: int) -> None:
        if total_blocks < 0:
            raise ValueError(f"kv_blocks={total_blocks}: must be 0 or more")
        self.total_blocks = total_blocks
        self.reset()

    def reset(self) -> None:
        """All blocks become free, whoever held them."""
        self._ref_counts = array("i", bytes(4 * self.total_blocks))
        self._node: list[Node | None] = [None] * self.total_blocks
        # A stack with the lowest id on top: a pool in managed memory is then filled from its beginning.
        self._free = list(range(self.total_blocks - 1, -1, -1))
        self._duplicates: dict[Node, list[int]] = {}
        self._cached_blocks = 0
        self._keyed_blocks = 0
        # Head of the circular queue: `newer` is the block let go longest ago, `older` the one let go last.
        self._queue = Node(b"", None, -1)
        self._queue.older = self._queue.newer = self._queue

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Keyed blocks that nobody holds: all of them can be evicted."""
        return self._cached_blocks

    @property
    def keyed_blocks(self) -> int:
        """Blocks of nodes of the tree, held or not."""
        return self._keyed_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had, evicting if need be."""
        return len(self._free) + self._cached_blocks

    def ref_count(self, block_id: int) -> int:
        """How many live requests hold the block."""
        return self._ref_counts[block_id]

    def ref_counts(self) -> bytes:
        """Holders of all blocks, as int32 in native order; a copy."""
        return self._ref_counts.tobytes()

    def node(self, block_id: int) -> Node | None:
        """The node whose KV the block holds, if it is keyed."""
        return self._node[block_id]

    def unreferenced_tail(self, path: Sequence[Node]) -> int:
        """How many blocks of ``path`` nobody holds: sharing them takes them from the available ones."""
        # Whoever holds a node holds its ancestors, so the unreferenced ones are the deepest.
        ref_counts, count = self._ref_counts, 0
        for node in reversed(path):
            if ref_counts[node.block_id]:
                break
            count += 1
        return count

    def take(self, count: int) -> list[int]:
        """Free blocks with one holder each; there must be ``count`` of them."""
        if count == 0:
            return []
        block_ids = self._free[: -count - 1 : -1]
        assert len(block_ids) == count, "taken more blocks than are free"
        del self._free[-count:]
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def share(self, path: Sequence[Node]) -> list[int]:
        """One more holder for the block of each node; returns their ids."""
        ref_counts = self._ref_counts
        block_ids = [node.block_id for node in path]
        for node, block_id in zip(path, block_ids, strict=True):
            if not ref_counts[block_id]:
                self._dequeue(node)
            ref_counts[block_id] += 1
        return block_ids

    def release(self, block_ids: Sequence[int], path: Sequence[Node] = ()) -> None:
        """One holder less for each block; those in the tree deepest first.

        Args:
            block_ids: All blocks of one request, front first.
            path: The nodes that its first blocks, shared or its own, have in the tree.
        """
        for block_id in block_ids[len(path) :]:
            self._drop(block_id)
        for node, block_id in zip(reversed(path), reversed(block_ids[: len(path)]), strict=True):
            if node.block_id != block_id:
                self._forget_duplicate(node, block_id)
            self._drop(block_id)

    def bind(self, node: Node) -> None:
        """The block of the new ``node``, held by the request that computed or loaded it, becomes keyed."""
        if self._node[node.block_id] is not None or not self._ref_counts[node.block_id]:
            raise CacheCorruptionError(f"block {node.block_id} gets a key while it has one, or while nobody holds it")
        self._node[node.block_id] = node
        self._keyed_blocks += 1

    def merge(self, node: Node, block_id: int) -> None:
        """A request computed into ``block_id`` what ``node`` holds already: it becomes a duplicate, or takes the place."""
        if self._ref_counts[node.block_id]:
            self._duplicates.setdefault(node, []).append(block_id)
        else:
            self._dequeue(node)
            self._replace(node, block_id)

    def oldest(self) -> Node | None:
        """The cached node let go longest ago, always a leaf of the tree; None when nothing is cached."""
        node = self._queue.newer
        return None if node is self._queue else node

    def unbind(self, node: Node) -> None:
        """The node leaves the device. Requests keep its block and duplicates; a block that none uses is free."""
        block_id = node.block_id
        self._node[block_id] = None
        self._keyed_blocks -= 1
        if self._ref_counts[block_id]:
            self._duplicates.pop(node, None)
        else:
            self._dequeue(node)
            self._free.append(block_id)
        node.block_id = NO_BLOCK

    def queue(self) -> Iterator[Node]:
        """Cached nodes that nobody holds, in the order of eviction."""
        node = self._queue.newer
        while node is not None and node is not self._queue:
            yield node
            node = node.newer

    def check(self) -> None:
        """Raises CacheCorruptionError unless each block is exactly one of free, held, cached, and leaves go first."""
        free = set(self._free)
        queue = list(self.queue())
        cached = {node.block_id for node in queue}
        if len(free) != len(self._free) or not len(cached) == len(queue) == self._cached_blocks:
            raise CacheCorruptionError("a block is twice in the free list or in the eviction queue, or one was lost")
        for block_id, ref_count in enumerate(self._ref_counts):
            node = self._node[block_id]
            places = (block_id in free) + (block_id in cached) + (ref_count > 0)
            if places != 1 or ref_count < 0:
                raise CacheCorruptionError(f"block {block_id} with ref_count {ref_count} is in {places} places")
            if node is not None and (block_id in free or node.block_id != block_id):
                raise CacheCorruptionError(f"block {block_id} and {node} disagree")
            if block_id in cached and node is None:
                raise CacheCorruptionError(f"block {block_id} waits for eviction without a key")
        seen: set[Node] = set()
        for node in queue:
            if node.parent in seen:
                raise CacheCorruptionError(f"{node} would be evicted after its parent")
            seen.add(node)
        for node, duplicates in self._duplicates.items():
            if not duplicates or not self._ref_counts[node.block_id]:
                raise CacheCorruptionError(f"{node}: duplicates {duplicates} while nobody holds its block")
            for block_id in duplicates:
                if self._ref_counts[block_id] != 1 or self._node[block_id] is not None:
                    raise CacheCorruptionError(f"duplicate block {block_id} of {node} is not private")

    def is_duplicate(self, node: Node, block_id: int) -> bool:
        """Whether the block is a private duplicate of the node's."""
        return block_id in self._duplicates.get(node, ())

    def _drop(self, block_id: int) -> None:
        left = self._ref_counts[block_id] - 1
        if left < 0:
            raise CacheCorruptionError(f"block {block_id} is released more often than held")
        self._ref_counts[block_id] = left
        if left:
            return
        node = self._node[block_id]
        if node is None:
            self._free.append(block_id)
        elif node in self._duplicates:
            duplicate = self._duplicates[node][0]
            self._forget_duplicate(node, duplicate)
            self._replace(node, duplicate)
        else:
            self._enqueue(node)

    def _replace(self, node: Node, block_id: int) -> None:
        """The node moves from its block, which nobody holds, to ``block_id``, which somebody does."""
        self._node[node.block_id] = None
        self._free.append(node.block_id)
        node.block_id = block_id
        self._node[block_id] = node

    def _forget_duplicate(self, node: Node, block_id: int) -> None:
        duplicates = self._duplicates[node]
        duplicates.remove(block_id)
        if not duplicates:
            del self._duplicates[node]

    def _enqueue(self, node: Node) -> None:
        queue = self._queue
        newest = queue.older
        assert newest is not None
        node.older, node.newer = newest, queue
        newest.newer = queue.older = node
        self._cached_blocks += 1

    def _dequeue(self, node: Node) -> None:
        older, newer = node.older, node.newer
        assert older is not None and newer is not None, node
        older.newer, newer.older = newer, older
        node.older = node.newer = None
        self._cached_blocks -= 1
