"""Requests through megatron's data-parallel coordinator: tenants are apart, and bad requests spoil no good one.

One engine on one rank, and a user of ``MegatronAsyncLLM``; the coordinator is a separate process, reached over ZeroMQ.

``MHP_BAD_REQUESTS`` is the number of bad ones (200 unless set).
"""

from __future__ import annotations

import pytest

from tests.harness.bad_requests import BLOCK, COUNT
from tests.harness.engine_helpers import random_tokens
from tests.harness.workers.launch import run_ranks

pytestmark = [pytest.mark.multi]

HIT = 2 * BLOCK
CACHED_TOKENS = {
    "a first": 0, "a second": HIT,
    "b first": 0,  # the same prompt
    "b second": HIT, "no salt": 0, "number as salt": 0, "a with adapter": 0, "a without reading": 0, "a as text": 0,
    "a together": HIT, "b together": HIT, "c together": 0, "a not kept": 0, "a after not kept": 0,
}  # fmt: skip
REASONS = dict.fromkeys(CACHED_TOKENS, "other_salt") | {
    **dict.fromkeys(["a first", "a as text", "a not kept", "a after not kept"], "no_such_prefix"),
    **dict.fromkeys(["a second", "b second", "a together", "b together"]),
    "a without reading": "not_read",
}
OTHER_PROMPTS = ("a as text", "a not kept", "a after not kept")


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    out = tmp_path_factory.mktemp("coordinator") / "found.json"
    return run_ranks("coordinator.py", out, COUNT, ranks=1)[0]


def test_a_salt_hits_what_it_left_and_nothing_else(behind):
    replies = behind["tenants"]
    assert {name: reply["cached_tokens"] for name, reply in replies.items()} == CACHED_TOKENS
    assert len({tuple(reply["tokens"]) for name, reply in replies.items() if name not in OTHER_PROMPTS}) == 1
    for name, reply in replies.items():
        assert reply["prompt_tokens"] == (random_tokens(HIT + 3, seed=5) if name == "a second" else None)
    reuse = {name: reply["params"].pop("cache_reuse") for name, reply in replies.items()}
    assert {name: found["reason"] for name, found in reuse.items()} == REASONS
    assert reuse["a second"] == {"reason": None} | dict.fromkeys([*reuse["a second"]][1:], HIT)
    assert replies["a with adapter"]["params"] == {"cache_salt": "a", "cache_adapter": "x"}
    assert behind["empty_forwards"] == 0, "an engine without peers"


def test_what_a_client_learns_of_keys_says_nothing_of_other_tenants(behind):
    """Keys of the same prompt differ by salt and adapter."""
    replies = behind["tenants"]
    by_tenant = [replies[name]["keys"] for name in ("a first", "b first", "no salt", "a with adapter")]
    assert replies["a second"]["keys"] == by_tenant[0] and len(by_tenant[0]) == 2
    assert len({key for keys in by_tenant for key in keys}) == 2 * len(by_tenant)


def test_every_good_request_is_answered_as_alone(behind):
    assert behind["wrong"] == []
    assert behind["refused"] == COUNT
    assert len(behind["answers"]) == behind["sent"] > COUNT // 4
    for number, answer in behind["answers"]:
        assert answer == behind["alone"][number]


def test_a_prompt_without_room_for_an_answer_fails(behind):
    fits, *others = behind["longest"]
    assert fits is None and "no room to generate" in others[0] and others[1] is not None


def test_what_is_not_finite_fails_alone(behind):
    good, bad = behind["not finite"]
    assert good is None and "not finite" in bad


def test_megatrons_own_client_has_the_routes_of_a_hit(behind):
    (routes, cached_tokens), *hits = behind["routes"]
    assert cached_tokens == 0 and len(routes) > HIT + 3 and len(routes[0]) == 2 == len(routes[0][0])
    assert hits == [[routes, HIT]] * 3


def test_megatrons_own_client_streams_and_aborts(behind):
    """Aborted requests that wait compute nothing, and a trainer finds all."""
    if "streamed" not in behind:
        pytest.skip("this megatron has no streams")
    found = behind["streamed"]
    assert found["tokens"] == found["final"][:-1] and len(found["final"]) == 12
    assert (found["waited"], found["admitted"]) == (2, 4)
    assert found["looked_up"] in (None, 7)


def test_requests_of_an_engine_that_is_reset_or_ends_get_an_answer(behind):
    """Megatron's coordinator and client leave them waiting; so would a later request."""
    for case, count, why in (
        ("reset", 6, "the engine was reset"),
        ("failed", 6, "replica 0 ended"),
        ("after", 1, "no replica is left"),
    ):
        assert len(behind[case]) == count
        assert all(reason is not None and reason.endswith(why) for reason in behind[case])
