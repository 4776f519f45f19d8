"""Edge cases found in reviews. Each one used to raise, hang or lose something."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engine_helpers import greedy
from tests.harness.lifecycle_helpers import MANY, MODES, EngineHarness, tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_chunked_prefill_is_aborted_after_the_engine_was_idle(tiny, mode):
    served = EngineHarness(tiny, slots=8, async_sched_mode=mode, enable_chunked_prefill=True, max_tokens=128)
    served.send(tokens(1, 3, seed=1))
    aborted = served.add(tokens(5, 3, seed=2))
    served.step(2)
    assert served.engine.abort_request(aborted)
    served.run()
    served.check_drained()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new_tokens", [12, 40])
def test_a_chunked_prefill_waits_for_blocks_that_decodes_took(tiny, mode, new_tokens):
    served = EngineHarness(tiny, blocks=9, async_sched_mode=mode, enable_chunked_prefill=True, max_tokens=256)
    served.add(tokens(2, 61, seed=1), new_tokens)
    served.step(3)
    served.add(tokens(6, -1, seed=2))
    served.run()
    served.check()
    served.check_drained()


@pytest.mark.parametrize("slots", [None, MANY])
def test_what_can_never_be_active_is_refused(tiny, slots):
    """The request needs more blocks than the active ones, but not more than all. Megatron would pause it forever, and
    assert.
    """
    served = EngineHarness(tiny, slots=slots, blocks=7, paused_blocks=3)
    if slots is None:
        from megatron_hybrid_prefix.mcore.runner import run_batch

        (result,) = run_batch(served.engine, [tokens(4, 10, seed=1)], greedy(70))
        assert result.status == "failed" and "there are 4" in result.error
        return
    served.add(tokens(4, 10, seed=1), 70)
    (record,) = served.engine.step_modern()["finished_request_records"]
    assert record.requests[-1].failed()
    served.send(tokens(2, 3, seed=2))
    served.check_drained()


def test_a_chunk_longer_than_the_prompt_takes_nothing(tiny):
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    served = EngineHarness(tiny, slots=8)
    running = served.add(tokens(0, 60, seed=1), 30)
    served.step(2)
    wrong = DynamicInferenceRequest(
        request_id=99, prompt_tokens=torch.tensor(tokens(0, 30, seed=5)), sampling_params=greedy(4)
    )
    before = served.cache.blocks.available_count
    with pytest.raises(ValueError, match="request 99: a chunk of 31 of 30 prompt tokens"):
        served.context.add_request(wrong, 31)
    assert served.cache.blocks.available_count == before
    served.run()
    served.check(running)
    served.check_drained()


def test_a_chunk_that_runs_in_the_last_row_is_left_alone(tiny):
    served = EngineHarness(tiny, async_sched_mode="async", max_requests=2, max_tokens=128, enable_chunked_prefill=True)
    served.add(tokens(0, 20, seed=1), 12)
    served.step(2)
    chunked = served.add(tokens(4, 20, seed=2))
    served.step(1)
    assert served.context.get_index_of_chunked_prefill_request() != -1
    assert not served.context.remove_waiting_row(chunked)
    served.run()
    served.check()
    served.check_drained()


def test_a_caller_may_write_to_its_prompt_after_adding_it(tiny):
    """Keys are made at arrival and tokens are read at admission; both must see the prompt as it was added."""
    served = EngineHarness(tiny)
    first, second = tokens(2, 9, seed=71), tokens(2, 9, seed=72)
    prompt = torch.tensor(first)
    served.add(prompt)
    prompt.copy_(torch.tensor(second))
    served.run()
    assert [int(token) for token in served.finished[1].prompt_tokens] == first
    served.send(first)
    served.check()
