"""What an RL trainer does, call by call: groups of samples, aborts, a suspension, new weights, and the next round.

Each round's log-probs are compared with a float64 recompute with that round's weights. The shared prompt is computed once a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.inference.config import KVCacheManagementMode

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.engine_helpers import assert_matches
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.named_models import named
from tests.harness.refits import WAYS
from tests.harness.rl import SAMPLES, Rollouts, computed_once, prompts_of_a_round, rl_engine
from tests.harness.selection import mostly_slow_rows

KEEPS = HybridPrefixConfig(keep_on_resume=True)
OFFLOAD, RECOMPUTE = (
    {"kv_cache_management_mode": mode} for mode in (KVCacheManagementMode.OFFLOAD, KVCacheManagementMode.RECOMPUTE)
)
# Model, and how it gets new weights after the first and after the second round.
FLOWS = [
    ("tiny", ("copy_", "data.copy_"), {"async_sched_mode": "async"}),
    ("tiny", ("data", "load_state_dict"), OFFLOAD),
    ("tiny", ("swap_model_weights", "AdamW"), RECOMPUTE),
    ("tiny-gdn", ("copy_", "data.copy_"), {}),
    ("tiny-gdn", ("swap_model_weights", "AdamW"), OFFLOAD),
    ("tiny-mixed", ("data", "load_state_dict"), RECOMPUTE),
    ("tiny-mixed", ("swap_model_weights", "AdamW"), {}),
]
# How, and whether the cache is kept on resume otherwise.
ANNOUNCED = [("invalidate", KEEPS), ("epoch", KEEPS), ("epoch", None)]


@pytest.fixture
def models(platform: Any) -> Callable[[str], list[Any]]:
    """A model that generates, and what a trainer makes of it in two steps."""
    return lambda name: [build_hybrid_model(named(name), seed=seed, platform=platform) for seed in (5, 6, 7)]


def check_round(rollouts: Rollouts, model: Any, **fields: Any) -> None:
    """A round of these weights."""
    answers, computed = rollouts.round(**fields)
    reference = NaiveHybridModel(model, model.hybrid_config)
    for answer in answers:
        assert_matches(reference, answer, sampled=True)
    assert computed == computed_once()


@pytest.mark.parametrize(("name", "ways", "fields"), mostly_slow_rows(FLOWS, FLOWS[0], FLOWS[4], FLOWS[5]), ids=str)
def test_three_rounds_with_nothing_announced(models, name, ways, fields):
    """Requests that run over a suspension go on, and leave nothing for later ones. (Recomputed ones are of the new weights.)"""
    model, *trained = models(name)
    rollouts, spans = Rollouts(rl_engine(model, **fields)), fields is not RECOMPUTE
    check_round(rollouts, model, spans=spans)
    for way, new in zip(ways, trained, strict=True):
        rollouts.engine.suspend()
        WAYS[way](model, new)
        rollouts.engine.resume()
        rollouts.run()  # what spans the suspension
        check_round(rollouts, model, spans=spans)
    rollouts.run()
    assert rollouts.engine.context.prefix_stats().invalidations == len(ways)
    assert not rollouts.engine.requests


@pytest.mark.parametrize(("announced", "prefix"), mostly_slow_rows(ANNOUNCED, *ANNOUNCED[:2]))
def test_weights_that_are_announced(models, prefix, announced):
    """With megatron/rl the epoch comes while the engine is suspended, from the first round on."""
    model, *trained = models("tiny-mixed")
    rollouts = Rollouts(rl_engine(model, prefix))
    for epoch, new in enumerate([model, *trained]):
        if epoch:
            rollouts.engine.suspend()
            WAYS["swap_model_weights"](model, new)
        if announced == "invalidate":
            rollouts.engine.invalidate()
        else:
            rollouts.engine._generation_epoch = epoch  # as the engine does when it gets the client's message
        rollouts.engine.resume()
        check_round(rollouts, model)


def test_a_cache_that_is_kept_computes_nothing_twice(models):
    model, *_ = models("tiny")
    rollouts = Rollouts(rl_engine(model, KEEPS))
    check_round(rollouts, model)
    rollouts.engine.suspend()
    rollouts.engine.resume()
    answers, computed = rollouts.round()
    whole = len(prompts_of_a_round()[0])
    assert computed == len(answers) * SAMPLES * (whole - answers[0].num_cached_tokens) < computed_once()
