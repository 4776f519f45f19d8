"""The prefix tree: one node per cached block, found by its key in one dict.

A node stays in the tree while the KV of its block or the state at its end is on the device or on the host, or while it
has children. It says where they are on the device, because each match and each step asks that; the tiers below know where theirs
are. Three invariants keep everything else simple. ``check_integrity`` checks them:

- The tree is closed under prefixes: a node's parent is in the tree. So a match walks down the keys.
- The device is closed under prefixes, too: a node's KV is on the device only if its parent's is, and a state only if
  its node's KV is.
- A live request holds every block on its path. So a node that nobody holds has only descendants that nobody holds, and
  they can be evicted from the leaves inward.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT

logger = logging.getLogger(__name__)

NO_BLOCK = -1


type Session = tuple[bytes | None, str]
"""Whose sessions these are, and a session's id: ids of other salts are other sessions."""


class Node:
    """A cached block, and possibly the state at its end.

    Attributes:
        key: Hash of all tokens up to the end of the block.
        parent: Node of the previous block; None for the first block of a prompt.
        depth_blocks: Blocks up to and including this one.
        block_id: Block of its KV on the device, or NO_BLOCK.
        slot: Slot of the checkpoint at its end, or NO_SLOT.
        reason: Why that state is kept, on the device or on the host; None: no tier has it.
        used: Whether a request has resumed from that state.
        private: Whether no other process can ask for this block (`KeyChain.private`).
        sessions: Open sessions that used that state (`Sessions`); None: requests without a session used it, too.
        refs: Number of child nodes, and of its entries on tiers below the device.
    """

    __slots__ = ("block_id", "depth_blocks", "key", "parent", "private", "reason", "refs", "sessions", "slot", "used")

    def __init__(self, key: bytes, parent: Node | None, block_id: int) -> None:
        self.key = key
        self.parent = parent
        self.depth_blocks: int = 1 if parent is None else parent.depth_blocks + 1
        self.block_id = block_id
        self.slot = NO_SLOT
        self.reason: CheckpointReason | None = None
        self.used = self.private = False
        self.sessions: set[Session] | None = None
        self.refs = 0

    def __repr__(self) -> str:
        return f"Node({self.key.hex()[:8]}, depth {self.depth_blocks}, block {self.block_id}, slot {self.slot})"


class KeyedValues(Protocol):
    """Values that somebody keeps with the nodes of a tree, by their keys. The tree says which have to go."""

    def drop(self, key: bytes) -> None:
        """The node has left the tree."""

    def drop_state(self, key: bytes) -> None:
        """No tier has the state at the node's end any more."""

    def clear(self) -> None:
        """All nodes have left the tree."""


class PrefixTree:
    """Nodes by key.

    Attributes:
        version: Grows whenever a match could give another result.
        epoch: Weights epoch of all nodes.
        sessions: Which of them used which states.

    Args:
        epoch: Weights epoch at the start.
        beside: Values that are kept with the nodes.
    """

    def __init__(self, epoch: int = 0, beside: KeyedValues | None = None) -> None:
        self.epoch = epoch
        self._beside = beside
        self._nodes: dict[bytes, Node] = {}
        self.sessions = Sessions()
        self.version = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The node with this key, or None."""
        return self._nodes.get(key)

    def path(self, keys: Iterable[bytes]) -> list[Node]:
        """Nodes of the longest prefix of ``keys`` whose KV is on the device."""
        found: list[Node] = []
        get = self._nodes.get
        for key in keys:
            node = get(key)
            if node is None or node.block_id == NO_BLOCK:
                break
            found.append(node)
        return found

    def insert(self, key: bytes, parent: Node | None, block_id: int) -> Node:
        """Adds a node. Its key must not be in the tree yet; its parent must be."""
        assert key not in self._nodes
        node = self._nodes[key] = Node(key, parent, block_id)
        if parent is not None:
            parent.refs += 1
        self.version += 1
        return node

    def prune(self, node: Node | None) -> None:
        """Removes the node if it is an empty leaf, and then each ancestor that has become one."""
        while node is not None and node.refs == 0 and node.block_id == NO_BLOCK and node.slot == NO_SLOT:
            del self._nodes[node.key]
            if self._beside is not None:
                self._beside.drop(node.key)
            if node.parent is not None:
                node.parent.refs -= 1
            node = node.parent
        self.version += 1

    def state_left(self, node: Node) -> None:
        """No tier has the node's state any more."""
        node.reason = None
        self.sessions.forget(node)
        if self._beside is not None:
            self._beside.drop_state(node.key)
        self.version += 1

    def clear(self) -> None:
        """Removes all nodes."""
        for node in self._nodes.values():
            node.parent = None  # breaks reference cycles, so that the garbage collector has no work
        self._nodes.clear()
        self.sessions.clear()
        if self._beside is not None:
            self._beside.clear()
        self.version += 1


_MOST_SESSIONS = 4096  # that are open


class Sessions:
    """Sessions that are not over, and the states that they alone used. Bounded: of one that was not used for long, states are anybody's.

    A request of a session uses all states on its path. A state that requests without a session used belongs to none, for good.

    Attributes:
        seen: Whether a request had a session. Without one there is nothing to do.
    """

    def __init__(self) -> None:
        self.seen = False
        self._states: dict[Session, dict[Node, None]] = {}  # used longest ago first

    def note(self, path: Iterable[Node], session: Session | None) -> list[Node]:
        """A request uses these. Returns the states among them that sessions alone had used."""
        found = [node for node in path if node.sessions is not None and node.reason is not None]
        if session is None:
            for node in found:
                self.forget(node)
            return found
        self.seen = True
        if found:
            own = self._states[session] = self._states.pop(session, {})
            for node in found:
                if node.sessions is not None:
                    node.sessions.add(session)
                    own[node] = None
        if len(self._states) > _MOST_SESSIONS:
            for node in list(self._states[next(iter(self._states))]):
                self.forget(node)
        return found

    def forget(self, node: Node) -> None:
        """The state is gone, or anybody's now."""
        for session in node.sessions or ():
            states = self._states[session]
            del states[node]
            if not states:
                del self._states[session]
        node.sessions = None

    def end(self, session: Session) -> list[Node]:
        """A session is over. Returns the states that no open session used."""
        states = list(self._states.pop(session, ()))
        for node in states:
            assert node.sessions is not None
            node.sessions.remove(session)
        return [node for node in states if not node.sessions]

    def clear(self) -> None:
        """All states are gone."""
        self._states.clear()


_GHOSTS_PER_BLOCK = 4  # remembered keys, as a multiple of the blocks that the memory holds


class Ghosts:
    """Keys of KV blocks that were evicted not long ago, bounded: the key that was added longest ago is forgotten first.

    A prompt shows that a prefix is shared when it starts like an earlier prompt. The KV of the earlier prompt tells it, but KV
    behind which no state is kept is evicted first. Its key takes 0.00001 of its bytes. So the second prompt keeps a state at the
    end of what both share, even if the KV of the first is gone.

    Args:
        blocks: Blocks that the memory holds.
    """

    def __init__(self, blocks: int) -> None:
        self._most = _GHOSTS_PER_BLOCK * blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """The block with this key was evicted."""
        if not self._most:
            return
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """The block with this key was computed again."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Forgets all keys."""
        self._keys.clear()


_STARTS = 2**14  # remembered ones
_MISSES = 16  # in a row of prompts that begin alike: worth a line in the log


class Starts:
    """How the latest prompts began (`KeyChain.starts`), bounded: the oldest is forgotten first. Outlives the weights.

    Attributes:
        cached: Epoch and key of the first block when it was cached last, by either hash.
        misses: Why the prompts that begin alike, whatever their salts, reused nothing since one of them hit, by the first hash.
    """

    def __init__(self) -> None:
        self.cached: dict[int, tuple[int, bytes]] = {}
        self.misses: dict[int, list[NotReused]] = {}

    def note(self, request_id: int, chain: KeyChain, reason: NotReused | None, *, hit: bool, write: bool) -> None:
        """The first forward of a prompt is published; ``write``: what it computes is cached. Warns if hits fell to 0. O(1)."""
        if chain.starts is None:
            return
        for start in chain.starts if write else ():
            self.cached.pop(start, None)
            self.cached[start] = chain.epoch, chain.keys[0]
        misses = self.misses.pop(start := chain.starts[0], None)
        if hit:
            self.misses[start] = []
        elif misses is not None:
            if reason not in (None, NotReused.NOT_READ, NotReused.BELOW_ONE_BLOCK):
                misses.append(reason)
            if len(misses) < _MISSES:
                self.misses[start] = misses
            else:
                why = ", ".join(f"{count} {reason}" for reason, count in Counter(misses).items())
                line = "the last %d prompts that begin like that of request %d reused nothing, earlier ones did: %s"
                logger.warning(line, _MISSES, request_id, why)
        for known in (self.cached, self.misses):
            while len(known) > _STARTS:
                del known[next(iter(known))]
