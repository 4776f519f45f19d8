"""`HybridPrefixCache.explain`: a table of situations and numbers; that a request then gets just that; that it only reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.requests.explain import Explanation, Question
from tests.core.model import ModelEngine, tier_behind
from tests.core.test_cache import engine, run, tokens
from tests.harness.whole_state import whole_state

PROMPT = tokens(1, 2, 3, rest=1)
OTHERS = [tokens(20 + number, 30 + number, 40 + number, rest=1) for number in range(4)]


def explain(model: ModelEngine, prompt: list[int], salt: str | None = None, **fields: Any) -> Explanation:
    """Explains a prompt, and checks that the whole cache is as before."""
    cache = model.cache
    question = Question(chain=cache.chain(prompt, salt=salt), **fields)
    before = whole_state(cache)
    found = cache.explain(question)
    assert whole_state(cache) == before, "explaining changed something"
    return found


def filled(*prompts: list[int], **options: Any) -> ModelEngine:
    """A cache that has computed these prompts."""
    model = engine(**{"state_slots": 8} | options)
    for prompt in prompts:
        run(model, prompt)
    return model


def remembers(*prompts: list[int], **options: Any) -> ModelEngine:
    """The same, with the eviction policy that remembers."""
    return filled(*prompts, eviction_policy="recompute_cost", **options)


def empty_device(model: ModelEngine) -> ModelEngine:
    """Everything leaves the device: to the host, if there is one."""
    blocks = model.cache.blocks
    blocks.free(blocks.allocate(blocks.available_count))
    model.carry_out()
    return model


def without_states(model: ModelEngine) -> ModelEngine:
    """The states leave the device, in the order of their depth."""
    for node in sorted(model.cache.nodes(), key=lambda node: node.depth_blocks):
        if node.slot >= 0:
            model.cache._device.evict(node)
    return model


def without_last_block(model: ModelEngine) -> ModelEngine:
    """One block leaves the device, with its state."""
    (node,) = [node for node in model.cache.nodes() if node.depth_blocks == 3]
    model.cache._device.evict(node)
    model.cache._device._drop_kv(node)
    return model


def invalidated(model: ModelEngine) -> ModelEngine:
    model.cache.invalidate()
    return model


def in_flight() -> ModelEngine:
    """A forward computes the state at 8."""
    model = filled()
    request = model.admit(tokens(1, 2, rest=1))
    assert request is not None
    plan = model.plan(request, 100)
    live = model.live(request)
    model.cache._device.register(
        live.path, live.chain, live.block_ids, 2
    )  # as if its blocks were published before its state
    assert plan is not None and plan.checkpoints
    return model


def with_shared(least_blocks: int) -> ModelEngine:
    """The host has room for little; the tier behind it has the whole prompt."""
    behind = tier_behind()
    model = filled(PROMPT, *OTHERS, host_pages=5, secret=b"test", behind=behind)
    behind.least_blocks = behind.tier.least_blocks = least_blocks
    return empty_device(model)


def crowded(model: ModelEngine) -> ModelEngine:
    """A running request holds most of the device."""
    assert empty_device(model).admit(tokens(*range(50, 57), rest=1)) is not None
    return model


NOTHING: dict[str, Any] = {
    "prompt_tokens": 13,
    "block_tokens": 4,
    "limit_tokens": 12,
    "epoch": 0,
    "reason": "no_such_prefix",
    "resume_tokens": 0,
    "tier": None,
    "kv_tokens": {"device": 0},
    "state_tokens": {"device": ()},
    "evicted_tokens": (),
    "seen_tokens": 0,
    "kept_tokens": (12,),
    "writing_tokens": (),
    "scored_tokens": None,
    "least_load_tokens": 0,
    "most_states": 8,
    "refused_by": None,
    "writes": True,
}
KV = {"kv_tokens": {"device": 12}, "seen_tokens": 12}
STATE = KV | {"state_tokens": {"device": (12,)}, "kept_tokens": ()}
HIT = STATE | {"reason": None, "resume_tokens": 12, "tier": "device"}
ON_HOST = {"kv_tokens": {"device": 0, "host": 12}, "state_tokens": {"device": (), "host": (12,)}, "seen_tokens": 12}
ON_SHARED = {
    "kv_tokens": {"device": 0, "host": 0, "shared": 12},
    "state_tokens": {"device": (), "host": (), "shared": (12,)},
    "seen_tokens": 12,
}

# What is asked, and which numbers are not those of an empty cache.
SITUATIONS: dict[str, tuple[Callable[[], Explanation], dict[str, Any]]] = {
    "a hit": (lambda: explain(filled(PROMPT), PROMPT), HIT),
    "shorter than a block": (
        lambda: explain(filled(PROMPT), tokens(rest=3)),
        {"prompt_tokens": 3, "limit_tokens": 2, "kept_tokens": (), "reason": "below_one_block"},
    ),
    "nobody had it": (lambda: explain(filled(), PROMPT), {}),
    "the last token is computed": (
        lambda: explain(filled(PROMPT), PROMPT[:12]),
        STATE | {"prompt_tokens": 12, "limit_tokens": 11, "kept_tokens": (8,), "reason": "states_gone"},
    ),
    "longer than what is cached": (
        lambda: explain(filled(PROMPT), tokens(1, 2, 3, 4, rest=1)),
        HIT | {"prompt_tokens": 17, "limit_tokens": 16, "kept_tokens": (16,)},
    ),
    "KV without a state": (
        lambda: explain(remembers(PROMPT), tokens(1, 2, 4, rest=1)),
        {"kv_tokens": {"device": 8}, "seen_tokens": 8, "kept_tokens": (8, 12), "reason": "states_gone"},
    ),
    "the state was evicted": (
        lambda: explain(without_states(remembers(PROMPT, tokens(7, 8, rest=1))), tokens(7, 8, rest=1)),
        {
            **{"prompt_tokens": 9, "limit_tokens": 8, "kv_tokens": {"device": 8}},
            **{"seen_tokens": 8, "evicted_tokens": (8,), "kept_tokens": (8,), "reason": "states_gone"},
        },
    ),
    "all was evicted": (
        lambda: explain(empty_device(remembers(PROMPT)), PROMPT),
        {"seen_tokens": 12, "evicted_tokens": (12,), "reason": "kv_gone"},
    ),
    "KV was evicted in part": (
        lambda: explain(without_last_block(remembers(PROMPT)), PROMPT),
        {"kv_tokens": {"device": 8}, "seen_tokens": 12, "evicted_tokens": (12,), "reason": "states_gone"},
    ),
    "no slots": (
        lambda: explain(filled(PROMPT, state_slots=0), PROMPT),
        KV | {"most_states": 0, "kept_tokens": (), "reason": "memory"},
    ),
    "without a salt there is some": (lambda: explain(filled(PROMPT), PROMPT, salt="tenant"), {"reason": "other_salt"}),
    "without a salt there is none": (lambda: explain(filled(), PROMPT, salt="tenant"), {}),
    "new weights": (lambda: explain(invalidated(filled(PROMPT)), PROMPT), {"epoch": 1, "reason": "epoch"}),
    "refuses to read": (
        lambda: explain(filled(PROMPT), PROMPT, refused_by="cache_read"),
        STATE | {"refused_by": "cache_read", "reason": "not_read"},
    ),
    "refuses to read, and there is nothing": (
        lambda: explain(filled(), PROMPT, refused_by="cache_read"),
        {"refused_by": "cache_read", "reason": "not_read"},
    ),
    "refuses to write": (lambda: explain(filled(), PROMPT, write=False), {"writes": False, "kept_tokens": ()}),
    "log-probs are not kept": (
        lambda: explain(filled(PROMPT), PROMPT, resume_at=()),
        STATE | {"scored_tokens": (), "reason": "not_read"},
    ),
    "log-probs are kept": (lambda: explain(filled(PROMPT), PROMPT, resume_at=(12,)), HIT | {"scored_tokens": (12,)}),
    "a forward writes it": (
        lambda: explain(in_flight(), tokens(1, 2, rest=1)),
        {
            **{"prompt_tokens": 9, "limit_tokens": 8, "kv_tokens": {"device": 8}},
            **{"seen_tokens": 8, "writing_tokens": (8,), "kept_tokens": (8,), "reason": "states_gone"},
        },
    ),
    "on the host": (
        lambda: explain(empty_device(filled(PROMPT, host_pages=40)), PROMPT),
        ON_HOST | {"resume_tokens": 12, "tier": "host", "kept_tokens": (), "reason": None},
    ),
    "on the host, no room": (
        lambda: explain(crowded(filled(PROMPT, kv_blocks=8, host_pages=40)), PROMPT),
        ON_HOST | {"reason": "memory"},
    ),
    "on the shared tier": (
        lambda: explain(with_shared(0), PROMPT),
        ON_SHARED | {"resume_tokens": 12, "tier": "shared", "kept_tokens": (), "reason": None},
    ),
    "on the shared tier, too few": (
        lambda: explain(with_shared(9), PROMPT),
        ON_SHARED | {"least_load_tokens": 36, "reason": "states_gone"},
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name):
    ask, numbers = SITUATIONS[name]
    assert ask().as_dict() == NOTHING | numbers


OPTIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "pages": {"page_blocks": 3, "page_states": 2},
    "host": {"host_pages": 20},
    "shared": {"host_pages": 20, "secret": b"test"},
}


@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_request_gets_what_was_explained(name, policy):
    dice = random.Random(7)
    options = {"kv_blocks": 16, "state_slots": 3, "eviction_policy": policy, "retention_interval_tokens": None}
    behind = {"behind": tier_behind()} if name == "shared" else {}
    model = engine(**options | OPTIONS[name] | behind)
    prefixes = [[dice.randrange(3) for _ in range(dice.randint(1, 5))] for _ in range(5)]
    seen, running = set(), []
    for _ in range(60):
        runs = [*dice.choice(prefixes)[: dice.randint(1, 5)], *(dice.randrange(9) for _ in range(dice.randint(0, 2)))]
        prompt, read = tokens(*runs, rest=dice.choice((0, 1))), dice.random() < 0.9
        model.carry_out()
        found = explain(model, prompt, refused_by=None if read else "cache_read")
        loads = found.tier in ("host", "shared")
        request = model.admit_from_host(prompt) if loads else model.admit(prompt, read=read)
        if request is not None:
            assert (request.admission.reuse.reason, request.admission.resume_tokens) == (
                found.reason,
                found.resume_tokens,
            )
            kept = {b.position_tokens for b in request.admission.boundaries if b.reason != CheckpointReason.INTERVAL}
            assert kept - {*found.state_tokens["device"]} == {*found.kept_tokens}
            seen.add(found.tier)
            plan = model.plan(request, len(prompt))
            model.settle(plan, request, succeeds=True)
            running.append(request)
        else:
            assert not loads, "there is room for its load, and for the rest of the prompt"
        while running and (request is None or dice.random() < 0.6):
            model.release(running.pop(dice.randrange(len(running))))
        model.check()
    assert seen == {None, "device"} | ({"host"} if "host_pages" in OPTIONS[name] else set()) | ({name} & {"shared"})


def test_a_change_shows_in_the_whole_state():
    """The orders of all queues count: that of the blocks that were hashed, and that of the states, too."""
    model = filled(PROMPT, tokens(7, 8, rest=1))
    cache, states = model.cache, []
    for change in (
        lambda: None,
        lambda: cache.admit(100, cache.match(cache.chain(PROMPT))),
        lambda: cache._device.use(next(node for node in cache.nodes() if node.slot >= 0 and not node.used)),
        lambda: cache.chain(tokens(6)),
    ):
        change()
        states.append(whole_state(cache))
        assert whole_state(cache) == states[-1]
    assert all(first != second for first, second in pairwise(states))


def test_old_blocks_are_not_remembered_for_longer():
    """A chain that is not to be remembered leaves the blocks that were hashed in their order."""
    cache = filled(PROMPT).cache
    recent = cache._keys._recent
    recent._older, recent._newer = recent._newer, {}
    before = whole_state(cache)
    again = cache.chain(PROMPT, remember=False)
    assert whole_state(cache) == before
    assert cache.chain(PROMPT).keys == again.keys and whole_state(cache) != before


def test_one_line_when_a_groups_hits_fall_to_0(caplog):
    """Salts do not matter to a group. Requests that may not hit say nothing of it, and another hit begins anew."""
    model = filled(PROMPT)
    asked = [("tenant", True)] + [(None, False)] * 20 + [(f"other {number}", True) for number in range(20)]
    for hits in (1, 2):
        run(model, PROMPT)
        for salt, read in asked:
            run(model, PROMPT, salt=(salt, None), read=read, write=False)
        lines = [record.getMessage() for record in caplog.records if "reused nothing" in record.getMessage()]
        assert len(lines) == hits and lines[-1].endswith("reused nothing, earlier ones did: 16 other_salt")
    for number in range(20):
        run(model, tokens(50, 60 + number, rest=1))
    assert len(caplog.records) == 2, "who never hit cannot fall"


def test_what_is_forgotten_is_no_such_prefix(monkeypatch):
    """Also without a policy that remembers what it evicts."""
    monkeypatch.setattr("megatron_hybrid_prefix.index.tree._STARTS", 4)
    model = empty_device(filled(PROMPT))
    assert explain(model, PROMPT).reason == "kv_gone" and explain(invalidated(model), PROMPT).reason == "epoch"
    run(model, OTHERS[0])
    run(model, OTHERS[1])
    assert explain(model, PROMPT).reason == "no_such_prefix" and explain(model, OTHERS[0]).reason is None
    run(model, OTHERS[0])
    run(model, OTHERS[2])
    assert model.cache._device.starts.cached.keys() == {
        *(start for other in (OTHERS[0], OTHERS[2]) for start in model.cache.chain(other).starts)
    }
    reasons = model.cache.stats().not_reused
    assert sum(reasons.values()) == reasons["no_such_prefix"] == 4
