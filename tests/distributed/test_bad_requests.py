"""Bad requests among good ones behind a coordinator: every good one answers as alone.

``MHP_BAD_REQUESTS`` is the number of bad ones (200 unless set).
"""

from __future__ import annotations

import pytest

from tests.harness.bad_requests import COUNT
from tests.harness.workers.launch import run_ranks

pytestmark = [pytest.mark.multi]


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """What a user of ``MegatronAsyncLLM`` gets."""
    out = tmp_path_factory.mktemp("coordinator") / "found.json"
    return run_ranks("bad_requests.py", out, COUNT, ranks=1)[0]


def test_behind_a_coordinator(behind):
    assert behind["wrong"] == []
    assert behind["refused"] == COUNT
    assert len(behind["answers"]) == behind["sent"] > COUNT // 4
    for number, answer in behind["answers"]:
        assert answer == behind["alone"][number]


def test_requests_of_an_engine_that_is_reset_or_ends_get_an_answer(behind):
    """Megatron's coordinator and client leave them waiting; so would a later request."""
    for case, count, why in (
        ("reset", 6, "the engine was reset"),
        ("failed", 6, "replica 0 ended"),
        ("after", 1, "no replica is left"),
    ):
        assert len(behind[case]) == count
        assert all(reason is not None and reason.endswith(why) for reason in behind[case])
