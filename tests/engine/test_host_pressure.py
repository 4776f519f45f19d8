"""Conversations that do not fit into the memory, with a host tier and without: a schedule in steps and tokens, without times."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.requests.loads import Loads
from tests.gpu.host_pressure import FIT, conversations, serve, sizes
from tests.harness.engine_helpers import cache_gb_for
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.selection import mostly_slow_rows

SCALE, BLOCK, REQUESTS, ANSWER = 32, 16, 8, 12
STEP_TOKENS = 512 // SCALE  # a step of a GPU takes as long as this many tokens, at most
WAYS = [
    (True, "async", None),
    (False, "async", None),
    (True, "legacy", 150),
    (False, "legacy", None),
    (False, "async", 150),
]


@pytest.mark.parametrize(("at_once", "mode", "chunk"), mostly_slow_rows(WAYS, *WAYS[:3]))
def test_pressure_is_never_slower_with_a_host_tier(tiny: Any, at_once, mode, chunk):
    fields = sizes(tiny, BLOCK, SCALE, REQUESTS) | {"async_sched_mode": mode}
    memory = {"cache_gb": fields.pop("cache_gb"), "retention_interval_tokens": 0}
    if chunk is not None:
        fields |= {"enable_chunked_prefill": True, "max_tokens": chunk}
    prompts = conversations(SCALE, tiny.hybrid_config.vocab_size, seed=1)
    runs = {}
    for host_gb in (0.0, 0.2):
        engine = build_engine(tiny, HybridPrefixConfig(host_gb=host_gb, **memory), **fields)
        runs[host_gb] = serve(engine, prompts, at_once=at_once, answer=ANSWER)
        engine.context.check_integrity()
    without, with_tier = runs.values()
    # A load needs a state more than a cold prompt, so one request fewer may run.
    assert with_tier["steps"] * (FIT - 1) <= without["steps"] * FIT
    cost = [run["steps"] * STEP_TOKENS + run["computed"] for run in (with_tier, without)]
    assert cost[0] <= 0.9 * cost[1]
    # What a turn adds is computed, and up to two blocks before it: its first token, and what fills no block.
    turns = [len(turn) for conversation in prompts for turn in conversation]
    assert with_tier["computed"] <= sum(len(conversation[-1]) for conversation in prompts) + 2 * BLOCK * len(turns)
    assert without["computed"] > 1.5 * with_tier["computed"], "what does not fit is computed again without a host tier"
    assert with_tier["reused_host"] > 0.5 * with_tier["reused"] > 0
    assert with_tier["given_up"] == 0


def test_a_prompt_that_fits_only_without_its_load_is_not_given_it_for_a_first_chunk(tiny_large_states: Any):
    """The chunk would be shorter than what is loaded."""
    memory = cache_gb_for(tiny_large_states, 12, states=1, block_tokens=64, max_requests=4)
    chunks = {"enable_chunked_prefill": True, "max_tokens": 128}
    served = EngineHarness(tiny_large_states, cache_gb=memory, host_gb=0.05, **chunks)
    start = tokens(5, 3, seed=1)
    served.send(start, start[:321], *(tokens(4, 0, seed=seed) for seed in range(2, 6)), count=2)
    layout, before = served.context.layout, served.context.prefix_stats()
    served.send(start + tokens(layout.total_blocks - layout.page_blocks - 6, 59, seed=6), count=2)
    served.check()
    after = served.context.prefix_stats()
    assert after.tiers["host"].loads == before.tiers["host"].loads and not after.reused_tokens_host


def test_a_prompt_whose_load_finds_no_room_starts_later_without_it(tiny_large_states: Any, monkeypatch):
    """All states may be pinned when it is admitted. Its chunk was as long as its load allowed, and without would not fit the step."""
    memory = cache_gb_for(tiny_large_states, 30, states=2, block_tokens=64, max_requests=4)
    chunks = {"enable_chunked_prefill": True, "max_tokens": 128}
    served = EngineHarness(tiny_large_states, cache_gb=memory, host_gb=0.05, **chunks)
    start = tokens(5, 3, seed=1)
    served.send(start, *(tokens(6, 0, seed=seed) for seed in range(2, 10)), count=2)
    begun, refused = Loads.begin, []
    monkeypatch.setattr(Loads, "begin", lambda *args: refused.append(args))
    served.send(start, count=2)
    monkeypatch.setattr(Loads, "begin", begun)
    assert len(refused) == 1 and not served.context.prefix_stats().reused_tokens_host
    served.check()
