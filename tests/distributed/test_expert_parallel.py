"""Experts on two ranks, each with different requests. With the cache on, both give the answers of one rank without it."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.workers import expert_parallel as worker
from tests.harness.workers.launch import run_ranks


@pytest.fixture(scope="module")
def tiny_moe(platform):
    return build_hybrid_model("tiny-moe", seed=0, platform=platform)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Findings of each rank."""
    return run_ranks("expert_parallel.py", tmp_path_factory.mktemp("ranks") / "found.json")


def test_one_rank_says_what_the_reference_says(tiny_moe):
    served = EngineHarness(tiny_moe)
    shared = tokens(2, 0, seed=1)
    served.send([*shared, 1, 2])
    assert served.send([*shared, 3], [*shared, 4, 5, 6]).num_cached_tokens == len(shared)
    served.check()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("mode", worker.MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_say_what_one_says_without_a_cache(tiny_moe, ranks, rank, mode):
    found, right = ranks[rank][mode], worker.answers(tiny_moe, rank, mode, None)
    assert ranks[rank]["local_experts"] == 2  # one of two in each of two layers; both ranks name theirs alike
    assert [answer["tokens"] for answer in found["answers"]] == [answer["tokens"] for answer in right["answers"]]
    for answer, reference in zip(found["answers"], right["answers"], strict=True):
        assert answer["log_probs"] == pytest.approx(reference["log_probs"], rel=0, abs=LOG_PROB_NOISE)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("mode", worker.MODES)
def test_each_rank_reuses_its_own_prefix_also_after_it_was_idle(ranks, mode):
    shared = 3 * worker.BLOCK_TOKENS
    for rank, found in enumerate(ranks):
        cached = [answer["cached_tokens"] for answer in found[mode]["answers"]]
        if rank == 0:  # the last three came at once: two waited for the first, while rank 1 was idle
            assert cached[-3:] == [0, 5 * worker.BLOCK_TOKENS, 5 * worker.BLOCK_TOKENS]
            del cached[-3:]
        assert cached[0] == 0 and min(cached[1:]) >= shared, (rank, cached)
    assert ranks[0][mode]["idle_forwards"] == 0
    assert ranks[1][mode]["idle_forwards"] > 10
