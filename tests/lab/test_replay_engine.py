"""A replay reuses exactly the tokens that the engine reuses when the same requests run one after another."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import replay
from megatron_hybrid_prefix.tiers.units import EntryKind
from tests.harness.engine_helpers import cache_gb_for
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.selection import mostly_slow
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


def replayed(served, prompts, **options):
    """The same requests in a replay with as much memory."""
    layout, settings = served.context.layout, served.cache.settings
    memory = Memory(
        cache_bytes=layout.total_blocks * layout.block_bytes,
        block_bytes=served.context.shared_memory.kv_rows.shape[-1],
        state_bytes=layout.state_bytes,
        mamba_bytes=None if settings.state_slots is None else settings.state_slots * layout.state_bytes,
    )
    assert memory.layout == layout
    same = ("eviction_policy", "retention_interval_tokens", "min_computed_tokens")
    rules = {name: getattr(settings, name) for name in same}
    return replay(as_trace(prompts, settings.block_tokens), **memory.cache_sizes(), **rules, **options)


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize(
    ("slots", "blocks", "block_tokens", "interval"),
    [
        (6, None, BLOCK, 0), (10, None, BLOCK, None), (20, 6, BLOCK, 2 * BLOCK), (5, 16, BLOCK, 0),
        (None, 20, BLOCK, None), (None, 60, 16, None), (None, 60, 11, None),
    ],
)  # fmt: skip
def test_a_replay_is_the_engine_without_the_model(model, eviction, slots, blocks, block_tokens, interval):
    """With few states, with little KV, and with pages of several blocks and of several states."""
    prompts = token_prompts(40, block_tokens=block_tokens, most_blocks=6, seed=blocks or slots)
    memory = {"slots": slots, "blocks": blocks}
    if slots is None:
        cache_gb = cache_gb_for(model, blocks, block_tokens=block_tokens, max_requests=4)
        memory = {"cache_gb": cache_gb, "mamba_gb": None}
    served = EngineHarness(
        model,
        **memory,
        block_size_tokens=block_tokens,
        eviction_policy=eviction,
        retention_interval_tokens=interval,
        decode_checkpoints=False,
    )
    reused = reused_tokens(served, prompts)
    run = replayed(served, prompts)
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    theirs = served.context.prefix_stats().as_dict()
    for name in ("evictions", "kv_evictions", "checkpoints_by_reason"):
        assert run.counters[name] == theirs[name], name
    assert run.counters["memory_use"] == asdict(served.cache.memory_use())
    assert theirs["evictions"] > 0 and (theirs["kv_evictions"] > 0) == (blocks is not None)


@pytest.mark.parametrize("eviction", mostly_slow(["recompute_cost", "lru"], "recompute_cost"))
def test_so_it_does_with_a_host_tier(model, eviction):
    prompts = token_prompts(40, block_tokens=BLOCK, most_blocks=6, seed=7)
    served = EngineHarness(
        model,
        cache_gb=cache_gb_for(model, 12, block_tokens=BLOCK, max_requests=4),
        mamba_gb=None,
        block_size_tokens=BLOCK,
        host_gb=0.0008,
        eviction_policy=eviction,
        retention_interval_tokens=None,
        decode_checkpoints=False,
    )
    reused = reused_tokens(served, prompts)
    entries = served.cache._device.host
    # A state moves without the rest of its page.
    assert entries.pages_of[EntryKind.STATE] < entries.pages_of[EntryKind.KV]
    run = replayed(
        served,
        prompts,
        host_pages=entries.total_pages,
        host_kv_pages=entries.pages_of[EntryKind.KV],
        host_state_pages=entries.pages_of[EntryKind.STATE],
    )
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    tier = served.context.prefix_stats().as_dict()["tiers"]["host"]
    assert {name: run.counters["tiers"]["host"][name] for name in ("loads", "stores", "evictions")} == {
        name: tier[name] for name in ("loads", "stores", "evictions")
    }
    assert min(tier["loads"], tier["stores"], tier["evictions"]) > 0, tier
