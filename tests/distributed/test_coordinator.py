"""Requests through megatron's data-parallel coordinator: salts separate tenants, and replies are complete.

One engine on one rank. The coordinator is a separate process, reached over ZeroMQ. (On two tensor-parallel ranks of a
busy machine, megatron 0.19's engine sometimes hangs behind its coordinator, also with caching off.)
"""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix import build_engine
from tests.harness.engine_helpers import LOG_PROB_NOISE, greedy, random_tokens, run_to_end
from tests.harness.workers import coordinator as worker
from tests.harness.workers.launch import run_ranks

pytestmark = [pytest.mark.multi, pytest.mark.slow]

HIT = 2 * worker.BLOCK_TOKENS
CACHED_TOKENS = {
    "a first": 0,
    "a second": HIT,
    "b first": 0,  # the same prompt
    "b second": HIT,
    "no salt": 0,
    "number as salt": 0,
    "a with adapter": 0,
    "a without reading": 0,
    "a as text": 0,
    "a together 0": HIT,
    "b together 1": HIT,
    "a together 2": HIT,
    "c together 3": 0,
    "a not kept": 0,
    "a after not kept": 0,
    "too long": 0,
    "a with new weights": 0,
    "a with new weights again": HIT,
    "a after a pause": 0,
}
OTHER_ANSWERS = (
    "a as text",
    "a not kept",
    "a after not kept",
    "too long",
    "a after a pause",
)  # other prompts or weights


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks("coordinator.py", tmp_path_factory.mktemp("coordinator") / "found.json", ranks=1)


@pytest.fixture(scope="module")
def replies(found):
    return found["replies"]


def test_a_salt_hits_what_it_left_and_nothing_else(replies):
    assert {name: reply["cached_tokens"] for name, reply in replies.items()} == CACHED_TOKENS


def test_answers_are_those_without_a_cache(replies, tiny):
    engine, finished = build_engine(tiny, max_sequence_length=512), {}
    engine.add_request(0, random_tokens(HIT + 3, seed=5), greedy(worker.NEW_TOKENS))
    run_to_end(engine, finished)
    for name, reply in replies.items():
        if name not in OTHER_ANSWERS:
            assert reply["tokens"] == finished[0].generated_tokens
            assert reply["log_probs"] == pytest.approx(finished[0].generated_log_probs, rel=0, abs=LOG_PROB_NOISE)


def test_replies_deserialise(replies):
    for name, reply in replies.items():
        assert reply["type"] == "DynamicInferenceRequest"
        assert reply["status"] == ("FAILED" if name == "too long" else "COMPLETED")
        assert reply["events"][-1] == ("FAIL" if name == "too long" else "FINISH")
        assert len(reply["tokens"]) == (0 if name == "too long" else worker.NEW_TOKENS)
        assert reply["prompt_length"] == (HIT + 3) * (4 if name == "too long" else 1)
        assert (reply["prompt_tokens"] is not None) == reply["carries_prompt"] == (name == "a second")
    assert replies["a second"]["prompt_tokens"] == random_tokens(HIT + 3, seed=5)
    assert replies["a with adapter"]["params"] == {"cache_salt": "a", "cache_adapter": "x"}
    assert replies["number as salt"]["params"] == {"cache_salt": 7}


def test_what_a_client_learns_of_keys_says_nothing_of_other_tenants(replies):
    """Keys of the same prompt differ by salt, adapter and weights."""
    by_tenant = [replies[name]["keys"] for name in ("a first", "b first", "no salt", "a with adapter")]
    by_tenant.append(replies["a with new weights"]["keys"])
    assert replies["a second"]["keys"] == by_tenant[0] and len(by_tenant[0]) == 2
    assert len({key for keys in by_tenant for key in keys}) == 2 * len(by_tenant)


def test_an_engine_without_peers_runs_no_empty_forwards(found):
    assert found["empty_forwards"] == 0


def test_the_engine_counted_the_same(found):
    assert found["stats"]["reused_tokens"] == sum(CACHED_TOKENS.values())
    assert found["stats"]["fallbacks"] == {}
