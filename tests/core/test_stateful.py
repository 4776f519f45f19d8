"""Hypothesis runs the cache through arbitrary orders of engine calls. Everything is checked after each step."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.hints import Hints, Pin
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.metrics import NotReused
from tests.core.model import ModelEngine, Request, tier_behind

STEPS: Counter[str] = Counter()


SALTS = [(None, None), ("", None), ("a", None), ("a", "lora"), (None, "a")]
HOSTS: list[dict[str, Any]] = [
    {},
    {"host_pages": 6, "host_kv_pages": 1, "host_state_pages": 2},
    {"host_pages": 30, "host_kv_pages": 2, "host_state_pages": 3},
    {"host_pages": 40, "host_kv_pages": 1, "host_state_pages": (3, 1)},
    {"host_pages": 200, "host_kv_pages": 1, "host_state_pages": 1},
    {"host_pages": 1000, "host_kv_pages": 1, "host_state_pages": 2},
]
MEMORIES: list[dict[str, Any]] = [  # pages of 1 to 5 blocks and 1 to 8 states, most with blocks left over
    {"kv_blocks": blocks, "page_blocks": page_blocks, "page_states": page_states}
    for page_blocks, page_states, *sizes in (
        *((1, 1, 20, 31), (1, 2, 20, 12), (2, 8, 30), (3, 1, 46), (3, 2, 40), (3, 4, 400)),
        *((4, 1, 30, 400), (4, 3, 30), (5, 1, 65)),
    )
    for blocks in sizes
]
TWO_SIZES: list[dict[str, Any]] = [  # pages of so many live states, or so many checkpoints
    {"kv_blocks": blocks, "page_blocks": page_blocks, "page_states": states}
    for page_blocks, states, blocks in (
        *((1, (1, 3), 20), (1, (2, 7), 12), (2, (1, 4), 30), (3, (1, 2), 46), (3, (3, 10), 40)),
        *((4, (1, 3), 60), (5, (1, 4), 65), (2, (1, 1), 40)),
    )
]
CAPS = [None, None, 0, 1, 2, 3, 8]
DICE = st.randoms(use_true_random=False)


class CacheMachine(RuleBasedStateMachine):
    """Few token ids and small blocks, so that prefixes coincide. Budgets range from nothing to plenty.

    Each rule decides by dice: those of Hypothesis, or of `run_seed`.
    """

    @initialize(dice=DICE)
    def build(
        self, dice: random.Random, behind: list[str] | None = None, memories: list[dict[str, Any]] = MEMORIES
    ) -> None:
        """``behind``: how many entries a tier behind the host keeps."""
        sizes = dice.choice(memories) | {"state_slots": dice.choice(CAPS), "live_states": dice.random() < 0.8}
        host = dice.choice([HOSTS[0], *HOSTS])
        if behind is not None:
            host = dice.choice(HOSTS[1:4]) | {"behind": tier_behind(dice.choice(behind))}
        block_tokens, interval_blocks = dice.choice([1, 2, 3, 4]), dice.choice([None, None, 0, 1, 3])
        settings = CacheSettings(
            block_tokens=block_tokens,
            first_state_slot=dice.choice([0, 4]),
            min_computed_tokens=dice.choice([1, 1, 2]),
            eviction_policy=dice.choice(["lru", "recompute_cost"]),
            retention_interval_tokens=None if interval_blocks is None else interval_blocks * block_tokens,
            **sizes,
            **host,
        )
        self.engine = ModelEngine(HybridPrefixCache(settings))
        self.engine.publishes_early = dice.random() < 0.7
        self.has_host = bool(host)
        self.hints_dice = random.Random(block_tokens) if block_tokens > 2 else None  # of its own
        self.pins = settings.kv_blocks % 2 == 0
        self.known: list[list[int]] = [[]]
        self.waiting: list[Request] = []  # preempted
        STEPS["machines"] += 1

    # -- choosing ------------------------------------------------------------------------------------------------------

    def live(self) -> list[Request]:
        return [request for request in self.engine.requests if not request.released]

    def prefilling(self) -> list[Request]:
        return [x for x in self.live() if not x.broken and x.planned_tokens < x.prompt_tokens and len(x.plans) < 3]

    def decoding(self) -> list[Request]:
        return [x for x in self.live() if not x.broken and not x.plans and len(x.history) >= x.prompt_tokens]

    def in_flight(self) -> list[Request]:
        return [request for request in self.engine.requests if request.plans]

    # -- rules ---------------------------------------------------------------------------------------------------------

    @rule(dice=DICE)
    def admit(self, dice: random.Random) -> None:
        self.admitted(dice)

    @rule(dice=DICE)
    def run_prompt(self, dice: random.Random) -> None:
        request = self.admitted(dice)
        if request and (plan := self.engine.plan(request, len(request.tokens))):
            self.engine.settle(plan, request, succeeds=True)
            if dice.random() < 0.5:
                self.engine.release(request)

    def admitted(self, dice: random.Random) -> Request | None:
        """A new request, with a load or without. None: there is no room, or there are many."""
        if len(self.live()) >= 6:
            return None
        prefix = dice.choice(self.known[-8:])
        prefix = prefix[: dice.randint(0, len(prefix))] if dice.random() < 0.5 else prefix
        tokens = prefix[:60] + dice.choices(range(3), k=dice.randint(1, 12))
        self.known.append(tokens)
        salt = dice.choice(SALTS) if dice.random() < 0.2 else SALTS[0]
        first_chunk = dice.randint(1, 12) if dice.random() < 0.3 else None
        if own := self.hints_dice:
            pins = (Pin(), Pin(uses=2), Pin(requests=9), Pin(seconds=9.0, tokens=own.randint(1, 20)))
            self.engine.hints = Hints(
                session=own.choice(["a", "b", "c", None]),
                ends_session=own.random() < 0.5,
                pins=(own.choice(pins),) if self.pins else (),
                tenant=salt,
                now_s=float(len(self.known)),
            )
        if self.has_host and dice.random() < 0.6:
            meanwhile = partial(self.compute_some, dice) if dice.random() < 0.5 else None
            loaded = self.engine.admit_from_host(tokens, salt, first_chunk=first_chunk, meanwhile=meanwhile)
            if loaded is not None:
                return loaded
        request = self.engine.admit(
            tokens,
            salt,
            read=dice.random() < 0.9,
            write=dice.random() < 0.9,
            max_resume_tokens=dice.randint(0, 30) if dice.random() < 0.1 else None,
            first_chunk=first_chunk,
            breakpoints=[dice.randint(-2, 60) for _ in range(2)] if dice.random() < 0.2 else (),
            meanwhile=partial(self.compute_some, dice) if dice.random() < 0.3 else None,
        )
        STEPS["hits" if request and request.admission.resume_tokens else "misses" if request else "refused"] += 1
        return request

    def compute_some(self, dice: random.Random) -> None:
        """Another request evicts, or publishes, between a request's match and its admission."""
        left = self.prefilling()
        if left and self.engine.plan(left[0], 100) and dice.random() < 0.5:
            self.engine.settle(left[0].plans[0], left[0], succeeds=True)

    @precondition(prefilling)
    @rule(dice=DICE)
    def plan_chunk(self, dice: random.Random) -> None:
        if some := self.prefilling():
            request = dice.choice(some)
            if self.engine.plan(request, dice.choice([1, 3, 7, 100])) is None and not request.plans:
                self.preempt(request)

    @precondition(in_flight)
    @rule(dice=DICE)
    def settle(self, dice: random.Random) -> None:
        if some := self.in_flight():
            request = dice.choice(some)
            self.engine.settle(request.plans[0], request, succeeds=dice.random() < 0.93)

    @precondition(in_flight)
    @rule(dice=DICE)
    def withdraw(self, dice: random.Random) -> None:
        some = [x for x in self.in_flight() if not (x.released or x.broken or self.engine.is_bad(x))]
        if some:
            request = dice.choice(some)
            can = len(request.plans) == 1 and self.engine.live(request).load is None
            STEPS["withdrawn"] += (published := can and dice.random() < 0.7)
            self.engine.withdraw(request.plans[0], request, published=published)

    @precondition(decoding)
    @rule(dice=DICE)
    def decode(self, dice: random.Random) -> None:
        """All that decode have their states kept at block ends."""
        if not (some := self.decoding()):
            return
        request, tokens = dice.choice(some), dice.choices(range(3), k=dice.randint(1, 9))
        if not self.engine.decode(request, tokens, by_id=dice.random() < 0.5, at_once=dice.random() < 0.5):
            self.waiting.append(request)
            STEPS["preempted"] += 1
        self.known.append(list(request.tokens))
        for other in some:
            if other in self.engine.requests:
                self.engine.checkpoint_decoded(other)
        self.engine.copy_decoded()

    @precondition(live)
    @rule(dice=DICE)
    def end_one(self, dice: random.Random) -> None:
        """A request ends, or is preempted."""
        if some := self.live():
            request = dice.choice(some)
            STEPS["aborted in flight" if request.plans else "released"] += 1
            if dice.random() < 0.3 and not request.plans:
                self.preempt(request)
            else:
                self.engine.release(request)

    def preempt(self, request: Request) -> None:
        STEPS["swapped out"] += self.engine.swap_out(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def readmit(self) -> None:
        """A preempted request goes on where it was, or starts over."""
        if self.waiting:
            request, engine = self.waiting.pop(0), self.engine
            again = engine.admit_from_host(request.tokens, request.salt, write=request.write, preempted=request)
            again = again or engine.admit(request.tokens, request.salt, write=request.write)
            STEPS["readmitted"] += again is not None

    @rule(dice=DICE)
    def spoil(self, dice: random.Random) -> None:
        self.engine.spoil(dice.randrange(1000))

    @rule()
    def rewind(self) -> None:
        """Blocks for speculative tokens are attached to a request or to none, and freed."""
        block_ids = self.engine.cache.blocks.allocate(2)
        if block_ids is None:
            return
        if live := self.live():
            self.engine.cache.blocks.attach(live[0].request_id, block_ids[:1])
        self.engine.cache.check_integrity()
        self.engine.cache.blocks.free(block_ids)

    @rule(dice=DICE)
    def rarely(self, dice: random.Random) -> None:
        cache = self.engine.cache
        what = dice.choice(["nothing"] * 5 + ["new weights", "reset", "keys of before"])
        STEPS[what] += 1
        if what == "new weights":
            cache.invalidate(dice.choice([None, cache.epoch + dice.randint(0, 7)]))
        elif what == "reset":
            self.engine.reset()
        elif what == "keys of before":
            self.admit_with_earlier_prefix_request(dice.choices(range(2), k=dice.randint(1, 24)))

    @precondition(lambda self: self.engine.stale_plans)
    @rule(succeeds=st.booleans())
    def settle_after_reset(self, succeeds: bool) -> None:
        plan = self.engine.stale_plans.pop()
        self.engine.cache.publish(plan) if succeeds else self.engine.cache.abandon(plan)

    def admit_with_earlier_prefix_request(self, tokens: list[int]) -> None:
        """A request that waited through a change of weights has keys of the old ones. It runs without the cache."""
        engine = self.engine
        chain = engine.cache.chain(tokens)
        match = engine.cache.match(chain)
        engine.cache.invalidate()
        admission = engine.cache.admit(10**6, match)
        if admission is not None:
            assert admission.resume_tokens == 0 and admission.boundaries == ()
            plan = engine.cache.plan(10**6, 0, len(tokens))
            engine.cache.publish(plan)
            engine.cache.release(10**6)
            engine.counted["prompt_tokens"] += len(tokens)
            engine.counted["computed_prompt_tokens"] += len(tokens)
        assert engine.cache.match(engine.cache.chain(tokens)).kv_depth_blocks == 0

    @invariant()
    def everything_holds(self) -> None:
        STEPS["steps"] += 1
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            stats = self.engine.cache.stats()
            STEPS["evictions"] += stats.evictions
            STEPS["kv evictions"] += stats.kv_evictions
            STEPS["skipped"] += stats.checkpoints_skipped
            STEPS["lost"] += stats.lost_tokens_no_state
            STEPS.update({f"pins {what}": count for what, count in stats.pins.items()})
            STEPS["sessions_ended"] += stats.sessions_ended
            STEPS["uses_of_ended"] += stats.uses_of_ended
            STEPS.update(stats.checkpoints_by_reason)
            STEPS.update(self.engine.seen)
            STEPS["pages"] += self.engine.pages
            self.engine.drain()


WEIGHTS = {
    **{CacheMachine.admit: 30, CacheMachine.plan_chunk: 45, CacheMachine.settle: 45, CacheMachine.decode: 25},
    **{CacheMachine.end_one: 20, CacheMachine.rarely: 1, CacheMachine.spoil: 6, CacheMachine.withdraw: 4},
}


def run_seed(seed: int, steps: int, behind: list[str] | None = None, memories: list[dict[str, Any]] = MEMORIES) -> None:
    """The same machine without Hypothesis: more, and more typical, traffic in the same time."""
    dice, machine = random.Random(seed), CacheMachine()
    machine.build(dice, behind, memories)
    weights = WEIGHTS | ({CacheMachine.spoil: 20} if behind is not None else {})
    for _ in range(steps):
        (step,) = dice.choices(list(weights), weights.values())
        step(machine, dice)
        if dice.random() < 0.07:
            machine.readmit()
        machine.everything_holds()
    machine.teardown()


def fail_unless_a_seed_fails(memories: list[dict[str, Any]] = MEMORIES) -> None:
    """Runs random traffic on a mutant."""
    for seed in range(60):
        try:
            run_seed(seed, 150, memories=memories)
        except (AssertionError, CacheCorruptionError, LookupError):
            return
    pytest.fail("no seed finds it")


HAPPENED = (
    *("hits", "misses", "refused", "preempted", "aborted in flight", "evictions", "kv evictions", "lost", "junction"),
    *("interval", "readmitted", "shared beyond", "decoded states", "stored", "loaded", "swapped out", "withdrawn"),
    *("guess used", "shared beyond by a chunk", "breakpoint", "repeat", "skipped", "admitted from the host", "resumed"),
    *(f"reason {reason}" for reason in (*NotReused, None) if reason != NotReused.NOT_READ),
    *("load failed", "load refused", "ghosts", "moved", "told of a move", "cleared", "one of a page's states"),
    *("state of an ended session", "sessions_ended", "uses_of_ended"),
    *(f"pins {what}" for what in ("pinned", "no_room", "spared", "evicted")),
)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 300), marks=pytest.mark.nightly)], ids=str)
def test_random_traffic(seeds):
    STEPS.clear()
    for seed in seeds:
        run_seed(seed, 150)
    print(dict(STEPS))
    # What was meant to happen did happen: traffic that never hits proves nothing.
    for what in HAPPENED:
        assert STEPS[what] >= len(seeds) / 30, f"{what}: only {STEPS[what]} times"


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 120), marks=pytest.mark.nightly)], ids=str)
def test_random_traffic_with_a_tier_behind_the_host(seeds):
    STEPS.clear()
    for seed in seeds:
        run_seed(seed, 150, behind=["", "20", "3"])
    print(dict(STEPS))
    moves = ("stored", "loaded", "admitted from the host", "taken behind", "given back", "spoilt behind", "load failed")
    for what in moves:
        assert STEPS[what] >= len(seeds) / 30, f"{what}: only {STEPS[what]} times"
    assert STEPS["not given back"] > 0


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 300), marks=pytest.mark.nightly)], ids=str)
def test_random_traffic_with_checkpoints_in_fewer_bytes(seeds):
    """Pages pass from KV to live states, to checkpoints and back."""
    STEPS.clear()
    for seed in seeds:
        run_seed(seed, 150, memories=TWO_SIZES)
    print(dict(STEPS))
    for what in HAPPENED:
        if not what.startswith("reason "):
            assert STEPS[what] >= len(seeds) / 60, f"{what}: only {STEPS[what]} times"
    assert STEPS["states moved"] >= len(seeds) / 4
    assert STEPS["pages that changed their owner"] >= 0.3 * STEPS["pages"]


@pytest.mark.slow
def test_any_order_of_everything():
    STEPS.clear()
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(STEPS))
    assert STEPS["steps"] >= 2000 and STEPS["machines"] >= 50
    # How often depends on what else is imported: hypothesis draws constants that it finds in the project's sources.
    for what in ("hits", "misses", "refused", "preempted", "aborted in flight", "evictions", "kv evictions", "lost"):
        assert STEPS[what] > 0, f"{what}: never"
