"""A ``GPTModel`` with Gated DeltaNet layers on several ranks, with the cache, says what the ``HybridModel`` says on one without."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix import build_engine
from tests.engine.test_install import BLOCK, TOKENS
from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_same, described
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.selection import mostly_slow
from tests.harness.workers import gpt_model as worker
from tests.harness.workers.launch import need_ranks, run_ranks
from tests.harness.workers.qwen3_next import prompts

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module", params=mostly_slow(worker.LAYOUTS, "pp2-plain"))
def case(request, platform, tmp_path_factory):
    """The ``HybridModel`` on one rank, its answers without a cache, and each rank's findings."""
    need_ranks(2)
    hybrid = worker.hybrid_model(request.param, platform)
    served = EngineHarness(hybrid, slots=None)
    for batch in prompts():
        served.send(*batch, count=5)
    ranks = run_ranks("gpt_model.py", tmp_path_factory.mktemp("ranks") / "found.json", request.param)
    return hybrid, described(served.finished), ranks


def test_answers_are_those_of_the_hybrid_model(case):
    _, right, ranks = case
    for rank in ranks:
        assert_same(rank["answers"], right)
        assert [answer["cached_tokens"] for answer in rank["answers"]] == [0, 128, 128, 128, 128, 128, 192, 64]


def test_a_wrong_state_on_one_rank_shows(case):
    """Otherwise equal answers would not show that the states of a rank are right. (Expert-parallel ranks have requests of their own.)"""
    _, right, ranks = case
    for answer, reference in zip(ranks[-1]["damaged"], right, strict=True):
        off = max(abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True))
        assert off > 1e-3 if answer["cached_tokens"] else off <= LOG_PROB_NOISE


def test_a_script_in_megatrons_words(case):
    hybrid, _, ranks = case
    expected = TOKENS(build_engine(hybrid, block_size_tokens=BLOCK))
    for rank in ranks:
        assert rank["install"] == {"context": "HybridPrefixContext", "answers": expected, "skipped_blocks": 4}
