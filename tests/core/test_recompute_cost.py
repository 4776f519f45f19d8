"""The eviction policy `recompute_cost`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.lab.replay import replay, unlimited_kv
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.policy import likelihood, recompute_cost
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.likelihood import Likelihood
from megatron_hybrid_prefix.policy.needs import Ancestry
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction
from megatron_hybrid_prefix.policy.registry import make_eviction_policy, make_policy_below
from tests.core.naive_recompute_cost import NaiveTiers
from tests.harness.selection import mostly_slow
from tests.harness.trace_helpers import KINDS, made_up

REASONS = (CheckpointReason.JUNCTION, CheckpointReason.TAIL, CheckpointReason.DECODE)


@pytest.fixture
def fast_clock(monkeypatch):
    """Shortens everything that takes hundreds of calls to a few."""
    monkeypatch.setattr(likelihood, "YOUNGEST_BITS", 1)
    monkeypatch.setattr(recompute_cost, "_REFRESH_AT_LEAST", 7)
    monkeypatch.setattr(recompute_cost, "_FADE_REFRESHES", 3)
    monkeypatch.setattr(recompute_cost, "_REMEMBERED", 1)
    monkeypatch.setattr(recompute_cost, "_REMEMBERED_AT_LEAST", 3)


def chain(depth_blocks: int, above: Node | None = None, name: int = 0) -> Node:
    """Adds so many nodes below ``above``. Returns the last one."""
    for number in range(depth_blocks):
        above = Node(b"%d.%d" % (name, number), above, number)
    assert above is not None
    return above


def publish(policy, node: Node, reason: CheckpointReason = CheckpointReason.TAIL) -> Node:
    node.reason = reason
    policy.added(node)
    return node


def lost_in_order(policy) -> list[Node]:
    order = []
    while (victim := policy.victim(lambda node: True)) is not None:
        assert policy.victim(lambda node: True) is victim, "asking changes nothing"
        policy.removed(victim)
        order.append(victim)
    return order


def compare(rng: random.Random, calls: int, most: int, state_blocks: tuple[float, ...] = (1e6,)) -> int:
    """Makes the same random calls to the policies of one or two tiers and to their naive twins. Returns how many victims were compared.

    A state is added to either tier, moves, is used on the device, is removed, and is evicted.
    """
    above = make_eviction_policy("recompute_cost")
    tiers = [above, *(make_policy_below(above, "recompute_cost", state_blocks=below) for below in state_blocks[1:])]
    above.share_memory(state_blocks=state_blocks[0])
    naive = NaiveTiers(state_blocks)
    nodes: list[Node] = []
    compared = 0
    for number in range(calls):
        tier = rng.randrange(len(tiers))
        kept, others = naive.kept[tier], [node for other in naive.kept for node in other]
        what = rng.choice(["new", "new", "again", "copy", "use", "use", "remove", "evict"])
        node = None
        if what == "new" and len(kept) < most:  # at a new node below any other
            parent = rng.choice([None, *nodes[-20:]])
            node = end = chain(rng.randint(1, 6), parent, number)
            while end is not parent:
                nodes.append(end)
                end = end.parent
            node = nodes[-rng.randint(1, min(6, len(nodes)))]
        elif what == "again" and nodes and len(kept) < most:  # where a state was lost
            node = rng.choice(nodes)
        elif what == "copy" and others:
            node = rng.choice(others)
        elif what == "use" and naive.kept[0]:
            used = rng.choice(naive.kept[0])
            above.used(used)
            for below, entries in zip(tiers[1:], naive.kept[1:], strict=True):
                if used in entries:
                    below.used(used)  # the same use
            naive.rule.used(used)
        elif what == "remove" and kept:
            remove(tiers, naive, tier, rng.choice(kept))
        elif what == "evict" and kept:
            pinned = set(rng.sample(kept, k=rng.randint(0, min(3, len(kept)))))
            allowed = [node for node in kept if node not in pinned]
            victim = tiers[tier].victim(allowed.__contains__)
            assert victim is naive.victim(tier, allowed.__contains__)
            compared += victim is not None
            if victim is not None:
                remove(tiers, naive, tier, victim)
        if node is not None and node not in kept:
            if node not in others:
                node.reason = rng.choice(REASONS)
            tiers[tier].added(node)
            naive.added(tier, node)
            if what == "copy" and rng.random() < 0.5:  # it moves
                remove(tiers, naive, 1 - tier, node)
        for each, policy in enumerate(tiers):
            assert len(policy) == len(naive.kept[each]) and list(policy) == naive.kept[each]
            assert [policy.value(node) for node in policy] == [naive.value(each, node) for node in policy]
    return compared


def remove(tiers, naive: NaiveTiers, tier: int, node: Node) -> None:
    tiers[tier].removed(node)
    naive.removed(tier, node)


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("seed", range(8))
def test_it_decides_as_the_obvious_version_does(seed):
    assert compare(random.Random(seed), calls=500, most=25) > 30


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("state_blocks", [(1,), (3,), (13,), (1e6, 2.5), (3, 2.5), (1, 1)], ids=str)
def test_it_decides_so_per_byte_and_on_two_tiers(state_blocks):
    assert sum(compare(random.Random(seed), 400, 25, state_blocks) for seed in range(2)) > 60


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize(
    "mutant",
    [
        # A state that became the only one to need its KV is not ranked again.
        (Ancestry, "remove", lambda self, node: _remove(self, node) and None),
        # A use counts on both tiers.
        (RecomputeCostEviction, "used", lambda self, state: self._known.used(state)),
    ],
    ids=["not ranked again", "counted twice"],
)
def test_mutants_are_found(mutant, monkeypatch):
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError):
        for seed in range(20):
            compare(random.Random(seed), 400, 25, (3, 2.5))


_remove = Ancestry.remove


class Counting(RecomputeCostEviction[Node]):
    """A plugin's policy with attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def added(self, state: Node) -> None:
        self.count += 1
        super().added(state)


def test_a_subclass_keeps_its_attributes_on_the_tier_below():
    above = Counting()
    below = above.tier_below()
    publish(below, chain(3))
    assert (type(below), below.count, above.count) == (Counting, 1, 0)
    assert len(below) == 1 and len(above) == 0


def test_it_decides_so_with_its_own_constants_too():
    assert compare(random.Random(99), calls=1200, most=30) > 120


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_short_histories(rng, calls):
    compare(rng, calls, most=8)


# -- what it keeps -----------------------------------------------------------------------------------------------------


def test_the_cost_can_be_that_of_a_model():
    nodes = [chain(10), chain(30, name=1)]
    nodes.append(chain(4, nodes[1], name=2))
    linear = RecomputeCostEviction[Node]()
    square = RecomputeCostEviction[Node](cost=lambda start, end: end**2 - start**2)  # attention
    for policy in (linear, square):
        for node in nodes:
            publish(policy, node)
    assert linear.victim(lambda node: True) is nodes[2] and square.victim(lambda node: True) is nodes[0]


def test_clear_forgets_states_but_not_what_was_learned():
    policy = make_eviction_policy("recompute_cost")
    for number in range(300):
        publish(policy, chain(3, name=number))
        if number % 3 == 0:
            policy.used(next(iter(policy)))
    assert policy.value(next(iter(policy))) > 0
    policy.clear()
    assert len(policy) == 0 and list(policy) == [] and policy.victim(lambda node: True) is None
    again = publish(policy, chain(3, name=1))
    assert 0 < policy.value(again) < 3 / 2**likelihood.YOUNGEST_BITS, "not what it says of a kind that it never saw"
    assert lost_in_order(policy) == [again]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 500)), min_size=1, max_size=12))
def test_a_rate_is_the_best_average_over_the_ages_to_come(cells):
    rates: Likelihood[str] = Likelihood()
    for age, (uses, exposure) in enumerate(cells):
        cell = rates.cell("a", age, 0)
        cell.uses, cell.exposure = float(uses), float(exposure)
    rates.refresh(0)
    for age in range(len(cells)):
        sums, best = [0.0, 0.0], 0.0
        for older in range(age, len(cells)):
            sums[0] += cells[older][0] + 1
            sums[1] += cells[older][1] + likelihood.oldest_in(older)
            best = max(best, sums[0] / sums[1])
        assert rates.cell("a", age, 0).rate == best


# -- in the cache ------------------------------------------------------------------------------------------------------


def reuse(trace: Trace, slots: int) -> list[float]:
    """Of both policies, this one first."""
    sizes, policies = unlimited_kv(trace, slots), ("recompute_cost", "lru")
    return [replay(trace, eviction_policy=policy, **sizes).reused_token_fraction for policy in policies]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "chat"))
def test_it_is_no_worse_than_lru(kind):
    trace = made_up(kind, 1200)
    for slots in (16, 256, 2048):
        mine, theirs = reuse(trace, slots)
        assert mine >= theirs - 0.002, f"{slots} slots"


@pytest.mark.parametrize(
    ("kind", "slots", "gain"), [("chat", 24, 0.15), ("scan", 16, 0.1), ("popular", 24, 0.15), ("agents", 16, 0.15)]
)
def test_it_is_far_better_than_lru_where_slots_are_scarce(kind, slots, gain):
    trace = made_up(kind, 2000)
    mine, theirs = reuse(trace, slots)
    assert mine >= theirs + gain


def test_guesses_are_made_where_there_is_room_and_not_where_slots_are_scarce():
    trace = made_up("popular", 1500)
    guesses = {}
    for slots in (16, 4096):
        counters = replay(trace, **unlimited_kv(trace, slots)).counters
        guesses[slots] = counters["checkpoints_by_reason"]["interval"]
    assert guesses[16] < 0.1 * guesses[4096]
