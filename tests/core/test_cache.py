"""The cache (`cache.py`), step by step: what `test_stateful.py`, whose random traffic checks all else, does not look at."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import fields

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.metrics import PrefixStats, TierStats
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.requests.explain import Question
from tests.core.model import ModelEngine, Request

BLOCK = 4


def engine(**options) -> ModelEngine:
    """Pages of 3 blocks or 2 states; where a test counts blocks, only checkpoints take some, one each."""
    options = {"block_tokens": BLOCK, "retention_interval_tokens": 0, "eviction_policy": "lru"} | options
    sizes = {"live_states": False} if "kv_blocks" in options else {"kv_blocks": 200, "page_blocks": 3, "page_states": 2}
    return ModelEngine(HybridPrefixCache(CacheSettings(**sizes | options)))


def tokens(*runs: int, rest: int = 0) -> list[int]:
    """One block of each given number, and ``rest`` more tokens."""
    return [run for run in runs for _ in range(BLOCK)] + [99] * rest


def run(model: ModelEngine, prompt: list[int], *, chunk: int = 10**6, release: bool = True, **options) -> Request:
    """Admits a prompt and computes it in chunks. Checks everything after each chunk."""
    request = model.admit(prompt, **options)
    assert request is not None
    while request.planned_tokens < len(prompt):
        plan = model.plan(request, chunk)
        assert plan is not None
        model.check()
        model.settle(plan, request, succeeds=True)
        model.check()
    if release:
        model.release(request)
        model.check()
    return request


def states(model: ModelEngine) -> dict[int, list[CheckpointReason]]:
    """Depths in blocks at which states are kept, and why."""
    found: dict[int, list[CheckpointReason]] = {}
    for node in model.cache.nodes():
        if node.reason is not None:
            found.setdefault(node.depth_blocks, []).append(node.reason)
    return found


# -- what is reused ----------------------------------------------------------------------------------------------------


def test_opting_out_of_reading_and_writing():
    model = engine()
    run(model, tokens(1, 2, rest=1), write=False)
    assert len(list(model.cache.nodes())) == 0 and model.cache.memory_use().free_blocks == 200
    run(model, tokens(1, 2, rest=1))
    assert run(model, tokens(1, 2, 3, rest=1), read=False).admission.resume_tokens == 0
    reader = run(model, tokens(1, 2, 3, 4, 5), write=False)
    assert reader.admission.resume_tokens == 12 and reader.admission.boundaries == ()
    assert sorted(states(model)) == [2, 3]


@pytest.mark.parametrize("at_once", [False, True])
def test_generated_blocks_become_matchable_once_full(at_once):
    model = engine()
    request = run(model, tokens(1, rest=3), release=False)
    assert model.decode(request, list(range(30)), at_once=at_once)
    model.check()
    assert len(list(model.cache.nodes())) == (7 + 29) // BLOCK


# -- when it is kept ---------------------------------------------------------------------------------------------------


def test_what_follows_a_failed_chunk_is_not_published():
    model = engine()
    request = model.admit(tokens(1, 2, 3))
    first, second = model.plan(request, 5), model.plan(request, 100)
    assert [c.position_tokens for c in second.checkpoints] == [8, 12]
    with pytest.raises(ValueError, match="next is 12"):
        model.cache.plan(request.request_id, 0, 4)
    model.settle(first, request, succeeds=False)
    with pytest.raises(ValueError, match="next is 12"):
        model.cache.plan(request.request_id, 0, 4)
    model.cache.publish(second)  # its forward ran, on what the failed one left
    assert len(list(model.cache.nodes())) == 0 and model.cache.stats().slots_used == 0
    model.cache.check_integrity()
    assert model.cache.plan(request.request_id, 0, 4).start_tokens == 0


def test_no_slots_keeps_nothing_and_fails_nothing():
    model = engine(state_slots=0)
    for _ in range(3):
        request = run(model, tokens(1, 2, 3, rest=1), chunk=5)
    assert (request.admission.resume_tokens, request.admission.reuse.kv_tokens) == (0, 12)
    assert model.cache.stats().checkpoints_skipped == 0, "nothing is wanted where nothing can be kept"


def test_no_state_is_kept_where_the_blocks_are_not_known():
    cache = engine().cache
    prompt = tokens(1, 2, 3, rest=1)
    cache.admit(1, cache.match(cache.chain(prompt)), length_tokens=4)
    plan = cache.plan(1, 0, len(prompt))  # the engine has not said which blocks it uses beyond the first
    cache.publish(plan)
    cache.check_integrity()
    assert cache.match(cache.chain(prompt)).kv_depth_blocks == 1 and cache.stats().slots_used == 0


def test_requests_admitted_with_one_chain_are_independent():
    cache = engine().cache
    match = cache.match(cache.chain(tokens(1)))
    for request_id in (1, 2):
        cache.admit(request_id, match, length_tokens=8)
        cache.publish(cache.plan(request_id, 0, 4))
        cache.append(request_id, [request_id] * 5)
        cache.check_integrity()
    for request_id in (1, 2):
        assert cache.match(cache.chain(tokens(1, request_id))).kv_depth_blocks == 2


def test_a_match_that_is_out_of_date_is_made_again():
    model = engine(kv_blocks=8, state_slots=1)
    run(model, tokens(1, 2, rest=1))
    match = model.cache.match(model.cache.chain(tokens(1, 2, 3, rest=1)))
    assert match.resume_tokens == 8
    run(model, tokens(4, rest=1))  # evicts the state
    admission = model.cache.admit(50, match)
    assert (admission.resume_tokens, admission.source_slot) == (0, None)
    assert model.cache.stats().fallbacks == {"stale_match": 1}
    model.cache.check_integrity()


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_written_across_a_change_of_weights_is_dropped():
    model = engine()
    request = model.admit(tokens(1, 2, rest=1))
    plan = model.plan(request, 100)
    model.cache.invalidate()
    model.settle(plan, request, succeeds=True)
    model.check()
    assert model.cache.stats().fallbacks == {"epoch_changed": 1} and model.cache.stats().checkpoints_published == 0


def test_keys_of_other_weights_neither_read_nor_write():
    cache = engine(epoch=2).cache
    for epoch, resume in ((2, 0), (2, 4), (1, 0), (3, 0)):  # keys from elsewhere do not hold the epoch themselves
        admission = cache.admit(1, cache.match(KeyChain([b"a"], 5, epoch=epoch)))
        assert admission.resume_tokens == resume
        cache.publish(cache.plan(1, resume, 5))
        cache.release(1)
        assert len(list(cache.nodes())) == 1
    cache.reset()
    cache.admit(1, cache.match(KeyChain([b"a"], 5, epoch=1)))
    assert cache.plan(1, 0, 5).checkpoints == ()


def test_back_to_an_earlier_epoch():
    model = engine()
    old = model.admit(tokens(1, rest=1))
    old_plan = model.plan(old, 100)
    model.cache.invalidate(1)
    model.cache.invalidate(0)
    new = model.admit(tokens(1, rest=1))
    new_plan = model.plan(new, 100)
    assert len(new_plan.checkpoints) == 1
    model.settle(old_plan, old, succeeds=True)
    model.cache.check_integrity()
    assert len(list(model.cache.nodes())) == 0
    model.settle(new_plan, new, succeeds=True)
    assert states(model) == {1: [CheckpointReason.TAIL]}


def test_the_same_epoch_again_changes_nothing():
    model = engine(epoch=3)
    run(model, tokens(1, rest=1))
    model.cache.invalidate(3)
    assert model.cache.match(model.cache.chain(tokens(1, rest=1))).resume_tokens == 4


# -- blocks by id, statistics, mistakes --------------------------------------------------------------------------------


def test_blocks_by_id():
    cache = engine(kv_blocks=5).cache
    assert cache.admit(1, cache.match(cache.chain(tokens(1, rest=1)))).block_ids == (0, 1)
    assert cache.blocks.allocate(4) is None and cache.blocks.allocate(0) == []
    unattached = cache.blocks.allocate(3)
    assert unattached == [2, 3, 4] and cache.blocks.available_count == 0
    assert memoryview(cache.blocks.ref_counts()).cast("i")[2] == 1
    cache.blocks.attach(1, unattached[:2])
    cache.check_integrity()
    assert tuple(cache.live[1].block_ids) == (0, 1, 2, 3)
    cache.blocks.free([4])
    cache.blocks.free([3])  # a rewind: the last block of request 1
    cache.check_integrity()
    assert tuple(cache.live[1].block_ids) == (0, 1, 2) and cache.memory_use().free_blocks == 2
    for wrong in (lambda: cache.blocks.free([0]), lambda: cache.blocks.free([4]), lambda: cache.blocks.attach(1, [4])):
        with pytest.raises(CacheCorruptionError):
            wrong()
    cache.release(1)
    assert cache.memory_use().free_blocks == 5
    cache.check_integrity()


def test_keyed_blocks_are_not_rewound():
    model = engine()
    request = run(model, tokens(1), release=False)
    with pytest.raises(CacheCorruptionError):
        model.cache.blocks.free(request.admission.block_ids)


def test_growing_is_all_or_nothing():
    model = engine(kv_blocks=3)
    request = model.admit(tokens(1, 2, 3, 4, 5), first_chunk=4)
    assert model.cache.grow(request.request_id, 20) is None
    assert tuple(model.cache.live[request.request_id].block_ids) == (0,)
    assert [model.cache.grow(request.request_id, end).own for end in (9, 12)] == [[1, 2], []]


def test_statistics_are_a_snapshot_and_plain():
    model = engine(state_slots=4)
    before = model.cache.stats()
    run(model, tokens(1, 2))
    stats = model.cache.stats()
    none = dict.fromkeys(("junction", "breakpoint", "tail", "repeat", "interval", "decode", "verify"), 0)
    assert before.checkpoints_by_reason == none
    assert stats.checkpoints_by_reason == none | {"tail": 1, "repeat": 1}
    assert (stats.slots_total, stats.slots_used) == (4, 2)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()
    assert set(stats.as_dict()) == {item.name for item in fields(stats)}
    assert set(stats.as_dict()["tiers"]["host"]) == {item.name for item in fields(TierStats)}


def test_mistakes_of_the_caller_say_what_is_wrong():
    cache = engine().cache
    chain = cache.chain(tokens(1, 2))
    cache.admit(1, cache.match(chain))
    with pytest.raises(ValueError, match="request 1 is live already"):
        cache.admit(1, cache.match(chain))
    for start, end in ((1, 4), (0, 0)):
        with pytest.raises(ValueError, match="next is 0"):
            cache.plan(1, start, end)
    with pytest.raises(ValueError, match="request 2 is not live"):
        cache.plan(2, 0, 1)
    with pytest.raises(ValueError, match="1 keys for 8 tokens"):
        cache.match(KeyChain([b"k" * 16], 8))
    with pytest.raises(ValueError, match="min_computed_tokens"):
        engine(min_computed_tokens=0)
    with pytest.raises(ValueError, match="eviction_policy"):
        engine(eviction_policy="none")
    for interval in (-BLOCK, -1, 1, BLOCK + 1):
        refusal = rf"^retention_interval_tokens={interval}: must be 0 or a multiple of block_tokens=4"
        with pytest.raises(ValueError, match=refusal):
            engine(retention_interval_tokens=interval)
    assert not cache.release(2)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda cache: cache._requests.live[1].block_ids.append(9),
        lambda cache: cache._requests.live[1].block_ids.pop(),
        lambda cache: cache._requests.live[1].path.pop(0),
        lambda cache: setattr(cache._requests.live[1], "pinned_slot", None),
        lambda cache: cache._device.slots.unpin(cache._requests.live[1].pinned_slot),
        lambda cache: cache._device.blocks.eviction.clear(),
        lambda cache: cache.blocks.unattached.add(7),
        lambda cache: cache._planner.writing.clear(),
        lambda cache: setattr(next(cache.nodes()), "slot", 5),
        lambda cache: setattr(next(cache.nodes()), "refs", 0),
        lambda cache: setattr(next(cache.nodes()), "depth_blocks", 2),
        lambda cache: setattr(cache._requests.live[1], "computed_tokens", 99),
        lambda cache: setattr(cache._device.tree, "epoch", 1),
    ],
)
def test_check_integrity_finds_what_is_wrong(break_it):
    model = engine()
    run(model, tokens(1, 2))
    request = model.admit(tokens(1, 2, 3, rest=1))
    model.cache._requests.live[1] = model.cache._requests.live.pop(request.request_id)
    model.cache.plan(1, 8, 13)
    model.cache.check_integrity()
    break_it(model.cache)
    with pytest.raises(CacheCorruptionError):
        model.cache.check_integrity()


def test_a_copy_of_the_statistics_shares_nothing_that_changes():
    stats = PrefixStats(
        tiers={"host": TierStats(loads=3, faults={"late": 1}), "file": TierStats()}, fallbacks={"reset": 2}
    )
    copy = stats.copy()
    assert copy == stats == deepcopy(stats) and type(copy.checkpoints_by_reason) is type(stats.checkpoints_by_reason)
    pairs = [(stats, copy), *((tier, copy.tiers[name]) for name, tier in stats.tiers.items())]
    for mine, other in pairs:
        for field in fields(mine):
            value = getattr(mine, field.name)
            assert isinstance(value, int | float) or value is not getattr(other, field.name), field.name


@pytest.mark.parametrize(("page_tokens", "loads"), [(0.0, True), (0.5, True), (2.0, True), (4.0, False)])
def test_a_load_that_takes_longer_than_computing_is_not_begun(page_tokens, loads):
    """Two blocks and a state of three pages, for eight tokens: two pages of KV may be on the device, too."""
    model = engine(kv_blocks=30, page_blocks=1, host_pages=100, host_state_pages=2)
    prompt = tokens(1, 2, rest=1)
    run(model, prompt)
    for block in range(12):
        run(model, tokens(20 + block, 40 + block, 60 + block, rest=1))
    match = model.cache.match(model.cache.chain(prompt))
    assert match.loadable_blocks == 2 and match.resume_tokens == 0
    model.cache.loads.use_rate(page_tokens)
    assert model.cache.can_admit(match) and (model.cache.loads.source(99, match) is not None) == loads
    explained = model.cache.explain(Question(chain=model.cache.chain(prompt)))
    assert (explained.tier, explained.resume_tokens) == (("host", 8) if loads else (None, 0))
    admission = model.cache.admit(99, match, load=True)
    assert (admission.load is not None) == loads and admission.resume_tokens == 8 * loads
