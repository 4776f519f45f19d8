"""A replay reuses exactly the tokens that the engine reuses when the same requests run one after another."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import replay
from tests.harness.engine_helpers import cache_gb_for
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.trace_helpers import as_trace, token_prompts

BLOCK = 64


def reused_tokens(served, prompts):
    """Sends the prompts one after another; returns how many tokens of each were reused."""
    reused = []
    for prompt in prompts:
        before = served.context.prefix_stats().reused_tokens
        served.send(prompt, count=1)
        reused.append(served.context.prefix_stats().reused_tokens - before)
    return reused


def replayed(served, prompts):
    """The same requests in a replay with as much memory."""
    layout, settings = served.context.layout, served.cache.settings
    memory = Memory(
        cache_bytes=layout.total_blocks * layout.block_bytes,
        block_bytes=served.context.shared_memory.kv_rows.shape[-1],
        state_bytes=layout.state_bytes,
        live_bytes=layout.live_bytes,
        mamba_bytes=None if settings.state_slots is None else settings.state_slots * layout.state_bytes,
    )
    assert memory.layout == layout
    same = ("eviction_policy", "retention_interval_tokens", "min_computed_tokens")
    same += ("host_pages", "host_kv_pages", "host_state_pages")
    rules = {name: getattr(settings, name) for name in same}
    return replay(as_trace(prompts, settings.block_tokens), **memory.cache_sizes(), **rules)


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize(
    ("slots", "blocks", "block_tokens", "interval", "host_gb", "kept"),
    [
        (6, None, BLOCK, 0, 0, None), (10, None, BLOCK, None, 0, None), (20, 6, BLOCK, 2 * BLOCK, 0, None),
        (5, 16, BLOCK, 0, 0, None), (None, 20, BLOCK, None, 0, None), (None, 60, 16, None, 0, None),
        (None, 60, 11, None, 0, None), (None, 12, BLOCK, None, 0.0008, None), (None, 20, BLOCK, None, 0, "int8"),
    ],
)  # fmt: skip
def test_a_replay_is_the_engine_without_the_model(
    model, eviction, slots, blocks, block_tokens, interval, host_gb, kept
):
    """With few states, with little KV, with pages of several blocks and of several states or of two sizes, and with a host."""
    prompts = token_prompts(40, block_tokens=block_tokens, most_blocks=6, seed=blocks or slots)
    memory = {"slots": slots, "blocks": blocks}
    if slots is None:
        cache_gb = cache_gb_for(model, blocks, block_tokens=block_tokens, max_requests=4)
        memory = {"cache_gb": cache_gb, "mamba_gb": None, "host_gb": host_gb}
    served = EngineHarness(
        model,
        **memory,
        block_size_tokens=block_tokens,
        eviction_policy=eviction,
        retention_interval_tokens=interval,
        decode_checkpoints=False,
        checkpoint_dtype=kept,
    )
    reused = reused_tokens(served, prompts)
    run = replayed(served, prompts)
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    theirs = served.context.prefix_stats().as_dict()
    for name in ("evictions", "kv_evictions", "checkpoints_by_reason"):
        assert run.counters[name] == theirs[name], name
    assert run.counters["memory_use"] == asdict(served.cache.memory_use())
    assert theirs["evictions"] > 0 and (theirs["kv_evictions"] > 0) == (blocks is not None)
    host, mine = (counters["tiers"].get("host", {}) for counters in (theirs, run.counters))
    counted = [(host[name], mine[name]) for name in ("loads", "stores", "evictions") if host_gb]
    assert all(one == other > 0 for one, other in counted)
    # A state moves without the rest of its page.
    assert not host_gb or served.cache.settings.host_state_pages[1] < served.cache.settings.host_kv_pages
