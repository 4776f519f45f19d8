"""The second request with a prefix already resumes from it, with a breakpoint of the caller and without."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from tests.harness.engine_helpers import assert_matches
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, IdTokenizer, tokens
from tests.harness.mutants import MUTANTS, mutated_resume


def computed(served: EngineHarness, prompt: list[int], **attributes: Any) -> int:
    """Sends a prompt. Returns how many of its tokens were computed."""
    before = served.cache.stats().computed_prompt_tokens
    request = served.send(prompt, **attributes)
    count = served.cache.stats().computed_prompt_tokens - before
    assert count == len(prompt) - request.num_cached_tokens
    return count


def kept(served: EngineHarness) -> list[tuple[int, CheckpointReason]]:
    """Depths in blocks of all kept states, and their reasons."""
    nodes = (node for node in served.cache.nodes() if node.reason is not None)
    return sorted((node.depth_blocks, node.reason) for node in nodes)


# -- the second and the third request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "more"),
    [(2048, 0), (3 * BLOCK, 1), (3 * BLOCK, BLOCK - 1)],
)
def test_a_named_prefix(model, max_tokens, more):
    served = EngineHarness(
        model, async_sched_mode="async", max_tokens=max_tokens, enable_chunked_prefill=True, max_sequence_length=2048
    )
    shared = tokens(8, more, seed=1)
    own = [tokens(0, count, seed=count) for count in (150, 90, 30)]
    assert computed(served, shared + own[0], cache_breakpoints=[len(shared)]) == len(shared) + 150
    assert computed(served, shared + own[1], cache_breakpoints=[len(shared)]) == 90 + more
    assert computed(served, shared + own[2]) == 30 + more
    assert served.cache.stats().checkpoints_by_reason["breakpoint"] == 1
    assert served.cache.stats().lost_tokens_no_state == 0
    served.check()
    served.check_drained()


@pytest.mark.parametrize(("interval", "max_tokens"), [(None, 3 * BLOCK), (5 * BLOCK, 2048)], ids=["default", "5"])
def test_without_a_hint(model, interval, max_tokens):
    """Prompts of more than 16 blocks, so that not every block is an interval."""
    served = EngineHarness(
        model,
        async_sched_mode="async",
        retention_interval_tokens=interval,
        max_tokens=max_tokens,
        enable_chunked_prefill=True,
        max_sequence_length=2048,
    )
    shared = tokens(8, 20 + BLOCK, seed=1)  # nine blocks: no interval
    own = [tokens(0, 700 + number, seed=number) for number in range(4)]
    assert computed(served, shared + own[0]) == len(shared) + 700
    second, widest = computed(served, shared + own[1]), interval or 2 * BLOCK
    assert 701 + BLOCK < second < 701 + widest
    assert second == 701 + len(shared) % widest
    for number in (2, 3):
        assert computed(served, shared + own[number]) == 700 + number + 20, "the blocks that two prompts shared"
    assert served.cache.stats().checkpoints_by_reason["interval"] > 0
    served.check()
    served.check_drained()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_states_would_be_noticed(model, mutant):
    served = EngineHarness(model, retention_interval_tokens=None, max_sequence_length=2048, max_tokens=2048)
    shared = tokens(8, 20, seed=1)
    served.send(tokens(13, 1, seed=99))  # a state of another depth, for the mutant
    served.send(shared + tokens(0, 60, seed=2), cache_breakpoints=[6 * BLOCK])
    with mutated_resume(served.engine, mutant):
        hits = [served.send(shared + tokens(0, 50, seed=3)), served.send(shared[: 6 * BLOCK] + tokens(0, 50, seed=4))]
    assert [request.num_cached_tokens for request in hits] == [8 * BLOCK, 6 * BLOCK]
    for request in hits:
        with pytest.raises(AssertionError):
            assert_matches(served.reference, request)


def test_concurrent_requests_share_the_first_ones_states(model):
    served = EngineHarness(model, async_sched_mode="async", retention_interval_tokens=None)
    shared = tokens(4, 9, seed=1)
    served.send(*(shared + tokens(0, 40 + number, seed=number) for number in range(4)), count=9)
    cached = [served.finished[number].num_cached_tokens for number in sorted(served.finished)]
    assert cached == [0] + [4 * BLOCK] * 3
    served.check()
    served.check_drained()


# -- what is said about requests ---------------------------------------------------------------------------------------


def test_breakpoints_survive_a_preemption(model):
    served = EngineHarness(model, blocks=11, async_sched_mode="async", tokenizer=IdTokenizer())
    for seed in range(4):
        served.add(tokens(1, 50 + seed, seed=seed), 40, cache_breakpoints=[BLOCK])
    served.run()
    preempted = [record for record in served.records.values() if len(record.requests) > 1]
    assert preempted
    for record in preempted:
        assert record[-1].sampling_params.cache_breakpoints == [BLOCK]
    assert served.cache.stats().checkpoints_by_reason["breakpoint"] >= 4
    served.check()
    served.check_drained()


def test_breakpoints_of_another_type_are_refused(model):
    served = EngineHarness(model)
    engine = served.engine
    running = served.add(tokens(1, 20, seed=1), 6)
    served.step(2)
    for wrong in (64, "64", b"64", [64.0], [64, None], ["64"], [True], {64}, {64: 1}, [[64]], "a\nb", [1.5] * 100):
        served.next_id = 1
        with pytest.raises(ValueError, match=r"^request 2: cache_breakpoints=.*: must be a sequence of ints$") as error:
            served.add(tokens(2, 20, seed=2), cache_breakpoints=wrong)
        assert "\n" not in str(error.value) and len(str(error.value)) < 130
        assert list(engine.requests) == [running] and not engine.waiting_request_ids
        assert len(served.context._requests) <= 1
    served.next_id = 1
    assert served.add(tokens(2, 20, seed=2), cache_breakpoints=None) == 2  # the id can be had
    served.run()
    served.check()
    served.check_drained()


@pytest.mark.parametrize("harmless", [[], (), [0, -5, 10**12], [BLOCK, BLOCK, 1, BLOCK], range(0, 400, 10)], ids=str)
def test_breakpoints_that_mean_little_are_harmless(model, harmless):
    served = EngineHarness(model)
    assert computed(served, tokens(3, 20, seed=1), cache_breakpoints=harmless) == 3 * BLOCK + 20
    assert computed(served, tokens(3, 20, seed=1), cache_breakpoints=harmless) == 20
    served.check()
    served.check_drained()


def test_an_interval_that_is_no_multiple_of_the_block_is_refused_when_the_engine_is_built(model):
    with pytest.raises(ValueError, match=r"^retention_interval_tokens=100: must be 0 or a multiple of block_tokens=64"):
        EngineHarness(model, retention_interval_tokens=100)
    served = EngineHarness(model, retention_interval_tokens=0)
    served.send(tokens(3, 20, seed=1))
    assert kept(served) == [(3, CheckpointReason.TAIL)]
    served.check()
