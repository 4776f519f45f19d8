"""States that a request reaches while it decodes, and states that other requests wait for."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.requests.book import is_prefilling
from megatron_hybrid_prefix.tiers.units import EntryKind
from tests.core.model import ModelEngine, Request
from tests.core.test_cache import BLOCK, engine, run, states, tokens


def generating(*, state_slots: int = 10, **options) -> tuple[ModelEngine, Request]:
    """A request with a prompt of one token, in a cache with room for so many states."""
    model = engine(kv_blocks=40, state_slots=state_slots)
    return model, run(model, [0], release=False, **options)


def fill(model: ModelEngine, request: Request, blocks: int) -> int:
    """Decodes to the end of so many more blocks. Returns at how many of these ends the state is kept."""
    before = model.seen["decoded states"]
    for _ in range(blocks):
        # The prompt's own forward samples the first token.
        assert model.decode(request, [100] * (BLOCK + (len(request.tokens) > 1)))
        model.checkpoint_decoded(request)
        model.copy_decoded()
        model.check()
    return model.seen["decoded states"] - before


def resume(model: ModelEngine, request: Request, blocks: int) -> int:
    """Runs another prompt of the first ``blocks`` blocks and one token. Returns the skipped tokens."""
    return run(model, [*request.tokens[: blocks * BLOCK], 7], write=False).admission.resume_tokens


def test_the_two_latest_are_kept_and_can_be_resumed_from():
    model, request = generating()
    assert fill(model, request, 5) == 5
    assert states(model) == {depth: [CheckpointReason.DECODE] for depth in (4, 5)}
    assert [resume(model, request, blocks) for blocks in (3, 4, 5)] == [0, 4 * BLOCK, 5 * BLOCK]
    assert model.cache.stats().checkpoints_by_reason["decode"] == 5
    model.release(request)
    assert sorted(states(model)) == [4, 5]


def test_one_that_was_used_stays():
    model, request = generating()
    fill(model, request, 2)
    assert resume(model, request, 1) == BLOCK
    fill(model, request, 4)
    assert sorted(states(model)) == [1, 5, 6]


def test_an_evicted_state_is_not_dropped_again():
    model, request = generating(state_slots=2)
    fill(model, request, 2)
    run(model, tokens(50, 51, rest=1))  # its tail takes the older one's slot
    assert model.cache.stats().evictions == 1
    fill(model, request, 3)
    assert model.cache.stats().slots_used <= 2


@pytest.mark.parametrize("options", [{"state_slots": 0}, {"write": False}])
def test_nothing_is_kept_without_slots_or_permission(options):
    model, request = generating(**options)
    assert fill(model, request, 3) == 0 and states(model) == {}


def test_a_kept_state_is_not_kept_twice():
    model, request = generating()
    fill(model, request, 1)
    for position in (BLOCK, 2 * BLOCK):  # the second is not there yet
        assert model.cache.checkpoint_decoded(request.request_id, position) is None


def test_weights_that_change_end_it():
    model, request = generating()
    fill(model, request, 2)
    model.cache.invalidate()
    assert fill(model, request, 2) == 0 and states(model) == {}


def test_a_boundary_that_others_want():
    cache = engine().cache
    chain = cache.chain(range(200, 200 + 6 * BLOCK + 2))
    cache.admit(5, cache.match(chain))
    assert [i for i, live in cache.live.items() if is_prefilling(live)] == [5]
    cache.publish(cache.plan(5, 0, 2 * BLOCK))
    kept = [cache.request_checkpoint(5, depth * BLOCK) for depth in (1, 2, 3, 6, 7)]
    assert kept == [False, False, True, True, False]
    plan = cache.plan(5, 2 * BLOCK, 6 * BLOCK + 2)
    kept = {checkpoint.position_tokens // BLOCK: checkpoint.reason for checkpoint in plan.checkpoints}
    assert kept == {3: CheckpointReason.JUNCTION, 6: CheckpointReason.JUNCTION}
    assert [i for i, live in cache.live.items() if is_prefilling(live)] == []
    cache.publish(plan)
    cache.check_integrity()


def test_a_state_that_waits_for_its_copy_keeps_its_slot():
    """It is not in the slot yet: the queued copies run before. What was there before is stored."""
    cache = engine(kv_blocks=40, state_slots=1, host_pages=20, retention_interval_tokens=None).cache
    for request in (1, 2, 3):
        chain = cache.chain([10 * request])
        assert cache.admit(request, cache.match(chain), length_tokens=2 * BLOCK) is not None
        cache.publish(cache.plan(request, 0, 1))
    given = []
    for request in (1, 2, 3):
        if request == 2:  # the state of the first one is copied to its slot
            assert not [copy for copy in cache.take_copies() if copy.tag.kind == EntryKind.STATE]
        cache.append(request, range(10 * request + 1, 10 * request + BLOCK), computed_tokens=BLOCK)
        given.append(cache.checkpoint_decoded(request, BLOCK))
        cache.check_integrity()
    assert given[0] == given[1] is not None and given[2] is None
    stored = [copy.tag for copy in cache.take_copies() if copy.tag.kind == EntryKind.STATE]
    assert [tag.key for tag in stored] == cache.chain(range(10, 10 + BLOCK)).keys, "of the first one only"
    chains = [cache.chain([*range(10 * request, 10 * request + BLOCK), 1]) for request in (1, 2, 3)]
    assert [cache.match(chain).resume_tokens for chain in chains] == [0, BLOCK, 0]
