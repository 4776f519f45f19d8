"""The eviction policy `recompute_cost`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.lab.replay import CacheServer, replay, unlimited_kv
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.policy import likelihood, recompute_cost
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.likelihood import Likelihood
from megatron_hybrid_prefix.policy.needs import Ancestry
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from tests.core.naive_memory import NaiveMemory
from tests.harness.selection import mostly_slow
from tests.harness.trace_helpers import BLOCK, KINDS, made_up


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


SIZES: dict[str, dict[str, int]] = {
    "few slots": {"kv_blocks": 200, "state_slots": 25},
    "two states a page": {"kv_blocks": 90, "page_blocks": 3, "page_states": 2},
    "host": {"kv_blocks": 120, "page_blocks": 4, "host_pages": 180, "host_state_pages": 4},
    "smaller on the host": {
        **{"kv_blocks": 150, "page_blocks": 13},
        **{"host_pages": 100, "host_kv_pages": 2, "host_state_pages": 5},
    },
}


def compare(kind: str, sizes: str, requests: int = 120, seed: int = 1) -> None:
    """Serves a made-up trace. The policy of each tier and its naive twin get the same calls; see `NaiveMemory`."""
    seen: Counter[str] = Counter()
    server = CacheServer(block_tokens=BLOCK, eviction_policy="recompute_cost", **SIZES[sizes])
    NaiveMemory(server._cache, seen)
    for request in made_up(kind, requests, seed).requests:
        server.serve(request)
    assert seen["victims of tier 0"] > 100 and ("host_pages" not in SIZES[sizes] or seen["victims of tier 1"] > 100)


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_decides_as_the_obvious_version_does(kind, sizes):
    compare(kind, sizes)


def test_it_decides_so_with_its_own_constants_too():
    compare("chat", "host", requests=500)


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize(
    "mutant",
    [
        # A state that became the only one to need its KV is not ranked again.
        (Ancestry, "remove", lambda self, node: _remove(self, node) and None),
        # A use counts on both tiers.
        (RecomputeCostEviction, "used", lambda self, state: self._known.used(state)),
        # KV that a running request holds counts as freed.
        (RecomputeCostEviction, "know_holders", lambda self, is_held: setattr(self, "_is_held", lambda state: False)),
    ],
    ids=["not ranked again", "counted twice", "held KV is freed"],
)
def test_mutants_are_found(mutant, monkeypatch):
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError):
        for kind in KINDS:
            compare(kind, "host")


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
    assert policy.victim(lambda node: True) is again


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
