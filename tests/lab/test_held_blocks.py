"""KV blocks that running requests hold together: each block once, however few states are kept. Prints the figures of docs."""

from __future__ import annotations

from collections import deque

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.lab.replay import unlimited_kv_blocks
from tests.harness.trace_helpers import made_up

AT_ONCE = 32


@pytest.mark.parametrize("slots", [0, 16])
@pytest.mark.parametrize("kind", ["chat", "popular", "agents"])
def test_running_requests_hold_each_block_once(kind, slots):
    trace = made_up(kind, 400)
    total = unlimited_kv_blocks(trace) + AT_ONCE
    cache = HybridPrefixCache(CacheSettings(block_tokens=trace.block_tokens, kv_blocks=total, state_slots=slots))
    running: deque[int] = deque()
    held = alone = 0
    for number, request in enumerate(trace.requests):
        if len(running) == AT_ONCE:
            cache.release(running.popleft())
        admission = cache.admit(number, cache.match(KeyChain(request.keys, request.prompt_tokens)))
        assert admission is not None
        cache.publish(cache.plan(number, admission.resume_tokens, request.prompt_tokens))
        running.append(number)
        prompts = [trace.requests[each] for each in running]
        different = {key for prompt in prompts for key in prompt.keys}
        partly_filled = sum(prompt.prompt_tokens % trace.block_tokens > 0 for prompt in prompts)
        assert total - cache.blocks.available_count == len(different) + partly_filled
        held += len(different) + partly_filled
        alone += sum(len(tuple(cache.live[each].block_ids)) for each in running)
    print(
        f"{kind}, {slots} slots: {held / len(trace.requests):.0f} held, {alone / len(trace.requests):.0f} in all tables"
    )
