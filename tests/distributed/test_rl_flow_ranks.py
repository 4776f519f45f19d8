"""tests/engine/test_rl_flow.py with tensor parallelism; one flow through megatron's coordinator, as NeMo-RL's worker runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.engine_helpers import assert_matches
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.named_models import named
from tests.harness.refits import WAYS
from tests.harness.rl import computed_once, prompts_of_a_round
from tests.harness.workers.launch import run_ranks
from tests.harness.workers.rl_flow import COORDINATED, DIRECT

pytestmark = pytest.mark.multi
FLOWS = COORDINATED | DIRECT


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("rl_flow.py", tmp_path_factory.mktemp("ranks") / "found.json", 2)


@pytest.mark.parametrize("name", FLOWS)
def test_each_round_is_of_its_weights_and_computes_the_shared_prompt_once(ranks, name, platform):
    first, second = (rank[name] for rank in ranks)
    assert [each["computed"] for each in first] == [each["computed"] for each in second] == [computed_once()] * 3
    assert name in COORDINATED or first == second
    model, *trained = [build_hybrid_model(named(name), seed=seed, platform=platform) for seed in (5, 6, 7)]
    for found, way, new in zip(first, (*FLOWS[name], None), (*trained, None), strict=True):
        reference = NaiveHybridModel(model, model.hybrid_config)
        for prompt, answer in zip(prompts_of_a_round(), found["answers"], strict=True):
            request = SimpleNamespace(
                prompt_tokens=prompt, generated_tokens=answer["tokens"], generated_log_probs=answer["log_probs"]
            )
            assert_matches(reference, request, sampled=True)
        if way is not None:
            WAYS[way](model, new)
