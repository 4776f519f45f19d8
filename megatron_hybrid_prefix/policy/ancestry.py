"""Which kept states lie above and below each other in the prefix tree: O(distance) a step, O(states) memory.

A compressed trie over the tree's nodes: it holds the nodes where states are kept, and those where the ways to two of
them part. The nodes in between are not in it; they are walked over by their ``parent``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self


class TreeNode(Protocol):
    """A node of the prefix tree, one block after its parent."""

    @property
    def depth_blocks(self) -> int:
        """Blocks up to and with this one."""

    @property
    def parent(self) -> Self | None:
        """The node one block earlier."""


class Place[T: TreeNode]:
    """A node of the trie: where a state is kept, or where ways part.

    Attributes:
        node: Its node in the prefix tree; None for the root, which is before the first token.
        depth_blocks: Blocks before it.
        kept: Whether a state is kept here. At the root one always is: it is zero.
        above: The place above; None for the root.
        via: First node on the way here from the place above.
        below: Places below, by the first node on the way to each.
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
        """``other`` comes below this place, instead of what was there."""
        self.below[via] = other
        other.above, other.via = self, via


class Ancestry[T: TreeNode]:
    """The places of the kept states."""

    def __init__(self) -> None:
        self._places: dict[T, Place[T]] = {}
        self._root: Place[T] = Place(None, kept=True)

    def clear(self) -> None:
        """No state is kept."""
        self._places.clear()
        self._root = Place(None, kept=True)

    def add(self, node: T) -> None:
        """A state is kept at ``node``, where none was."""
        place = self._places.get(node)
        if place is not None:  # ways part here already
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

    def remove(self, node: T) -> None:
        """The state at ``node`` is gone."""
        place = self._places[node]
        place.kept = False
        self._tidy(place)

    def nearest_above(self, node: T) -> T | None:
        """The deepest kept state on the way to ``node``, a place; None: there is none but zero."""
        place = self._places[node].above
        assert place is not None
        while not place.kept:
            assert place.above is not None
            place = place.above
        return place.node

    def depth_above_blocks(self, node: T) -> int:
        """Blocks before the deepest kept state on the way to ``node``, a place."""
        place = self._places[node].above
        assert place is not None
        while not place.kept:
            assert place.above is not None
            place = place.above
        return place.depth_blocks

    def next_below(self, node: T) -> Iterator[T]:
        """The kept states whose nearest one above is that at ``node``, a place; in the order of the calls before."""
        waiting = list(self._places[node].below.values())
        while waiting:
            place = waiting.pop()
            if place.kept:
                assert place.node is not None
                yield place.node
            else:
                waiting.extend(place.below.values())

    def _next_above(self, node: T) -> tuple[Place[T], T]:
        """The nearest place above ``node``, and the first node on the way from there."""
        via, parent = node, node.parent
        while parent is not None:
            place = self._places.get(parent)
            if place is not None:
                return place, via
            via, parent = parent, parent.parent
        return self._root, via

    def _tidy(self, place: Place[T]) -> None:
        """Takes out a place where no state is kept and no ways part any more."""
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
            self._tidy(above)  # at most once: it loses one of two


def _part[T: TreeNode](mine: T, its: T) -> tuple[T, T | None, T]:
    """Where the ways to two nodes part, and the next node on either; for ``mine`` None where it is that place.

    ``its`` is neither ``mine`` nor above it, and they have the first node in common.
    """
    mine_via: T | None = None
    its_via = its
    while mine is not its:
        # The deeper of the two goes up; at the same depth both do.
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
