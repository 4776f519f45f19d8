"""Conversations: the next turn does not recompute what a request generated."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import assert_matches, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, known_answer, tokens
from tests.harness.mutants import MUTANTS, mutated_resume
from tests.harness.selection import mostly_slow

LAST = 4  # tokens of an answer that nothing goes on from
SHORT = 32  # tokens of a block where answers pass many
each_mode = pytest.mark.parametrize("mode", mostly_slow(MODES, "legacy"))


class Chat:
    """One conversation on one engine.

    Args:
        served: The engine.
        drafts: Number of right drafts per forward, by request id and position, if the engine uses drafts.
    """

    def __init__(self, served: EngineHarness, drafts=None) -> None:
        self.served = served
        self.drafts = drafts
        self.plain = EngineHarness(served.model, slots=None, max_sequence_length=4096) if drafts else None
        self.history: list[int] = []
        self.computed: list[int] = []

    def turn(self, own: list[int], count: int):
        """Sends ``own`` new tokens, and generates ``count``. Returns the request."""
        served = self.served
        self.history += own
        truth = {}
        before = served.context.prefix_stats().computed_prompt_tokens
        if self.plain is not None:
            truth[served.next_id + 1] = self.history + known_answer(self.plain, self.history, count)
        with forced_drafts(served.engine, truth, self.drafts) if self.drafts else nullcontext():
            request = served.send(self.history, count=count)
        self.computed.append(served.context.prefix_stats().computed_prompt_tokens - before)
        self.history = self.history + list(request.generated_tokens)
        return request


def decoded_states(served) -> int:
    """Kept states that were reached in decode."""
    return sum(
        node.reason == CheckpointReason.DECODE for node in [node for node in served.cache.nodes() if node.slot >= 0]
    )


@pytest.mark.slow
@each_mode
def test_turns_of_300_generated_and_50_new_tokens(model, mode):
    served = EngineHarness(model, block_size_tokens=128, async_sched_mode=mode)
    chat = Chat(served)
    # After each answer comes a turn; the last answer is short, because no turn follows it.
    for number, count in enumerate((300, 300, LAST) if mode == "legacy" else (300, LAST)):
        chat.turn(random_tokens(50, seed=number), count)
    assert max(chat.computed) <= 50 + 128, chat.computed
    served.check()
    served.check_drained()


@pytest.mark.parametrize("model_name", mostly_slow(["tiny_gdn", "tiny_mixed"], "tiny_gdn"))
def test_answers_of_gated_delta_net(request, model_name):
    served = EngineHarness(request.getfixturevalue(model_name), async_sched_mode="async")
    chat = Chat(served)
    for number, (own, count) in enumerate(((BLOCK, BLOCK + 1), (1, BLOCK + 1), (BLOCK - 1, LAST))):
        chat.turn(random_tokens(own, seed=number), count)
        assert chat.computed[-1] <= own + BLOCK
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] >= 2
    served.check()


ENDS = [("legacy", count) for count in (SHORT - 1, SHORT, SHORT + 1, 2 * SHORT + 7)]
ENDS += [("async", count) for count in (SHORT, 2 * SHORT + 7)]


@pytest.mark.parametrize("case", mostly_slow(ENDS, ("legacy", SHORT)), ids=lambda case: f"{case[0]}-{case[1]}")
def test_answers_that_end_around_a_blocks_end(model, case):
    mode, count = case
    served = EngineHarness(model, async_sched_mode=mode, block_size_tokens=SHORT)
    chat = Chat(served)
    for number, own in enumerate((SHORT, 1, 3, SHORT - 1, 17)):
        chat.turn(random_tokens(own, seed=number), count if number < 4 else LAST)
        # All but the new tokens, the last token of the answer, and what is behind the last block's end.
        assert chat.computed[-1] <= own + SHORT
    served.check()


# One draft is right in most forwards of "mixed", too.
@each_mode
@pytest.mark.parametrize("case", mostly_slow(["all-3", "mixed-3", "mixed-1"], "mixed-3"))
def test_drafts_that_pass_a_blocks_end(tiny_mtp, mode, case):
    accepted, drafts = case.split("-")[0], int(case[-1])
    served = EngineHarness(tiny_mtp, async_sched_mode=mode, num_speculative_tokens=drafts, block_size_tokens=SHORT)
    right = {"all": lambda request_id, position: 3, "mixed": lambda request_id, position: (request_id + position) % 4}
    chat = Chat(served, right[accepted])
    for number in range(4):
        chat.turn(random_tokens(9 + number, seed=number), 2 * SHORT + number if number < 3 else LAST)
        assert chat.computed[-1] <= 9 + number + SHORT
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] >= 6
    served.check()
    served.check_drained()


@each_mode
@pytest.mark.parametrize("drafts", mostly_slow([0, 2], 0))
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_state_of_an_answer_shows(tiny_mtp, mode, drafts, mutant):
    check_wrong_state(tiny_mtp, mode, drafts, mutant)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, "ssm_zeroed"))
def test_a_wrong_state_of_an_answer_of_gated_delta_net_shows(tiny_gdn_mtp, drafts, mutant):
    check_wrong_state(tiny_gdn_mtp, "async", drafts, mutant)


def check_wrong_state(model, mode, drafts, mutant):
    served = EngineHarness(model, async_sched_mode=mode, num_speculative_tokens=drafts)
    served.send(tokens(9, 1, seed=999))  # a state of another depth, for the mutant
    chat = Chat(served, (lambda request_id, position: position % 3) if drafts else None)
    chat.turn(tokens(0, 20, seed=1), BLOCK)
    with mutated_resume(served.engine, mutant):
        request = chat.turn(random_tokens(5, seed=2), 4)
    assert request.num_cached_tokens == BLOCK
    with pytest.raises(AssertionError):
        assert_matches(served.reference, request)


@pytest.mark.slow
@each_mode
def test_the_two_latest_states_of_an_answer_are_kept_and_one_that_was_used(model, mode):
    served, prompt = EngineHarness(model, async_sched_mode=mode, block_size_tokens=SHORT), tokens(0, 30, seed=1)
    answer = prompt + known_answer(EngineHarness(model, slots=None), prompt, 5 * SHORT)
    served.add(prompt, 5 * SHORT)
    other, most = None, 0
    while served.engine.has_unfinished_requests():
        served.step()
        most = max(most, decoded_states(served))
        if other is None and decoded_states(served) == 2:
            # Another request goes on from the second block's end while the answer is still generated: that state stays.
            other = served.add(answer[: 2 * SHORT + 1], LAST)
    assert served.finished[other].num_cached_tokens == 2 * SHORT and most == 3
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] == 5
    assert sorted(node.depth_blocks for node in [node for node in served.cache.nodes() if node.slot >= 0]) == [2, 4, 5]
    served.check()


@each_mode
def test_the_switch(model, mode):
    # With a host tier decodes are followed all the same, for preempted requests.
    host_gb = 0.01 if mode == "async" else 0.0
    served = EngineHarness(model, async_sched_mode=mode, decode_checkpoints=False, host_gb=host_gb)
    chat = Chat(served)
    chat.turn(tokens(0, 30, seed=1), BLOCK + 40)
    chat.turn(tokens(0, 5, seed=2), 2)
    assert chat.computed[-1] == len(chat.history) - 2
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] == 0
    served.check()


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("slots", [1, 2])
def test_few_slots(model, mode, slots):
    """Concurrent answers evict each other's states. Nothing else happens."""
    served = EngineHarness(model, async_sched_mode=mode, slots=slots)
    for number in range(4):
        served.add(tokens(0, 30 + 7 * number, seed=number), 2 * BLOCK)
    served.run()
    stats = served.context.prefix_stats()
    assert stats.evictions > 0 and stats.slots_used <= slots
    served.check()
    served.check_drained()


@each_mode
def test_what_must_not_be_kept(model, mode):
    served = EngineHarness(model, async_sched_mode=mode)
    served.send(tokens(0, 30, seed=1), count=BLOCK + 40, cache_write=False)
    assert not len(served.cache._keys._recent), "token ids of its blocks"
    number = served.add(tokens(0, 30, seed=2), BLOCK + 40)
    served.step(5)
    served.engine.invalidate()
    served.run()
    assert number in served.finished
    assert served.kept_states == 0
    served.check_drained()
