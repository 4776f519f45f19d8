"""Concurrent requests: a shared prefix is computed once, and short requests do not wait for a long one."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.mcore.engine.coalesce import _Owners
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens


def herd(model, **fields) -> EngineHarness:
    fields = {"max_requests": 12, "max_tokens": 4096, "max_sequence_length": 2048, "buffer_size_gb": 0.05} | fields
    return EngineHarness(model, **fields)


def computed(served) -> int:
    return served.context.prefix_stats().computed_prompt_tokens


def test_owners_of_log_probs_are_all_that_compute_enough():
    owners, keys = _Owners(BLOCK), [bytes([number]) for number in range(6)]
    owners.add(keys[:2], 0, "none", None)
    owners.add(keys[2:4], 0, "two", 2)
    owners.add(keys[4:], 0, "one", 1)
    assert {key: owners.of(1)[key] for key in owners.of(1)} == {
        **dict.fromkeys(keys[2:4], "two"),
        **dict.fromkeys(keys[4:], "one"),
    }
    assert set(owners.of(2)) == set(keys[2:4]) and not owners.of(3) and set(owners.of(None)) == set(keys)


@pytest.mark.parametrize("tail", [0, 1, 40])
def test_samples_of_one_prompt(model, tail):
    served = herd(model)
    prompt = tokens(5, tail, seed=1)
    for _ in range(6):
        served.add(prompt)
    served.run()
    last = (len(prompt) - 1) // BLOCK * BLOCK
    assert computed(served) == len(prompt) + 5 * (len(prompt) - last)
    served.check()


@pytest.mark.parametrize("chunks", [{}, {"enable_chunked_prefill": True, "max_tokens": 256}], ids=["whole", "chunked"])
def test_branches_of_branches(model, chunks):
    """What cold requests share is computed once. Groups share more with each other than all requests do."""
    served = herd(model, **chunks)
    trunk = tokens(5, 0, seed=1)
    total = len(trunk)
    for branch in range(2):
        middle = tokens(5, 0, seed=10 + branch)
        total += len(middle)
        for leaf in range(3):
            own = random_tokens(9 + leaf, seed=100 * branch + leaf)
            total += len(own)
            served.add(trunk + middle + own)
    served.run()
    assert computed(served) == total
    served.check()


def test_requests_that_come_while_a_long_prompt_is_computed_in_chunks(model):
    served = herd(model, enable_chunked_prefill=True, max_tokens=128)
    prompt = tokens(20, 3, seed=1)
    served.add(prompt)
    served.step(3)
    later = [served.add(prompt[: 15 * BLOCK] + random_tokens(20, seed=number)) for number in range(3)]
    served.run()
    assert [served.finished[number].num_cached_tokens for number in later] == 3 * [15 * BLOCK]
    served.check()


@pytest.mark.parametrize("how", ["aborted", "salt", "too little"])
def test_no_request_waits_for_a_prefix_that_will_not_come(model, how):
    served = herd(model, enable_chunked_prefill=True, max_tokens=128)
    prompt = tokens(3 if how == "too little" else 20, 3, seed=1)
    first = served.add(prompt, cache_salt="a" if how == "salt" else "b")
    second = served.add([*prompt, 1, 2], cache_salt="b")
    served.step(2)
    if how == "aborted":
        assert served.engine.abort_request(first)
    served.run()
    assert served.finished[second].num_cached_tokens < len(prompt) // BLOCK * BLOCK or how == "too little"
    served.check(second)
    served.check_drained()


def test_a_cached_prompt_starts_while_another_is_computed_in_chunks(model):
    served = herd(model, enable_chunked_prefill=True, max_tokens=128)
    short = tokens(4, 5, seed=1)
    served.send(short)
    long = served.add(tokens(25, 3, seed=2))
    served.step(2)
    quick = [served.add(short[: 4 * BLOCK] + random_tokens(5, seed=number), 3) for number in range(3)]
    steps = 0
    while not all(number in served.finished for number in quick):
        served.step()
        steps += 1
    assert served.context.chunked_prefill_request_id == long and long not in served.finished
    assert steps <= 8
    served.run()
    assert [served.finished[number].num_cached_tokens for number in quick] == 3 * [4 * BLOCK]
    served.finish()


def test_little_requests_do_not_starve_the_long_one(model):
    served = herd(model, enable_chunked_prefill=True, max_tokens=128)
    short = tokens(4, 5, seed=1)
    served.send(short)
    long = served.add(tokens(20, 3, seed=2), 2)
    served.step(1)
    for number in range(40):
        served.add(short[: 4 * BLOCK] + random_tokens(5, seed=number), 2)
    steps = 0
    while long not in served.finished:
        served.step()
        steps += 1
    assert steps <= 2 + 20 * BLOCK // 64  # at least half of each step is the long one's
    served.run()
    served.check()
