"""Defects of megatron-core's engine that one request turns on all others. See ``test_upstream_defects.py``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.bad_requests import BAD, params
from tests.harness.defect_helpers import defect, make_side
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

PROMPT = random_tokens(40, seed=1)


class Stopped(Exception):
    """A step raised, or did not finish a request. Not an AssertionError, so that other failures cannot count as the defect."""


@pytest.fixture
def side(request, tiny):
    yield from make_side(request, tiny)


def run(engine: Any, *request_ids: int) -> list[Any]:
    """Steps to the end. Returns the requests with these ids."""
    finished: dict[int, Any] = {}
    try:
        run_to_end(engine, finished, steps=100)
        return [finished[request_id] for request_id in request_ids]
    except Exception as error:
        raise Stopped(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    "name",
    [
        "prompt: no tokens", "prompt: a token above the vocabulary", "prompt: a negative token", "top_k=512",
        "top_p=1.1", "temperature=nan", "top_n_logprobs=513", "top_k with top_p",
    ],
)  # fmt: skip
@defect(37, raises=Stopped)
def test_37_a_bad_request_stops_nobody(side, name):
    engine = side.build()
    side.add(engine, PROMPT)
    if name == "top_k with top_p":
        engine.add_request(99, PROMPT, params({"top_k": 9, "top_p": 0.5}))  # it is not even bad
        assert len(run(engine, 1, 99)[1].generated_tokens) == 4
        return
    asked = BAD[name]
    fields = {"top_k": 0} | asked.fields if "temperature" in asked.fields else asked.fields
    try:
        engine.add_request(99, asked.prompt, params(fields))
    except ValueError:
        assert side.ours
    side.check(*run(engine, 1))
    side.check_drained(engine)


@defect(38, raises=Stopped)
def test_38_an_id_in_use(side):
    engine = side.build()
    first = side.add(engine, PROMPT)
    try:
        engine.add_request(first, PROMPT[::-1], greedy(9))
    except ValueError:
        assert side.ours
    side.check(*run(engine, first))
    side.check_drained(engine)


@defect(38, raises=Stopped)
def test_38_generate_beside_a_request(side):
    engine = side.build()
    engine.add_request(0, PROMPT, greedy(4))
    try:
        (record,) = engine.generate([PROMPT[::-1]], greedy(4))
    except Exception as error:
        raise Stopped(f"{type(error).__name__}: {error}") from error
    side.check(record.merge())


@defect(39)
def test_39_reset_resolves_futures(side):
    engine = side.build()
    future = engine.add_request(0, PROMPT, greedy(4))
    engine.reset()
    assert future.done()


@defect(40, raises=Stopped)
def test_40_a_cancelled_future(side):
    engine = side.build()
    engine.add_request(0, PROMPT, greedy(4)).cancel()
    second = side.add(engine, PROMPT, count=6)
    side.check(*run(engine, second))
