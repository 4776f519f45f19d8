"""`KVBlocks`: the entries of the device. A block is free, held by live requests, or cached and held by nobody.

A block counts the requests that hold it (`ref_count`). A block that a published forward fills is *keyed*: it belongs to
a node of the prefix tree. A keyed block with ref count 0 stays cached. If no state needs it, it is evicted first
(``policy/needs.py``). A node becomes unneeded, or is let go, before its parent: a request always holds a prefix of the
tree, and releases its deepest block first. So the first one in the queue is always a leaf.

Two requests may compute the same block at the same time. The second one finds the key taken. Its block is a
*duplicate*, private to that request. When the keyed block's ref count drops to 0 while a duplicate is in use, the node
moves to the duplicate, and the old block is free at once. So no live request has a node on its path whose block nobody
holds. This keeps the tree evictable from its leaves inward, without locks on whole paths.

A *guess* (a speculative checkpoint: an interval state, which no prompt has shared yet) only takes room that is free, and goes before
all else, the oldest first. It is not ranked and makes no KV useful. A request that resumes from it makes it an ordinary state.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.policy.base import EvictionPolicy, KnowsHolders
from megatron_hybrid_prefix.policy.needs import TierIndex, is_guess
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import SlotPool


class KVBlocks(TierIndex[Node]):
    """KV blocks ``0 .. total_blocks - 1``, in pages that states may take, and which of them states need.

    Args:
        pages: The pages.
        slots: The slots in the same pages.
        eviction: Ranks the states.

    Attributes:
        guesses: The nodes of guesses, the oldest first. They are not in ``states``.
        cached_blocks: Keyed blocks with ref count 0. All of them can be evicted.
        keyed_blocks: Blocks that belong to a node of the tree, held or not.
    """

    def __init__(self, pages: Pages, slots: SlotPool, eviction: EvictionPolicy[Node]) -> None:
        super().__init__(eviction)
        self.guesses: dict[Node, None] = {}
        self._knows_holders = eviction if isinstance(eviction, KnowsHolders) else None
        if self._knows_holders is not None:
            self._knows_holders.know_holders(lambda node: self._ref_counts[node.block_id] > 0)
        self._pages, self._slots = pages, slots
        self.total_blocks = pages.total_blocks
        self.reset()

    def reset(self) -> None:
        """Frees all blocks, even those that are held. The caller resets the slots."""
        self.clear()
        self._pages.reset()
        self._ref_counts = array("i", bytes(4 * self.total_blocks))
        self._node: list[Node | None] = [None] * self.total_blocks
        self._duplicates: dict[Node, list[int]] = {}
        self.cached_blocks = self.keyed_blocks = 0

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated: free ones, cached ones, and those in pages of states that can be evicted."""
        stuck = self._slots.stuck_pages * self._pages.page_blocks
        return self.total_blocks - self._pages.held_blocks - stuck

    def ref_count(self, block_id: int) -> int:
        """Number of live requests that hold the block."""
        return self._ref_counts[block_id]

    def held(self) -> dict[int, int]:
        """Ref counts of the blocks that live requests hold, by block."""
        return {block_id: count for block_id, count in enumerate(self._ref_counts) if count}

    def ref_counts(self) -> bytes:
        """Ref counts of all blocks: a copy, int32 in native byte order."""
        return self._ref_counts.tobytes()

    def node(self, block_id: int) -> Node | None:
        """The node whose KV is in the block; None if the block has no key."""
        return self._node[block_id]

    def unreferenced_tail(self, path: Sequence[Node]) -> Sequence[Node]:
        """The nodes on ``path`` with ref count 0. Sharing their blocks makes these unavailable."""
        # A request that holds a node holds its ancestors, too, so the unreferenced nodes are the deepest.
        ref_counts, held = self._ref_counts, len(path)
        while held and not ref_counts[path[held - 1].block_id]:
            held -= 1
        return path[held:]

    def take(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, with ref count 1 each. The caller checks that there are enough."""
        block_ids = self._pages.take_blocks(count)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, path: Sequence[Node]) -> list[int]:
        """Adds a reference to the block of each node. Returns the block ids."""
        ref_counts = self._ref_counts
        for node in path:
            if not ref_counts[node.block_id]:
                self._hold(node)
            ref_counts[node.block_id] += 1
        return [node.block_id for node in path]

    def release(self, block_ids: Sequence[int], path: Sequence[Node] = ()) -> None:
        """Drops one reference to each block, deepest node first.

        Args:
            block_ids: All blocks of one request, front first.
            path: Nodes of the request's first blocks.
        """
        for block_id in block_ids[len(path) :]:
            self._drop(block_id)
        for node, block_id in zip(reversed(path), reversed(block_ids[: len(path)]), strict=True):
            if node.block_id != block_id:
                self.forget_duplicate(node, block_id)
            self._drop(block_id)

    def bind(self, node: Node) -> None:
        """Gives the block of the new ``node`` its key. The request that computed or loaded the block holds it."""
        if self._node[node.block_id] is not None or not self._ref_counts[node.block_id]:
            raise CacheCorruptionError(f"block {node.block_id} gets a key, but has one, or no request holds it")
        self._node[node.block_id] = node
        self.keyed_blocks += 1

    def merge(self, node: Node, block_id: int) -> None:
        """A request filled ``block_id`` with the node's tokens: it becomes a duplicate, or the node's new block."""
        if self._ref_counts[node.block_id]:
            self._duplicates.setdefault(node, []).append(block_id)
        else:
            self._hold(node)
            self._replace(node, block_id)

    def unbind(self, node: Node) -> None:
        """Takes the node off the device. Requests keep its block and its duplicates; an unused block becomes free."""
        block_id = node.block_id
        self._node[block_id] = None
        self.keyed_blocks -= 1
        if self._ref_counts[block_id]:
            self._duplicates.pop(node, None)
        else:
            self._pages.evict(block_id)
            self.cached_blocks -= 1
        self.unneeded.pop(node, None)
        node.block_id = NO_BLOCK

    def has_kv(self, node: Node) -> bool:
        return node.block_id != NO_BLOCK and not self._ref_counts[node.block_id]

    def clear(self) -> None:
        super().clear()
        self.guesses.clear()

    def add_state(self, node: Node) -> None:
        if is_guess(node):
            self.guesses[node] = None
        else:
            super().add_state(node)

    def drop_state(self, node: Node) -> None:
        if node in self.guesses:
            del self.guesses[node]
        else:
            super().drop_state(node)

    def next_guess(self, may_go: Callable[[Node], bool] = lambda node: True) -> Node | None:
        """The guess that goes next, of those that are not pinned; None if there is none.

        Args:
            may_go: Whether a guess may go that is not pinned.
        """
        return next((node for node in self.guesses if not self.is_pinned(node, kv=False) and may_go(node)), None)

    def is_pinned(self, node: Node, *, kv: bool) -> bool:
        return not kv and self._slots.pins(node.slot) > 0

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
        """Checks that each block is exactly one of free, held, cached, or in a page of states; and the order of eviction.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        self._pages.check(self._ref_counts)
        free = set(self._pages.free_ids())
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
        if cached != self.cached_blocks:
            raise CacheCorruptionError(f"{cached} cached blocks, counted {self.cached_blocks}")
        seen: set[Node] = set()
        for node in self.unneeded:
            if node.parent in seen:
                raise CacheCorruptionError(f"{node} would be evicted after its parent")
            seen.add(node)
        for node, duplicates in self._duplicates.items():
            if not duplicates or not self._ref_counts[node.block_id]:
                raise CacheCorruptionError(f"{node} has duplicates {duplicates}, but nobody holds its block")
            for block_id in duplicates:
                if self._ref_counts[block_id] != 1 or self._node[block_id] is not None:
                    raise CacheCorruptionError(f"duplicate block {block_id} of {node} is not private")

    def is_duplicate(self, node: Node, block_id: int) -> bool:
        """Whether the block is a duplicate of the node's block."""
        return block_id in self._duplicates.get(node, ())

    def _drop(self, block_id: int) -> None:
        left = self._ref_counts[block_id] - 1
        if left < 0:
            raise CacheCorruptionError(f"block {block_id} is released more often than it was taken")
        self._ref_counts[block_id] = left
        if left:
            return
        node = self._node[block_id]
        if node is None:
            self._pages.free(block_id)
        elif node in self._duplicates:
            duplicate = self._duplicates[node][0]
            self.forget_duplicate(node, duplicate)
            self._replace(node, duplicate)
        else:
            self._let_go(node)

    def _replace(self, node: Node, block_id: int) -> None:
        """Moves the node from its block, with ref count 0, to ``block_id``, which a request holds."""
        self._node[node.block_id] = None
        self._pages.free(node.block_id)
        node.block_id = block_id
        self._node[block_id] = node

    def forget_duplicate(self, node: Node, block_id: int) -> None:
        """The block is no longer a duplicate of the node's."""
        duplicates = self._duplicates[node]
        duplicates.remove(block_id)
        if not duplicates:
            del self._duplicates[node]

    def _let_go(self, node: Node) -> None:
        """No request holds the node's block any more."""
        self._pages.hold(node.block_id, -1)
        self.cached_blocks += 1
        if node not in self.users:
            self.note_kv(node)
        elif self._knows_holders is not None and node in self.states:
            self._knows_holders.rank(node)

    def _hold(self, node: Node) -> None:
        """A request holds the node's cached block."""
        self._pages.hold(node.block_id, 1)
        self.cached_blocks -= 1
        self.unneeded.pop(node, None)
