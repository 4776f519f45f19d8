"""The prefix tree: one node per cached block, found by key in one dict.

A node is in the tree while the KV of its block, or a state at its end, is on the device or on the host, or while it has
children. Three facts keep everything else simple, and ``check_integrity`` holds them:

- the tree is closed under prefixes: a node's parent is in the tree, so a match is a walk down the keys;
- so is what is on the device: a node's KV is there only with its parent's, and a state only with its node's KV;
- a live request holds every block on its path in the tree, so whatever nobody holds has only descendants that nobody
  holds, and can be evicted from its leaves inward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT

NO_BLOCK = -1


class Node:
    """A cached block and, maybe, the state at its end.

    Attributes:
        key: Digest of all tokens up to the end of the block.
        parent: The block before; None for the first block of a prompt.
        depth_blocks: Blocks up to and with this one.
        block_id: Where its KV is on the device, or NO_BLOCK.
        slot: Slot of the checkpoint at its end, or NO_SLOT.
        host_block: Entry of its KV on the host, or NO_BLOCK.
        host_slot: Entry of the state at its end on the host, or NO_SLOT.
        reason: Why that state is kept, on the device or on the host.
        used: Whether a request resumed from it.
        children: How many nodes have this one as parent.
        older, newer: Neighbours in the queue of blocks that nobody holds (``index/blocks.py``).
    """

    __slots__ = (
        "block_id",
        "children",
        "depth_blocks",
        "host_block",
        "host_slot",
        "key",
        "newer",
        "older",
        "parent",
        "reason",
        "slot",
        "used",
    )

    def __init__(self, key: bytes, parent: Node | None, block_id: int) -> None:
        self.key = key
        self.parent = parent
        self.depth_blocks: int = 1 if parent is None else parent.depth_blocks + 1
        self.block_id = block_id
        self.slot = NO_SLOT
        self.host_block = NO_BLOCK
        self.host_slot = NO_SLOT
        self.reason: CheckpointReason | None = None
        self.used = False
        self.children = 0
        self.older: Node | None = None
        self.newer: Node | None = None

    def __repr__(self) -> str:
        return f"Node({self.key.hex()[:8]}, depth {self.depth_blocks}, block {self.block_id}, slot {self.slot})"


class PrefixTree:
    """Nodes by key.

    Attributes:
        version: Grows whenever a match might come out differently.
        epoch: Weights epoch of all that is in it.

    Args:
        epoch: At the start.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._nodes: dict[bytes, Node] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The node of ``key``, if it is cached."""
        return self._nodes.get(key)

    def path(self, keys: Iterable[bytes]) -> list[Node]:
        """The nodes of the longest run of ``keys`` from the front whose KV is on the device."""
        found: list[Node] = []
        get = self._nodes.get
        for key in keys:
            node = get(key)
            if node is None or node.block_id == NO_BLOCK:
                break
            found.append(node)
        return found

    def insert(self, key: bytes, parent: Node | None, block_id: int) -> Node:
        """A new node; its key must not be in the tree yet, its parent must."""
        assert key not in self._nodes
        node = self._nodes[key] = Node(key, parent, block_id)
        if parent is not None:
            parent.children += 1
        self.version += 1
        return node

    def prune(self, node: Node | None) -> None:
        """Takes out a node that nothing is left of, and then its ancestors of which nothing was but their children."""
        while (
            node is not None
            and node.children == 0
            and node.block_id == node.host_block == NO_BLOCK
            and node.slot == node.host_slot == NO_SLOT
        ):
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent
        self.version += 1

    def set_state(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """The state at the end of the node's block is in ``slot``."""
        assert node.slot == NO_SLOT, node
        node.slot = slot
        node.reason = reason
        node.used = False
        self.version += 1

    def drop_state(self, node: Node) -> int:
        """The node has no state on the device any more; returns the slot that it was in."""
        assert node.slot != NO_SLOT, node
        slot, node.slot = node.slot, NO_SLOT
        if node.host_slot == NO_SLOT:
            node.reason = None
        self.version += 1
        return slot

    def drop_host_state(self, node: Node) -> None:
        """The node has no state on the host any more."""
        assert node.host_slot != NO_SLOT, node
        node.host_slot = NO_SLOT
        if node.slot == NO_SLOT:
            node.reason = None
        self.version += 1

    def clear(self) -> None:
        """Takes out everything."""
        for node in self._nodes.values():
            node.parent = node.older = node.newer = None  # no cycles are left to the garbage collector
        self._nodes.clear()
        self.version += 1
