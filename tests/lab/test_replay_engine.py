"""A replay reuses exactly the tokens that the engine reuses when the same requests run one after another."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.lab.replay import Policy, replay
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.trace_helpers import as_trace, token_prompts

BLOCK = 64


@pytest.fixture
def model(tiny):
    from megatron_hybrid_prefix.mcore import restore_mixers

    yield tiny
    restore_mixers(tiny)


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize(
    ("slots", "blocks", "interval"), [(6, None, 0), (10, None, None), (40, 20, 2 * BLOCK), (5, 16, 0)]
)
def test_a_replay_is_the_engine_without_the_model(model, eviction, slots, blocks, interval):
    prompts = token_prompts(40, block_tokens=BLOCK, most_blocks=6, seed=slots)
    served = EngineHarness(
        model,
        slots=slots,
        blocks=blocks,
        eviction_policy=eviction,
        retention_interval_tokens=interval,
        decode_checkpoints=False,
    )
    reused = []
    for prompt in prompts:
        before = served.context.prefix_stats().reused_tokens
        served.send(prompt, count=1)
        reused.append(served.context.prefix_stats().reused_tokens - before)
    run = replay(
        as_trace(prompts, BLOCK),
        # The engine computes two tokens of a prompt at least.
        Policy(
            name=eviction,
            eviction=eviction,
            interval_tokens=interval,
            options={"min_computed_tokens": served.cache.min_computed_tokens},
        ),
        state_slots=slots,
        kv_blocks=blocks,
    )
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    theirs = served.context.prefix_stats().as_dict()
    assert run.counters["evictions"] == theirs["evictions"] > 0
    assert run.counters["checkpoints_by_reason"] == theirs["checkpoints_by_reason"]
    assert (theirs["kv_evictions"] > 0) == (blocks is not None)
