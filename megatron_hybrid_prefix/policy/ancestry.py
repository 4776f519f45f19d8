"""Which kept states are above and below each other in the prefix tree. O(distance) per step, O(states) memory.

A compressed trie over the nodes of the prefix tree. It has the nodes where a state is kept, and the forks: nodes where
the paths to two of them part. The nodes in between are not in it; they are reached by ``parent``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self


class TreeNode(Protocol):
    """A node of the prefix tree, one block after its parent."""

    @property
    def depth_blocks(self) -> int:
        """Blocks up to and including this one."""

    @property
    def parent(self) -> Self | None:
        """The node of the previous block."""


class Place[T: TreeNode]:
    """A node of the trie: a kept state, or a fork.

    Attributes:
        node: Its node in the prefix tree; None for the root, which is before the first token.
        depth_blocks: Blocks before it.
        kept: Whether a state is kept here. Always True for the root, whose state is zero.
        above: The next place above; None for the root.
        via: First node on the path from the place above to here.
        below: Places below, by the first node on the path to each.
    """

    __slots__ = ("above", "below", "depth_blocks", "kept", "node", "via")

    def __init__(self, node: T | None, *, kept: bool) -> None:
        self.node = node
        self.depth_blocks = 0 if node is None else node.depth_blocks
        self.kept = kept
        self.above: Place[T] | None = None
        self.via: T | None = None
        self.below: dict[T, Place[T]] = {}

    def hang(self, other: Place[T], via: T) -> None:
        """Puts ``other`` below this place, instead of the place that was there."""
        self.below[via] = other
        other.above, other.via = self, via


class Ancestry[T: TreeNode]:
    """The trie of the kept states."""

    def __init__(self) -> None:
        self._places: dict[T, Place[T]] = {}
        self._root: Place[T] = Place(None, kept=True)

    def clear(self) -> None:
        """Forgets all states."""
        self._places.clear()
        self._root = Place(None, kept=True)

    def add(self, node: T) -> None:
        """Adds the state at ``node``, which had none."""
        place = self._places.get(node)
        if place is not None:  # a fork already
            place.kept = True
            return
        place = self._places[node] = Place(node, kept=True)
        above, via = self._next_above(node)
        other = above.below.get(via)
        if other is None:
            above.hang(place, via)
            return
        assert other.node is not None
        fork, mine_via, its_via = _part(node, other.node)
        if fork is node:
            joint = place
        else:
            assert mine_via is not None
            joint = self._places[fork] = Place(fork, kept=False)
            joint.hang(place, mine_via)
        above.hang(joint, via)
        joint.hang(other, its_via)

    def remove(self, node: T) -> T | None:
        """Removes the state at ``node``.

        Returns:
            The kept state whose `exclusive_blocks` grew; None if there is none.
        """
        place = self._places[node]
        above = place.above
        assert above is not None
        place.kept = False
        if not place.below:
            self._tidy(place)
            # The state above has no state below it now, or the fork above is gone and one branch of it is left.
            left = above if above.kept else next(iter(above.below.values()), above)
        elif len(place.below) == 1:
            (left,) = place.below.values()
            self._tidy(place)
        else:
            return None  # a fork now
        return left.node if left.kept and not left.below else None

    def exclusive_blocks(self, node: T) -> int:
        """Blocks that only the state at ``node`` makes useful: down from the next place above, if no state is below."""
        place = self._places[node]
        assert place.above is not None
        return 0 if place.below else place.depth_blocks - place.above.depth_blocks

    def nearest_above(self, node: T) -> T | None:
        """The nearest kept state above ``node``, which must be a place. None: there is only the root."""
        place = self._places[node].above
        assert place is not None
        while not place.kept:
            assert place.above is not None
            place = place.above
        return place.node

    def depth_above_blocks(self, node: T) -> int:
        """Depth in blocks of the nearest kept state above ``node``, which must be a place."""
        place = self._places[node].above
        assert place is not None
        while not place.kept:
            assert place.above is not None
            place = place.above
        return place.depth_blocks

    def next_below(self, node: T) -> Iterator[T]:
        """The kept states whose nearest state above is at ``node``, in an order that depends only on earlier calls."""
        waiting = list(self._places[node].below.values())
        while waiting:
            place = waiting.pop()
            if place.kept:
                assert place.node is not None
                yield place.node
            else:
                waiting.extend(place.below.values())

    def _next_above(self, node: T) -> tuple[Place[T], T]:
        """The nearest place above ``node``, and the first node on the path from there."""
        via, parent = node, node.parent
        while parent is not None:
            place = self._places.get(parent)
            if place is not None:
                return place, via
            via, parent = parent, parent.parent
        return self._root, via

    def _tidy(self, place: Place[T]) -> None:
        """Removes a place that is neither a kept state nor a fork any more."""
        above = place.above
        if place.kept or above is None or len(place.below) > 1:
            return
        assert place.node is not None and place.via is not None
        del self._places[place.node]
        if place.below:
            (only,) = place.below.values()
            above.hang(only, place.via)
        else:
            del above.below[place.via]
            self._tidy(above)  # recurses at most once: a fork has two places below


def _part[T: TreeNode](mine: T, its: T) -> tuple[T, T | None, T]:
    """The fork of the paths to two nodes, and the next node on each path; None for ``mine`` if ``mine`` is the fork.

    ``its`` is neither ``mine`` nor above it. Both paths start with the same node.
    """
    mine_via: T | None = None
    its_via = its
    while mine is not its:
        # The deeper of the two moves up; at the same depth both do.
        mine_depth, its_depth = mine.depth_blocks, its.depth_blocks
        if mine_depth >= its_depth:
            mine_via, parent = mine, mine.parent
            assert parent is not None
            mine = parent
        if its_depth >= mine_depth:
            its_via, parent = its, its.parent
            assert parent is not None
            its = parent
    return mine, mine_via, its_via
