"""Which kept states are above and below each other, compared with a walk over the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy.needs import Ancestry


def grown(parents: list[int]) -> list[Node]:
    """A forest. Each node's parent is an earlier node or None."""
    nodes: list[Node] = []
    for number, choice in enumerate(parents):
        at = choice % (number + 1)
        nodes.append(Node(number.to_bytes(2), nodes[at - 1] if at else None, number))
    return nodes


def walked_above(node: Node, kept: set[Node]) -> Node | None:
    above = node.parent
    while above is not None and above not in kept:
        above = above.parent
    return above


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.lists(st.integers(0, 99), max_size=60))
def test_neighbours_are_those_that_a_walk_finds(parents, toggles):
    nodes = grown(parents)
    ancestry: Ancestry[Node] = Ancestry()
    kept: set[Node] = set()
    for choice in toggles:
        node = nodes[choice % len(nodes)]
        if node in kept:
            ancestry.remove(node)
            kept.remove(node)
        else:
            ancestry.add(node)
            kept.add(node)
        for other in kept:
            above = walked_above(other, kept)
            assert ancestry.nearest_above(other) is above
            below = [lower for lower in kept if walked_above(lower, kept) is other]
            found = list(ancestry.next_below(other))
            assert sorted(map(repr, found)) == sorted(map(repr, below))
        assert len(ancestry._places) <= 2 * len(kept), "one place for each state, and at most one more where ways part"
    for node in list(kept):
        ancestry.remove(node)
    assert not ancestry._places and not ancestry._root.below


def test_a_long_way_without_states_takes_no_memory():
    nodes = grown(list(range(2000)))
    assert nodes[-1].depth_blocks == 2000
    ancestry: Ancestry[Node] = Ancestry()
    ancestry.add(nodes[-1])
    ancestry.add(nodes[999])
    assert len(ancestry._places) == 2 and ancestry.nearest_above(nodes[-1]) is nodes[999]
    ancestry.clear()
    ancestry.add(nodes[-1])
    assert ancestry.nearest_above(nodes[-1]) is None
