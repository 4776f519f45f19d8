"""The baselines `seglen`, `tlru` and `sparse-N`, against slow versions that say what they are. Properties of all eviction policies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.registry import eviction_policy_names, make_eviction_policy
from megatron_hybrid_prefix.policy.seglen import LENGTH_PERCENT
from megatron_hybrid_prefix.policy.sparse import SparsePlacement, best_depths
from megatron_hybrid_prefix.policy.tlru import THRESHOLD_TURNS

JUNCTION, TAIL, GUESS = CheckpointReason.JUNCTION, CheckpointReason.TAIL, CheckpointReason.INTERVAL


# -- slow versions -----------------------------------------------------------------------------------------------------


class Naive:
    """Guesses and other states in the order of `lru`. A subclass says how much a state is worth."""

    def __init__(self) -> None:
        self.guesses: list[Node] = []
        self.others: list[Node] = []

    def added(self, node: Node) -> None:
        (self.guesses if node.reason == GUESS else self.others).append(node)

    def used(self, node: Node) -> None:
        group = self.guesses if node in self.guesses else self.others
        group.remove(node)
        group.append(node)

    def removed(self, node: Node) -> None:
        (self.guesses if node in self.guesses else self.others).remove(node)

    def blocks(self, node: Node) -> int:
        above = node.parent
        while above is not None and above not in self.others:
            above = above.parent
        return node.depth_blocks - (0 if above is None else above.depth_blocks)

    def worth(self, node: Node) -> Fraction | bool:
        raise NotImplementedError

    def victim(self, evictable, guesses_only: bool) -> Node | None:
        for node in filter(evictable, self.guesses):
            return node
        worths = [(self.worth(node), place) for place, node in enumerate(self.others)]
        return next(
            (self.others[place] for _, place in sorted(worths) if not guesses_only and evictable(self.others[place])),
            None,
        )


class NaiveSegLen(Naive):
    def worth(self, node):
        length = Fraction(self.blocks(node), max(map(self.blocks, self.others)))
        recency = Fraction(self.others.index(node), max(1, len(self.others) - 1))
        return LENGTH_PERCENT * length + (100 - LENGTH_PERCENT) * recency


class NaiveTailOptimizedLru(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.grown: list[int] = []

    def added(self, node):
        super().added(node)
        if node.reason == TAIL:
            self.grown.append(self.blocks(node))

    def worth(self, node):
        """Whether the next turn is late without the node: it computes more than the threshold."""
        growth = Fraction(sum(self.grown), max(1, len(self.grown)))
        return self.blocks(node) + growth > THRESHOLD_TURNS * growth


NAIVE = {"seglen": NaiveSegLen, "tlru": NaiveTailOptimizedLru}


def calls(rng: random.Random, policy, count: int, most: int) -> Iterator[tuple[str, Node | None, set[Node]]]:
    """Makes random calls to a policy. Yields what was called, and with which state; for "victim", "guess" also what may go."""
    kept: list[Node] = []
    ends: list[Node | None] = [None]
    for number in range(count):
        what = rng.choice(["add", "add", "add", "use", "remove", "victim", "victim", "guess"])
        node, allowed = None, set()
        if what == "add" and len(kept) < most:
            node, reason = rng.choice(ends[-12:]), rng.choice([JUNCTION, TAIL, TAIL, GUESS])
            for block in range(rng.choice([1, 2, 3, 40 if reason == JUNCTION else 9])):
                node = Node(b"%d.%d" % (number, block), node, block)
                ends.append(node)
            node.reason = reason
            kept.append(node)
            policy.added(node)
        elif what in ("victim", "guess"):
            allowed = {node for node in kept if rng.random() < 0.7}
            node = policy.victim(allowed.__contains__, guesses_only=what == "guess")
            assert node is policy.victim(allowed.__contains__, guesses_only=what == "guess"), "asking changes nothing"
            assert node is None or node in allowed
        elif kept and what in ("use", "remove"):
            node = rng.choice(kept)
            if what == "use":
                policy.used(node)
            else:
                policy.removed(node)
                kept.remove(node)
        else:
            continue
        yield what, node, allowed
        assert len(policy) == len(kept) and set(policy) == set(kept)


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize("seed", range(4))
def test_it_decides_as_its_definition_does(name, seed):
    naive, policy = NAIVE[name](), make_eviction_policy(name)
    for what, node, allowed in calls(random.Random(seed), policy, count=1000, most=25):
        if what in ("victim", "guess"):
            assert node is naive.victim(allowed.__contains__, what == "guess")
        else:
            {"add": naive.added, "use": naive.used, "remove": naive.removed}[what](node)


@pytest.mark.parametrize("name", eviction_policy_names())
@pytest.mark.parametrize("seed", range(3))
def test_only_the_calls_decide(name, seed):
    """The same calls on other objects, at other addresses: all ranks evict the same states."""

    def decisions(_: int) -> list[tuple[str, bytes | None]]:
        found = calls(random.Random(seed), make_eviction_policy(name), count=1500, most=40)
        return [(what, node and node.key) for what, node, _ in found]

    first, hold = decisions(0), [object() for _ in range(999)]
    assert decisions(len(hold)) == first and sum(what == "victim" and key is not None for what, key in first) > 100


@pytest.mark.parametrize("name", eviction_policy_names())
def test_there_is_a_victim_as_long_as_a_state_may_go(name):
    policy = make_eviction_policy(name)
    kept = {node for what, node, _ in calls(random.Random(5), policy, count=300, most=30) if what == "add"} & set(
        policy
    )
    assert len(kept) > 10
    while kept:
        victim = policy.victim(lambda node: True)
        assert victim in kept
        policy.removed(victim)
        kept.remove(victim)
    assert policy.victim(lambda node: True) is None
    list(calls(random.Random(6), policy, count=50, most=9))
    policy.clear()
    assert len(policy) == 0 and policy.victim(lambda node: True) is None
    assert len(list(calls(random.Random(7), policy, count=50, most=9))) > 20


# -- examples ----------------------------------------------------------------------------------------------------------


def path(*depths: int, reason: CheckpointReason = TAIL, name: bytes = b"") -> list[Node]:
    """One prompt with states at these depths."""
    node, found = None, []
    for depth in range(1, max(depths) + 1):
        node = Node(b"%b %d" % (name, depth), node, depth)
        if depth in depths:
            node.reason = reason
            found.append(node)
    return found


def order_of(name: str, nodes: list[Node]) -> list[Node]:
    policy, order = make_eviction_policy(name), []
    for node in nodes:
        policy.added(node)
    while (victim := policy.victim(lambda node: True)) is not None:
        policy.removed(victim)
        order.append(victim)
    return order


def test_seglen_prefers_long_segments_and_then_recent_ones():
    (old_long,), (short,), (young_long,) = path(39, name=b"a"), path(3, name=b"b"), path(39, name=b"c")
    assert order_of("seglen", [old_long, short, young_long]) == [short, old_long, young_long]
    # 3 of 39 blocks are worth 6.5 %, a place of three 7.5 %: here recency decides.
    (less,) = path(36, name=b"d")
    assert order_of("seglen", [young_long, less, short])[1:] == [young_long, less]
    assert order_of("seglen", [old_long, less, young_long])[0] is old_long
    (much_less,) = path(35, name=b"e")
    assert order_of("seglen", [old_long, much_less, young_long])[0] is much_less
    # Without the state above, the one below is worth all of it.
    above, below = path(20, 24)
    assert order_of("seglen", [above, below, short])[0] is below
    assert order_of("seglen", [above, short])[0] is short


def test_tlru_gives_up_what_the_next_turn_can_do_without():
    # The prompts added 100, 2, 2 and 4 blocks: 27 on average, so up to 81 from the state above are safe.
    (old,) = path(100, name=b"old")
    first, second, third = path(2, 4, 8, name=b"new")
    assert order_of("tlru", [old, first, second, third]) == [first, second, third, old]
    assert order_of("lru", [old, first, second, third]) == [old, first, second, third]
    # Where all are late or none is, the least recently used one goes.
    pair = [*path(10, name=b"x"), *path(10, name=b"y")]
    assert order_of("tlru", pair) == pair


# -- sparse placement --------------------------------------------------------------------------------------------------


def saved_blocks(reach, depths) -> float:
    """What the definition says: each prompt resumes from the deepest checkpoint within the blocks that it shares."""
    total = 0.0
    for shared in range(len(reach)):
        prompts = reach[shared] - (reach[shared + 1] if shared + 1 < len(reach) else 0)
        total += prompts * max((depth for depth in depths if depth <= shared), default=0)
    return total


@given(st.lists(st.integers(0, 6), max_size=9), st.integers(0, 5))
def test_no_other_depths_save_more(prompts, count):
    reach = [sum(prompts[depth:]) for depth in range(len(prompts))] or [0]
    found = best_depths(reach, count)
    assert found == sorted(set(found)) and len(found) <= count and 0 not in found
    choices = (each for size in range(count + 1) for each in combinations(range(1, len(reach)), size))
    assert saved_blocks(reach, found) == max(saved_blocks(reach, depths) for depths in choices)


@given(
    st.lists(st.integers(0, 12), max_size=30),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_a_placement_is_the_best_for_the_prompts_so_far(prompts, count, blocks, resume_blocks, rest_tokens):
    rule, again = SparsePlacement(count), SparsePlacement(count)
    for shared in prompts:
        rule.learn(shared)
        again.learn(shared)
    resume_blocks = min(resume_blocks, blocks)
    asked = {"prompt_tokens": blocks * 10 + rest_tokens, "block_tokens": 10, "resume_tokens": resume_blocks * 10}
    found = rule(**asked)
    assert found == again(**asked) == rule(**asked), "asking changes nothing"
    depths = [boundary.position_tokens // 10 for boundary in found]
    assert all(boundary.position_tokens % 10 == 0 for boundary in found) and len(depths) <= count
    assert depths == sorted(depths) and all(resume_blocks < depth <= blocks for depth in depths)

    def saved(chosen) -> float:
        total = 0
        for shared in [*prompts, blocks]:
            total += (
                max((depth for depth in chosen if depth <= shared), default=resume_blocks)
                if shared > resume_blocks
                else 0
            )
        return total

    choices = combinations(range(resume_blocks + 1, blocks + 1), min(count, blocks - resume_blocks))
    assert saved(depths) == max(map(saved, choices))


def test_a_placement_finds_where_prompts_part():
    rule = SparsePlacement(2)
    shape = {"prompt_tokens": 100, "block_tokens": 10, "resume_tokens": 0}
    for _ in range(20):
        rule.learn(3)
    assert [boundary.position_tokens for boundary in rule(**shape)] == [30, 100]
    for _ in range(100):
        rule.learn(7)
    assert [boundary.position_tokens for boundary in rule(**shape)] == [30, 70]
    assert {boundary.reason for boundary in rule(**shape)} == {CheckpointReason.BREAKPOINT}
