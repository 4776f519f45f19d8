"""Work and memory of the control plane, counted in Python steps, which do not depend on the machine."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.bench import control_plane
from megatron_hybrid_prefix.requests.matcher import Matcher
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from tests.core.test_cache import engine, run
from tests.harness.steps import steps


def test_memory_of_a_block():
    assert control_plane.bytes_per_block(30_000) <= 600


def steps_of_a_request(requests: int, **sizes: int) -> float:
    """Python steps from match to release, including those that make up the requests."""
    return steps(lambda: control_plane.requests_per_second(requests, **sizes)) / requests


@pytest.mark.parametrize("sizes", [{}, {"kv_blocks": 2_048}, {"slots": 64}], ids=["all fit", "evictions", "few slots"])
def test_requests_of_a_trace_take_no_more_steps_in_a_longer_one(sizes):
    short, long = (steps_of_a_request(requests, **sizes) for requests in (500, 2_500))
    assert short <= control_plane.PROMPT_BLOCKS * 135
    assert long <= 1.25 * short  # the first requests evict nothing


def test_long_prompts_and_evictions_take_no_more_steps_in_a_larger_cache():
    found = []
    for blocks, slots in ((5_000, 200), (50_000, 2_000)):
        cache = control_plane.filled_cache(blocks, slots)
        # States first: evicting KV blocks frees slots.
        state = steps(lambda cache=cache: control_plane.state_eviction_seconds(cache, 150)) / 150
        once, thrice = (
            steps(lambda cache=cache, n=repeats: control_plane.long_prompt_seconds(cache, 100_000, n))
            for repeats in (1, 3)
        )
        prompt = (thrice - once) / 2  # without making it up
        block = steps(lambda cache=cache: control_plane.eviction_seconds(cache, 2_000)) / 2_000
        found.append((state, prompt, block))
    for small, large in zip(*found, strict=True):
        assert large <= 1.1 * small
    state, prompt, block = found[1]
    assert prompt <= 40 * 100_000 / control_plane.BLOCK_TOKENS
    assert state <= 900 and block <= 80


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[int]:
    """Grows with each call of a function."""
    calls: list[int] = []
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **fields: calls.append(1) or original(*args, **fields))
    return calls


def test_a_match_is_made_once_for_an_admission(monkeypatch):
    model = engine(block_tokens=256)
    run(model, list(range(3 * 256)))
    cache, made = model.cache, counted(monkeypatch, Matcher, "match")
    match = cache.match(cache.chain(list(range(3 * 256 + 9))))
    assert cache.can_admit(match) and cache.can_admit(match, length_tokens=3 * 256 + 1)
    cache.admit(77, match)
    assert len(made) == 1


def test_evicting_looks_at_no_more_than_it_evicts(monkeypatch):
    model = engine(kv_blocks=202, block_tokens=1)
    run(model, list(range(200)))
    looked = counted(monkeypatch, KVBlocks, "next_kv")
    assert model.cache.blocks.allocate(7) is not None
    assert len(looked) == 7 and model.cache.stats().evictions == 2, "a state is as large as a block"
