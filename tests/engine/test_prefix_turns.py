"""Conversations: the next turn does not recompute what a request generated."""

from __future__ import annotations

import pytest

from tests.harness.drafts import Drafting
from tests.harness.engine_helpers import assert_matches, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.mutants import MUTANTS, mutated_resume
from tests.harness.selection import mostly_slow

LAST = 4  # tokens of an answer that nothing goes on from
SHORT = 32  # tokens of a block where answers pass many


class Chat:
    """One conversation on one engine."""

    def __init__(self, served: EngineHarness) -> None:
        self.served = served
        self.history: list[int] = []
        self.computed: list[int] = []

    def turn(self, own: list[int], count: int):
        """Sends ``own`` new tokens, and generates ``count``. Returns the request."""
        served = self.served
        self.history += own
        before = served.context.prefix_stats().computed_prompt_tokens
        number = (served.ask if isinstance(served, Drafting) else served.add)(self.history, count)
        served.run()
        request = served.finished[number]
        self.computed.append(served.context.prefix_stats().computed_prompt_tokens - before)
        self.history = self.history + list(request.generated_tokens)
        return request


ENDS = [("legacy", SHORT - 1), ("legacy", SHORT), ("async", SHORT), ("async", SHORT + 1), ("legacy", 2 * SHORT + 7)]


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


@pytest.mark.parametrize("drafts", mostly_slow([0, 2], 0))
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_state_of_an_answer_shows(tiny_mtp, drafts, mutant):
    check_wrong_state(tiny_mtp, "legacy", drafts, mutant)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, "ssm_zeroed"))
def test_a_wrong_state_of_an_answer_of_gated_delta_net_shows(tiny_gdn_mtp, drafts, mutant):
    check_wrong_state(tiny_gdn_mtp, "async", drafts, mutant)


def check_wrong_state(model, mode, drafts, mutant):
    served = Drafting(model, drafts, lambda request_id, position: position % 3, async_sched_mode=mode)
    served.ask(tokens(9, 1, seed=999), 1)  # a state of another depth, for the mutant
    served.run()
    chat = Chat(served)
    chat.turn(tokens(0, 20, seed=1), BLOCK)
    with mutated_resume(served.engine, mutant):
        request = chat.turn(random_tokens(5, seed=2), 4)
    assert request.num_cached_tokens == BLOCK
    with pytest.raises(AssertionError):
        assert_matches(served.reference, request)


@pytest.mark.parametrize("host_gb", [0.0, 0.01])
def test_the_switch(model, host_gb):
    """With a host tier decodes are followed all the same, for preempted requests."""
    served = EngineHarness(model, decode_checkpoints=False, host_gb=host_gb)
    chat = Chat(served)
    chat.turn(tokens(0, 30, seed=1), BLOCK + 40)
    chat.turn(tokens(0, 5, seed=2), 2)
    assert chat.computed[-1] == len(chat.history) - 2
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] == 0
    served.check()


def test_what_must_not_be_kept(model):
    served = EngineHarness(model)
    served.send(tokens(0, 30, seed=1), count=BLOCK + 40, cache_write=False)
    assert not len(served.cache._keys._recent), "token ids of its blocks"
    number = served.add(tokens(0, 30, seed=2), BLOCK + 40)
    served.step(5)
    served.engine.invalidate()
    served.run()
    assert number in served.finished
    assert served.kept_states == 0
    served.check_drained()
