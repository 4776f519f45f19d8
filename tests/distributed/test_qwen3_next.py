"""``tiny-qwen3-next`` over two ranks, with the cache on, says what a float64 recompute says; its weights are the same.

So a rank has the right part of queries, output gates, keys and values also where two ranks share a key/value head.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

from megatron_hybrid_prefix.models import save_checkpoint
from tests.harness.engine_helpers import assert_matches
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.workers import qwen3_next as worker
from tests.harness.workers.launch import run_ranks

pytestmark = pytest.mark.multi


def by_layout(name):
    """A parameter; only tensor parallelism is in the default run."""
    return pytest.param(name, marks=() if name == "tp2" else pytest.mark.slow)


@pytest.fixture(scope="module")
def model_of(platform):
    return cache(lambda name: worker.build(name, platform))


@pytest.fixture(scope="module", params=[by_layout(name) for name in worker.LAYOUTS])
def layout(request, model_of, tmp_path_factory):
    """One rank's model, and the findings of two."""
    folder, model = tmp_path_factory.mktemp("ranks"), model_of(request.param)
    save_checkpoint(model, folder / "checkpoint")
    return model, run_ranks("qwen3_next.py", folder / "found.json", request.param, folder / "checkpoint")


def compare(model, answers):
    """For each answer, whether it is wrong."""
    reference = NaiveHybridModel(model, model.hybrid_config)
    sent = [prompt for batch in worker.prompts() for prompt in batch]
    assert len(answers) == len(sent)
    wrong = []
    for prompt, answer in zip(sent, answers, strict=True):
        request = SimpleNamespace(
            prompt_tokens=prompt, generated_tokens=answer["tokens"], generated_log_probs=answer["log_probs"]
        )
        try:
            assert_matches(reference, request)
        except AssertionError:
            wrong.append(True)
        else:
            wrong.append(False)
    return wrong


def test_every_rank_says_what_the_reference_says(layout):
    model, ranks = layout
    for rank in ranks:
        cached = [answer["cached_tokens"] // worker.BLOCK_TOKENS for answer in rank["answers"]]
        assert cached == [0, 2, 2, 2, 2, 2, 3, 1], "every prompt but the first resumes where it can"
        assert not any(compare(model, rank["answers"]))


def test_wrong_states_on_one_rank_show(layout):
    model, ranks = layout
    resumed = [answer["cached_tokens"] > 0 for answer in ranks[-1]["damaged"]]
    assert any(resumed) and compare(model, ranks[-1]["damaged"]) == resumed


def test_weights_are_those_of_one_rank(layout):
    """What one rank saved, each rank loads, and draws itself."""
    assert [rank["unequal"] for rank in layout[1]] == [[], []]
