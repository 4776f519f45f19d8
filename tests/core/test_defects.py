"""Defects of megatron-core 0.19 that this cache must make impossible. The numbers are those of
`test_upstream_defects.py`.

The tests against upstream's own classes are in `tests/upstream`. These tests show that no sequence of calls leads to a
defect.
"""

from __future__ import annotations

import pytest

import megatron_hybrid_prefix.index.matcher as matcher_module
from megatron_hybrid_prefix.index.blocks import KVBlocks
from tests.core import test_cache
from tests.core.model import ModelEngine
from tests.core.test_cache import run, states

B = 256


def engine(**options) -> ModelEngine:
    return test_cache.engine(**{"block_tokens": B} | options)


@pytest.mark.parametrize("cut", [1, 255, 256, 300, 1024, 1300, 1535, 1536, 1600])
def test_1_a_continuation_chunk_skips_nothing(cut):
    model = engine()
    run(model, list(range(7 * B + 40)))  # one state, at block 7
    y = list(range(6 * B)) + list(range(50_000, 50_300))
    request = model.admit(y, first_chunk=cut)
    assert request.admission.resume_tokens == 0 and request.admission.lost_tokens_no_state == 6 * B
    model.settle(model.plan(request, cut), request, succeeds=True)
    with pytest.raises(ValueError, match=f"next is {cut}"):
        model.cache.plan(request.request_id, cut + 1, len(y))
    second = model.plan(request, len(y))
    assert (second.start_tokens, second.source_slot) == (cut, None), "from its own live state"
    model.settle(second, request, succeeds=True)  # the model checks what each state was written with
    model.check()
    assert sorted(states(model)) == [6, 7] and len(states(model)[7]) == 2


@pytest.mark.parametrize("min_computed_tokens", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3])
def test_2_the_resume_is_never_at_a_block_without_a_state(min_computed_tokens, extra):
    model = engine(min_computed_tokens=min_computed_tokens)
    run(model, list(range(3 * B + 5)))  # one state, at block 3
    request = run(model, list(range(3 * B + extra)))
    assert request.admission.resume_tokens == (3 * B if extra >= min_computed_tokens else 0)
    assert request.prompt_tokens - request.admission.resume_tokens >= min_computed_tokens
    again = run(model, list(range(3 * B + extra)))
    deepest = (3 * B + extra - min_computed_tokens) // B * B
    assert again.admission.resume_tokens == deepest, "the same prompt again is as good as it can be"


def test_7_a_full_pool_of_evictable_blocks_is_room():
    model = engine(kv_blocks=4)
    run(model, list(range(3 * B)))
    request = run(model, list(range(9000, 9000 + B)), release=False)
    assert model.cache.memory_use().free_blocks == 0 and model.cache.blocks.available_count == 3
    assert model.decode(request, [1, 2, 3], by_id=True)
    model.check()


@pytest.mark.parametrize("shared", [False, True])
def test_10_a_refused_admission_takes_nothing(shared):
    model = engine(kv_blocks=6)
    run(model, list(range(3 * B)))
    holder = model.admit([7] * (2 * B))
    prompt = (list(range(3 * B)) if shared else []) + [8] * (5 * B)
    queue = list(model.cache._store.blocks.unneeded)
    pins = [model.cache._store.slots.pins(slot) for slot in range(50)]
    assert model.admit(prompt) is None
    model.check()
    assert list(model.cache._store.blocks.unneeded) == queue, "not even its place in the order of eviction"
    assert [model.cache._store.slots.pins(slot) for slot in range(50)] == pins == [0] * 50
    assert model.cache.stats().kv_evictions == 0 and model.next_id - 1 not in model.cache.live
    model.release(holder)
    model.drain()


def test_17_a_state_is_pinned_only_until_it_was_read():
    model = engine(state_slots=1)
    run(model, list(range(2 * B + 1)))
    request = model.admit(list(range(2 * B)) + [5] * 600, write=False)
    first, source = model.plan(request, 100), request.admission.source_slot
    assert model.cache._store.slots.pins(source) == 1
    model.settle(first, request, succeeds=True)
    assert model.cache._store.slots.pins(source) == 0, "its blocks are still held"
    run(model, [9] * (B + 1))
    assert model.cache.stats().evictions == 1 and model.cache.stats().checkpoints_skipped == 0
    model.check()


def test_20_a_match_is_made_once_for_an_admission(monkeypatch):
    model = engine()
    run(model, list(range(3 * B)))
    cache, made = model.cache, []
    real = matcher_module.match_prefix
    monkeypatch.setattr(matcher_module, "match_prefix", lambda *a, **k: made.append(1) or real(*a, **k))
    match = cache.match(cache.chain(list(range(3 * B + 9))))
    assert cache.can_admit(match) and cache.can_admit(match, length_tokens=3 * B + 1)
    cache.admit(77, match)
    assert len(made) == 1


def test_20_evicting_looks_at_no_more_than_it_evicts(monkeypatch):
    model = engine(kv_blocks=200, block_tokens=1)
    run(model, list(range(200)))
    looked = []
    real = KVBlocks.next_kv
    monkeypatch.setattr(KVBlocks, "next_kv", lambda self: looked.append(1) or real(self))
    assert model.cache.blocks.allocate(7) is not None
    assert len(looked) == 7 + model.cache.stats().evictions, "once more for each state that needed all KV"


def test_21_kv_matched_beyond_the_state_is_shared_and_not_written():
    model = engine()
    holder = run(model, list(range(5 * B + 9)), release=False)  # a state at 5
    prompt = list(range(3 * B)) + [7] * 9
    request = model.admit(prompt)
    assert request.admission.resume_tokens == 0 and request.admission.lost_tokens_no_state == 3 * B
    assert request.admission.block_ids[:3] == holder.admission.block_ids[:3]
    assert request.admission.shared_blocks == 3 and request.admission.stored_tokens == 3 * B
    model.settle(model.plan(request, 10_000), request, succeeds=True)  # the model fails on a write into shared blocks
    match = model.cache.match(model.cache.chain(prompt))
    assert match.block_ids == holder.admission.block_ids[:3], "what was there stays the one that is matched"
    free = model.cache.memory_use().free_blocks
    model.release(request)
    model.check()
    assert model.cache.memory_use().free_blocks == free + 1, "the rest of the prompt was never full"
