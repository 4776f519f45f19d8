"""States that a request reaches while it decodes, and states that other requests wait for."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.requests.book import is_prefilling
from megatron_hybrid_prefix.tiers.units import EntryKind

BLOCK = 4


class Generating:
    """A request with a prompt of one token, in a cache with room for so many blocks."""

    def __init__(self, *, state_slots: int = 10, write: bool = True, blocks: int = 12, prompt: int = 1) -> None:
        self.cache = HybridPrefixCache(
            CacheSettings(
                block_tokens=BLOCK,
                kv_blocks=40,
                state_slots=state_slots,
                retention_interval_tokens=0,
                eviction_policy="lru",
                live_states=False,
            )
        )
        self.tokens = list(range(prompt))
        chain = self.cache.chain(self.tokens)
        assert self.cache.admit(1, self.cache.match(chain), length_tokens=blocks * BLOCK, write=write) is not None
        self.cache.publish(self.cache.plan(1, 0, prompt))

    def fill(self, blocks: int) -> list[int | None]:
        """Decodes to the end of so many more blocks. Returns the slots of the states at their ends."""
        slots = []
        for _ in range(blocks):
            end = (len(self.tokens) // BLOCK + 1) * BLOCK
            new = [100 + position for position in range(len(self.tokens), end)]
            self.tokens += new
            self.cache.append(1, new, computed_tokens=end)
            slots.append(self.cache.checkpoint_decoded(1, end))
            self.cache.take_copies()
            self.cache.check_integrity()
        return slots

    def depths(self) -> list[int]:
        """Depths in blocks at which a state is kept."""
        return sorted(node.depth_blocks for node in self.cache.nodes() if node.slot >= 0)

    def resume(self, blocks: int) -> int:
        """Admits another prompt of the first ``blocks`` blocks and one token. Returns the skipped tokens."""
        chain = self.cache.chain([*self.tokens[: blocks * BLOCK], 7])
        admission = self.cache.admit(2, self.cache.match(chain), write=False)
        assert admission is not None
        self.cache.publish(self.cache.plan(2, admission.resume_tokens, blocks * BLOCK + 1))
        self.cache.release(2)
        return admission.resume_tokens


def test_the_two_latest_are_kept_and_can_be_resumed_from():
    one = Generating()
    assert all(slot is not None for slot in one.fill(5))
    assert one.depths() == [4, 5]
    assert [one.resume(blocks) for blocks in (3, 4, 5)] == [0, 4 * BLOCK, 5 * BLOCK]
    assert one.cache.stats().checkpoints_by_reason["decode"] == 5
    one.cache.release(1)
    one.cache.check_integrity()
    assert one.depths() == [4, 5]


def test_one_that_was_used_stays():
    one = Generating()
    one.fill(2)
    assert one.resume(1) == BLOCK
    one.fill(4)
    assert one.depths() == [1, 5, 6]


def test_an_evicted_state_is_not_dropped_again():
    one = Generating(state_slots=2)
    one.fill(2)
    other = one.cache.chain([50] * BLOCK + [51] * BLOCK + [1])
    one.cache.admit(3, one.cache.match(other))
    one.cache.publish(one.cache.plan(3, 0, 2 * BLOCK + 1))  # its tail takes the older one's slot
    assert one.cache.stats().evictions == 1
    one.fill(3)
    one.cache.check_integrity()
    assert one.cache.stats().slots_used <= 2


@pytest.mark.parametrize("options", [{"state_slots": 0}, {"write": False}])
def test_nothing_is_kept_without_slots_or_permission(options):
    one = Generating(**options)
    assert one.fill(3) == [None, None, None]
    assert one.depths() == []


def test_a_kept_state_is_not_kept_twice():
    one = Generating()
    one.fill(1)
    assert one.cache.checkpoint_decoded(1, BLOCK) is None
    assert one.cache.checkpoint_decoded(1, 2 * BLOCK) is None  # not there yet


def test_weights_that_change_end_it():
    one = Generating()
    one.fill(2)
    one.cache.invalidate()
    assert one.fill(2) == [None, None]
    assert one.depths() == []


def test_a_boundary_that_others_want():
    one = Generating(prompt=1)
    cache = one.cache
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
    cache = HybridPrefixCache(
        CacheSettings(
            block_tokens=BLOCK,
            kv_blocks=40,
            state_slots=1,
            live_states=False,
            host_pages=20,
            eviction_policy="lru",
        )
    )
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
