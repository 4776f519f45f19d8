"""The replay's copy of megatron-core's rules decides as megatron-core's classes do, request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.lab.replay import Policy, replay
from tests.harness.defect_helpers import Side, computed_tokens
from tests.harness.defects import DEFECTS
from tests.harness.engine_helpers import greedy
from tests.harness.trace_helpers import as_trace, token_prompts

BLOCK = 128  # the scan's chunk: every block boundary can have a state
UPSTREAM = Policy(name="upstream", eviction="upstream")
of_019 = pytest.mark.skipif(
    DEFECTS[6].is_mended(),
    reason="the rule is 0.19's: later ones break ties otherwise, and skip states for want of slots",
)


@pytest.fixture
def side(tiny):
    from megatron_hybrid_prefix.mcore import restore_mixers

    yield Side("upstream", tiny)
    restore_mixers(tiny)


def build(side: Side, *, slots: int, blocks: int, most_blocks: int, block_tokens: int = BLOCK) -> Any:
    """Megatron's engine with its LRU policy, and room for exactly this many blocks and states."""
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    engine = side.build(
        slots=slots,
        blocks=blocks,
        block_size_tokens=block_tokens,
        max_requests=2,
        max_tokens=max(1024, -(-most_blocks * block_tokens // 64) * 64 + 64),
        max_sequence_length=most_blocks * block_tokens + 64,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )
    assert engine.context.mamba_slot_allocator.max_slots == slots
    return engine


def bookkeeping_of(engine: Any, request_id: int, prompt: list[int]) -> int:
    """Does what megatron does for a request of one generated token, without a forward. Returns the skipped tokens."""
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    context = engine.context
    before = computed_tokens(engine)
    context.add_request(
        DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=torch.tensor(prompt),
            sampling_params=greedy(1),
            block_size_tokens=context.block_size_tokens,
            enable_prefix_caching=True,
        )
    )
    context.initialize_attention_state()
    context.mamba_slot_allocator.commit_intermediate_states()
    context.update_requests(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.long))
    context.prefix_cache_lru_clock += 1
    return len(prompt) - (computed_tokens(engine) - before)


@of_019
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("slots", "blocks"), [(12, 300), (5, 300), (25, 300), (12, 24), (5, 16)])
def test_the_rule_reuses_what_megatron_reuses(side, slots, blocks, seed):
    prompts = token_prompts(60, block_tokens=BLOCK, most_blocks=8, seed=seed)
    engine = build(side, slots=slots, blocks=blocks, most_blocks=8)
    theirs = [bookkeeping_of(engine, number, prompt) for number, prompt in enumerate(prompts)]
    run = replay(as_trace(prompts, BLOCK), UPSTREAM, state_slots=slots, kv_blocks=blocks)
    assert list(run.reused_tokens) == theirs
    assert run.counters["would_raise"] == 0 and run.refused_requests == 0
    assert sum(theirs) > 0 and run.counters["evictions"] > 0
    assert (run.counters["kv_evictions"] > 0) == (blocks < 100)
    allocator = engine.context.mamba_slot_allocator
    assert run.counters["slots_used"] == slots - allocator.free_count == len(allocator.hash_to_block_id)


def test_the_whole_engine_does_no_more_than_the_bookkeeping(side):
    prompts = token_prompts(24, block_tokens=BLOCK, most_blocks=5, seed=3)
    engine = build(side, slots=6, blocks=12, most_blocks=5)
    theirs = [len(prompt) - side.serve(engine, prompt, count=1)[1] for prompt in prompts]
    run = replay(as_trace(prompts, BLOCK), UPSTREAM, state_slots=6, kv_blocks=12)
    assert list(run.reused_tokens) == theirs and sum(theirs) > 0
    assert run.counters["evictions"] > 0 and run.counters["kv_evictions"] > 0


@of_019
def test_where_megatron_raises_the_rule_says_so(side):
    prompts = [list(range(3 * BLOCK + 5))]
    engine = build(side, slots=1, blocks=20, most_blocks=5)
    with pytest.raises(RuntimeError, match="No evictable Mamba cache slots"):
        for number, prompt in enumerate([*prompts, prompts[0][: BLOCK + 3] + [7] * 2 * BLOCK]):
            bookkeeping_of(engine, number, prompt)
    both = [*prompts, prompts[0][: BLOCK + 3] + [7] * 2 * BLOCK]
    assert replay(as_trace(both, BLOCK), UPSTREAM, state_slots=1, kv_blocks=20).counters["would_raise"] > 0
