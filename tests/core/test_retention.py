"""Breakpoint and interval checkpoints, and which states may be evicted for them."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from tests.core.model import ModelEngine
from tests.core.test_cache import BLOCK, engine, run, states, tokens

INTERVAL, TAIL = CheckpointReason.INTERVAL, CheckpointReason.TAIL


def guessing(**options) -> ModelEngine:
    """An engine that keeps the state after every block of a prompt, if there is room."""
    return engine(retention_interval_tokens=BLOCK, **options)


def resume(model: ModelEngine, prompt: list[int]) -> int:
    """Depth in blocks at which a prompt would resume."""
    return model.cache.match(model.cache.chain(prompt)).resume_tokens // BLOCK


def test_a_named_prefix_is_resumed_the_second_time_it_is_seen():
    model = engine()
    run(model, tokens(1, 2, 3, 4, rest=1), breakpoints=[2 * BLOCK + 1])
    assert states(model) == {2: [CheckpointReason.BREAKPOINT], 4: [TAIL]}
    assert run(model, tokens(1, 2, 8, 9, rest=1)).admission.resume_tokens == 2 * BLOCK


def test_an_unnamed_prefix_is_resumed_at_an_interval_the_second_time_and_at_its_end_the_third():
    model = engine(retention_interval_tokens=2 * BLOCK)
    run(model, tokens(1, 2, 3, 4, 5, rest=1))
    assert states(model) == {2: [INTERVAL], 4: [INTERVAL], 5: [TAIL]}
    second = run(model, tokens(1, 2, 3, 8, rest=1))
    assert (second.admission.resume_tokens, second.admission.lost_tokens_no_state) == (2 * BLOCK, BLOCK)
    assert run(model, tokens(1, 2, 3, 9, rest=1)).admission.resume_tokens == 3 * BLOCK
    assert sorted(states(model)[2]) == [INTERVAL], "still why it was kept"


@pytest.mark.parametrize(
    ("blocks", "near_the_end"),
    [
        (1, ()),
        (5, (4, 3, 2, 1)),
        (16, (15, 14, 13, 12, 10, 8, 4)),
        (17, (16, 15, 14, 13, 11, 9, 5, 1)),
        (40, (39, 38, 37, 36, 34, 32, 28, 24, 16, 8)),
    ],
)
def test_by_default_a_prompt_keeps_16_of_them_and_some_near_its_end(blocks, near_the_end):
    model = engine(retention_interval_tokens=None, kv_blocks=100)
    run(model, tokens(*range(blocks), rest=1))
    every = -(-(blocks * BLOCK + 1) // (16 * BLOCK))
    assert sorted(states(model)) == sorted({*range(every, blocks + 1, every), *near_the_end, blocks})


def test_no_intervals():
    model = engine(retention_interval_tokens=0)
    run(model, tokens(*range(40), rest=1))
    assert sorted(states(model)) == [40]


@pytest.mark.parametrize("interval", [-BLOCK, -1, 1, BLOCK + 1])
def test_an_interval_that_is_no_multiple_of_the_block_is_refused(interval):
    with pytest.raises(
        ValueError, match=rf"^retention_interval_tokens={interval}: must be 0 or a multiple of block_tokens=4"
    ):
        HybridPrefixCache(
            CacheSettings(block_tokens=BLOCK, kv_blocks=9, state_slots=1, retention_interval_tokens=interval)
        )


def test_interval_states_only_get_free_slots():
    model = guessing(state_slots=3)
    run(model, tokens(1, 2, 3, 4, 5, rest=1))
    assert states(model) == {1: [INTERVAL], 2: [INTERVAL], 5: [TAIL]}
    assert model.cache.stats().checkpoints_skipped == 0, "nobody asked for them"
    assert model.cache.stats().checkpoints_by_reason["interval"] == 2


def test_interval_states_evict_no_requested_or_used_state():
    model = guessing(state_slots=4)
    for number in range(4):
        run(model, tokens(number, rest=1))  # four tails, never used
    run(model, tokens(7, 8, 9, rest=1), breakpoints=[BLOCK])  # takes two of them, for its tail and its breakpoint
    assert sorted(states(model)) == [1, 3] and len(states(model)[1]) == 3
    assert model.cache.stats().checkpoints_by_reason["interval"] == 0
    assert model.cache.stats().evictions == 2


def test_probationary_states_go_first_and_the_oldest_of_them():
    model = guessing(state_slots=5)
    run(model, tokens(1, 2, rest=1))  # a guess at 1, a tail at 2
    run(model, tokens(3, 4, rest=1))  # likewise
    run(model, tokens(5, rest=1))
    run(model, tokens(6, rest=1))
    assert (resume(model, tokens(1, 9)), resume(model, tokens(3, 9))) == (0, 1)
    run(model, tokens(7, rest=1))
    assert (resume(model, tokens(1, 9)), resume(model, tokens(3, 9))) == (0, 0)
    assert (resume(model, tokens(1, 2, 9)), resume(model, tokens(3, 4, 9))) == (2, 2)
    run(model, tokens(8, rest=1))
    assert resume(model, tokens(1, 2, 9)) == 0, "now the oldest of the others"


def test_a_used_guess_is_an_ordinary_state():
    model = guessing(state_slots=3)
    run(model, tokens(1, 2, 3, rest=1))
    assert states(model) == {1: [INTERVAL], 2: [INTERVAL], 3: [TAIL]}
    run(model, tokens(1, 9), write=False)  # resumes from the first
    run(model, tokens(5, rest=1))  # takes the second
    assert (resume(model, tokens(1, 9)), resume(model, tokens(1, 2, 9))) == (1, 1)
    run(model, tokens(6, rest=1))  # the tail was used, or published, longest ago
    assert (resume(model, tokens(1, 9)), resume(model, tokens(1, 2, 3, 9))) == (1, 1)
    run(model, tokens(7, 8, rest=1))  # and a guess does not get the place of any
    assert sorted(states(model)) == [1, 2] and resume(model, tokens(7, 9)) == 0


def test_a_guess_takes_the_place_of_an_older_one():
    model = guessing(state_slots=4)
    run(model, tokens(1, 2, 3, rest=1))  # guesses at 1 and 2
    run(model, tokens(5, 6, 7, rest=1))  # the tail in the free slot, guesses in those of the first prompt
    assert [resume(model, tokens(*prefix, 9)) for prefix in ((1,), (1, 2), (5,), (5, 6))] == [0, 0, 1, 2]
    assert resume(model, tokens(1, 2, 3, 9)) == 3


@pytest.mark.parametrize("chunk", [3, BLOCK, 2 * BLOCK, 100])
def test_a_prompt_does_not_evict_its_own_interval_states(chunk):
    model = guessing(state_slots=3)
    run(model, tokens(*range(10, 18), rest=1), chunk=chunk)
    assert sorted(states(model)) == ([1, 2, 8] if chunk == 100 else [2, 3, 8])
    assert model.cache.stats().evictions == (0 if chunk == 100 else 1), "only for its tail"


def test_an_interval_state_becomes_the_tail_of_another_prompt():
    model = guessing(state_slots=3)
    run(model, tokens(1, 2, 3, rest=1))
    second = run(model, tokens(1, 2))  # resumes at 1; its tail is kept already
    assert second.admission.resume_tokens == BLOCK
    assert states(model) == {1: [INTERVAL], 2: [CheckpointReason.JUNCTION], 3: [TAIL]}
    assert model.cache.stats().checkpoints_by_reason["interval"] == 2
    run(model, tokens(5, rest=1))  # nothing is probationary
    assert (
        states(model)[1] == [INTERVAL, TAIL]
        and states(model)[2] == [CheckpointReason.JUNCTION]
        and 3 not in states(model)
    )


def test_guesses_are_not_made_twice_in_one_step():
    model = guessing()
    one, other = model.admit(tokens(1, 2, 3, rest=1)), model.admit(tokens(1, 2, 4, rest=1))
    plans = [model.plan(one, 100), model.plan(other, 100)]
    assert [[c.position_tokens for c in plan.checkpoints] for plan in plans] == [[4, 8, 12], [12]]


def test_guesses_of_old_weights_are_forgotten_with_the_rest():
    model = guessing(state_slots=2)
    run(model, tokens(1, 2, rest=1))
    model.cache.invalidate()
    model.check()
    assert states(model) == {} and model.cache.stats().slots_used == 0
    run(model, tokens(1, 2, rest=1))
    assert states(model) == {1: [INTERVAL], 2: [TAIL]}
    model.reset()
    run(model, tokens(1, 2, rest=1))
    assert states(model) == {1: [INTERVAL], 2: [TAIL]}
