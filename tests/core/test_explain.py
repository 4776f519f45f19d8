"""`HybridPrefixCache.explain`: a table of situations and sentences; that a request then gets just that; that it only reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from megatron_hybrid_prefix.index.explain import Explanation, Question
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from tests.core.model import ModelEngine, tier_behind
from tests.core.test_cache import engine, run, tokens
from tests.harness.whole_state import whole_state

PROMPT = tokens(1, 2, 3, rest=1)
OTHERS = [tokens(20 + number, 30 + number, 40 + number, rest=1) for number in range(4)]


def explain(model: ModelEngine, prompt: list[int], salt: str | None = None, **fields: Any) -> Explanation:
    """Explains a prompt, and checks that the whole cache is as before."""
    cache = model.cache
    plain = None if salt is None else cache.chain(prompt)
    question = Question(chain=cache.chain(prompt, salt=salt), plain=plain, **fields)
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
            model.cache._store.checkpoints.evict(node)
    return model


def without_last_block(model: ModelEngine) -> ModelEngine:
    """One block leaves the device, with its state."""
    (node,) = [node for node in model.cache.nodes() if node.depth_blocks == 3]
    model.cache._store.checkpoints.evict(node)
    model.cache._store._drop_kv(node)
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
    model.cache._store.register(model.live(request), 2)  # as if its blocks were published before its state
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


def keeps(*places: int) -> str:
    states = f"states at {', '.join(map(str, places))}" if len(places) > 1 else f"state at {places[0]}"
    return f"This request would keep the {states}: prompts that begin alike resume there."


NO_READ = "The request reuses nothing: cache_read is false."
ON_DEVICE = "KV goes to token 12 on the device."
NO_BLOCK = "Block 1 is on no tier: no earlier prompt had it, or it was evicted."
OF_SHARED = "What the shared tier has is what this rank knows without asking; a load needs it on all ranks."

# What is asked, the tokens that are reused, the tier of their state, and why it is not more.
SITUATIONS: dict[str, tuple[Callable[[], Explanation], int, str | None, list[str]]] = {
    "a hit": (lambda: explain(filled(PROMPT), PROMPT), 12, "device", []),
    "shorter than a block": (
        lambda: explain(filled(PROMPT), tokens(rest=3)),
        *(0, None),
        ["The prompt is shorter than a block of 4 tokens, and only whole blocks are cached."],
    ),
    "nobody had it": (lambda: explain(filled(), PROMPT), 0, None, [NO_BLOCK, keeps(12)]),
    "the last token is computed": (
        lambda: explain(filled(PROMPT), PROMPT[:12]),
        *(0, None),
        [
            "The request computes at least the last token, so it resumes at token 8 or before.",
            ON_DEVICE,
            "Between 0 and 8 no state was kept, or it was evicted.",
            keeps(8),
        ],
    ),
    "longer than what is cached": (
        lambda: explain(filled(PROMPT), tokens(1, 2, 3, 4, rest=1)),
        *(12, "device"),
        [ON_DEVICE, "Block 4 is on no tier: no earlier prompt had it, or it was evicted.", keeps(16)],
    ),
    "KV without a state": (
        lambda: explain(remembers(PROMPT), tokens(1, 2, 4, rest=1)),
        *(0, None),
        [
            "KV goes to token 8 on the device.",
            "Block 3 is on no tier: no earlier prompt had it, or it was evicted, too long ago to be remembered.",
            "Between 0 and 8 no state was kept, or it was evicted, as a guess or too long ago to be remembered.",
            keeps(8, 12),
        ],
    ),
    "the state was evicted": (
        lambda: explain(without_states(remembers(PROMPT, tokens(7, 8, rest=1))), tokens(7, 8, rest=1)),
        *(0, None),
        ["KV goes to token 8 on the device.", "Evicted: the state at 8, and 1 other since.", keeps(8)],
    ),
    "all was evicted": (
        lambda: explain(empty_device(remembers(PROMPT)), PROMPT),
        *(0, None),
        ["KV up to token 12 was evicted.", "Evicted: the state at 12.", keeps(12)],
    ),
    "KV was evicted in part": (
        lambda: explain(without_last_block(remembers(PROMPT)), PROMPT),
        *(0, None),
        [
            "KV goes to token 8 on the device.",
            "KV from there to token 12 was evicted.",
            "Evicted: the state at 12.",
            "Between 0 and 8 no state was kept, or it was evicted, as a guess or too long ago to be remembered.",
            keeps(12),
        ],
    ),
    "no slots": (
        lambda: explain(filled(PROMPT, state_slots=0), PROMPT),
        *(0, None),
        ["There is no room for a cached state: raise mamba_gb, or the memory."],
    ),
    "without a salt there is some": (
        lambda: explain(filled(PROMPT), PROMPT, salt="tenant"),
        *(0, None),
        [
            NO_BLOCK,
            "Only requests with the same salt and adapter share with it; without them KV goes to token 12.",
            keeps(12),
        ],
    ),
    "without a salt there is none": (
        lambda: explain(filled(), PROMPT, salt="tenant"),
        *(0, None),
        [NO_BLOCK, "Only requests with the same salt and adapter share with it.", keeps(12)],
    ),
    "new weights": (
        lambda: explain(invalidated(filled(PROMPT)), PROMPT),
        *(0, None),
        [NO_BLOCK, "The weights epoch is 1: what was cached before it is gone.", keeps(12)],
    ),
    "refuses to read": (
        lambda: explain(filled(PROMPT), PROMPT, refuses=NO_READ),
        *(0, None),
        [NO_READ, "Without that it would resume at token 12."],
    ),
    "refuses to read, and there is nothing": (
        lambda: explain(filled(), PROMPT, refuses=NO_READ),
        *(0, None),
        [NO_READ, keeps(12)],
    ),
    "refuses to write": (
        lambda: explain(filled(), PROMPT, write=False),
        *(0, None),
        [NO_BLOCK, "This request would keep nothing: cache_write is false."],
    ),
    "log-probs are not kept": (
        lambda: explain(filled(PROMPT), PROMPT, resume_at=()),
        *(0, None),
        [
            ON_DEVICE,
            "The device has the state at 12, but the log-probs of the prompt before it are not kept, and the request asks for them.",
        ],
    ),
    "log-probs are kept": (lambda: explain(filled(PROMPT), PROMPT, resume_at=(12,)), 12, "device", []),
    "a forward writes it": (
        lambda: explain(in_flight(), tokens(1, 2, rest=1)),
        *(0, None),
        ["KV goes to token 8 on the device.", "A running forward writes the state at 8.", keeps(8)],
    ),
    "on the host": (lambda: explain(empty_device(filled(PROMPT, host_pages=40)), PROMPT), 12, "host", []),
    "on the host, no room": (
        lambda: explain(crowded(filled(PROMPT, kv_blocks=8, host_pages=40)), PROMPT),
        *(0, None),
        [
            "KV goes to token 12 on the host.",
            "The host has the state at 12, but the device has no room to load it now.",
            keeps(12),
        ],
    ),
    "on the shared tier": (lambda: explain(with_shared(0), PROMPT), 12, "shared", []),
    "on the shared tier, too few": (
        lambda: explain(with_shared(9), PROMPT),
        *(0, None),
        [
            "KV goes to token 12 on the shared tier.",
            "The shared tier has the state at 12, but a load that saves fewer than 36 tokens does not begin.",
            OF_SHARED,
            keeps(12),
        ],
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name):
    ask, resume_tokens, tier, sentences = SITUATIONS[name]
    found = ask()
    assert (found.resume_tokens, found.tier, [*found.sentences[1:]]) == (resume_tokens, tier, sentences)
    first = found.sentences[0]
    assert first.startswith(f"{resume_tokens or 'None'} of the {found.prompt_tokens} prompt tokens would be reused")
    assert ("would load it" in first) == (tier in ("host", "shared"))


def test_the_numbers_say_the_same():
    found = explain(with_shared(0), tokens(1, 2, 3, 4, rest=1))
    assert found.as_dict() == {
        "prompt_tokens": 17,
        "block_tokens": 4,
        "limit_tokens": 16,
        "epoch": 0,
        "resume_tokens": 12,
        "tier": "shared",
        "kv_tokens": {"device": 0, "host": 0, "shared": 12},
        "state_tokens": {"device": (), "host": (), "shared": (12,)},
        "evicted_tokens": (),
        "seen_tokens": 12,
        "kept_tokens": (16,),
        "sentences": found.sentences,
    }
    assert "KV goes to token 12 on the shared tier." in found.sentences


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
        found = explain(model, prompt, refuses=None if read else NO_READ)
        given_up = model.seen["load given up"]
        loads = found.tier in ("host", "shared")
        request = model.admit_from_host(prompt) if loads else model.admit(prompt, read=read)
        if request is not None:
            assert request.admission.resume_tokens == found.resume_tokens
            kept = {b.position_tokens for b in request.admission.boundaries if b.reason != CheckpointReason.INTERVAL}
            assert kept - {*found.state_tokens["device"]} == {*found.kept_tokens}
            seen.add(found.tier)
            plan = model.plan(request, len(prompt))
            model.settle(plan, request, succeeds=True)
            running.append(request)
        else:
            assert not loads or model.seen["load given up"] > given_up, (
                "it began, and the rest of the prompt had no room"
            )
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
        lambda: cache._store.checkpoints.use(next(node for node in cache.nodes() if node.slot >= 0 and not node.used)),
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
