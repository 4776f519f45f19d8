"""A replay reuses exactly the tokens that the engine reuses when the same requests run one after another."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import Policy, replay
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
    reused = reused_tokens(served, prompts)
    run = replay(
        as_trace(prompts, BLOCK),
        # The engine computes two tokens of a prompt at least.
        Policy(
            name=eviction,
            eviction=eviction,
            interval_tokens=interval,
            options={"min_computed_tokens": served.cache.settings.min_computed_tokens},
        ),
        state_slots=slots,
        kv_blocks=blocks,
    )
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    theirs = served.context.prefix_stats().as_dict()
    assert run.counters["evictions"] == theirs["evictions"] > 0
    assert run.counters["checkpoints_by_reason"] == theirs["checkpoints_by_reason"]
    assert (theirs["kv_evictions"] > 0) == (blocks is not None)


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize(
    ("block_tokens", "blocks", "padded"),
    [(BLOCK, 30, False), (16, 60, False), (11, 60, True)],  # a page has 1 block, 2, and 2 with padding instead of 3
)
def test_so_it_does_with_one_memory(model, eviction, block_tokens, blocks, padded):
    prompts = token_prompts(40, block_tokens=block_tokens, most_blocks=6, seed=blocks)
    served = EngineHarness(
        model,
        cache_gb=cache_gb_for(model, blocks, block_tokens=block_tokens, max_requests=4),
        mamba_gb=None,
        block_size_tokens=block_tokens,
        eviction_policy=eviction,
        retention_interval_tokens=None,
        decode_checkpoints=False,
    )
    reused = reused_tokens(served, prompts)
    shared = served.context.shared_memory
    block_bytes, state_bytes = (rows.shape[-1] for rows in (shared.kv_rows, shared.state_rows))
    layout = served.context.layout
    assert (layout.block_bytes > block_bytes) == padded
    memory = Memory(
        cache_bytes=layout.total_blocks * layout.block_bytes, block_bytes=block_bytes, state_bytes=state_bytes
    )
    run = replay(
        as_trace(prompts, block_tokens),
        Policy(
            name=eviction, eviction=eviction, options={"min_computed_tokens": served.cache.settings.min_computed_tokens}
        ),
        memory=memory,
    )
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    theirs, use = served.context.prefix_stats().as_dict(), served.cache.inspect.memory_use()
    assert run.counters["evictions"] == theirs["evictions"] > 0
    assert run.counters["kv_evictions"] == theirs["kv_evictions"] > 0
    assert (use.moved_blocks > 0) == (layout.page_blocks > 1)


@pytest.mark.parametrize("eviction", mostly_slow(["recompute_cost", "lru"], "recompute_cost"))
@pytest.mark.parametrize("one_memory", mostly_slow([True, False], True))
def test_so_it_does_with_a_host_tier(model, eviction, one_memory):
    prompts = token_prompts(40, block_tokens=BLOCK, most_blocks=6, seed=7)
    sizes = {"cache_gb": cache_gb_for(model, 12, block_tokens=BLOCK, max_requests=4), "mamba_gb": None}
    served = EngineHarness(
        model,
        **(sizes if one_memory else {"slots": 3, "blocks": 12}),
        block_size_tokens=BLOCK,
        host_gb=0.0008,
        eviction_policy=eviction,
        retention_interval_tokens=None,
        decode_checkpoints=False,
    )
    reused = reused_tokens(served, prompts)
    layout, entries = served.cache.layout, served.cache.inspect.host_tier.entries
    options = {
        "min_computed_tokens": served.cache.settings.min_computed_tokens,
        "host_pages": entries.total_pages,
        "host_kv_pages": entries.pages_of[EntryKind.KV],
        "host_state_pages": entries.pages_of[EntryKind.STATE],
    }
    assert (
        entries.pages_of[EntryKind.STATE] < entries.pages_of[EntryKind.KV]
    )  # a state moves without the rest of its page
    memory = layout and Memory(
        cache_bytes=layout.total_blocks * layout.block_bytes,
        block_bytes=layout.block_bytes,
        state_bytes=layout.state_bytes,
    )
    counts = {"memory": memory} if one_memory else {"state_slots": 3, "kv_blocks": 12}
    run = replay(as_trace(prompts, BLOCK), Policy(name=eviction, eviction=eviction, options=options), **counts)
    assert list(run.reused_tokens) == reused and sum(reused) > 0
    tier = served.context.prefix_stats().as_dict()["tiers"]["host"]
    assert {name: run.counters["tiers"]["host"][name] for name in ("loads", "stores", "evictions")} == {
        name: tier[name] for name in ("loads", "stores", "evictions")
    }
    assert min(tier["loads"], tier["stores"], tier["evictions"]) > 0, tier
