"""What callers know of the future, through an engine: `cache_uses`, `cache_pin`, and the samples of a group that wait."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.mcore.context.request import KnownRequests
from megatron_hybrid_prefix.mcore.engine.scheduling import PrefixScheduling
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, IdTokenizer, tokens

SMALL = {"blocks": 40, "max_requests": 2, "eviction_policy": "lru"}


def group(number: int) -> list[int]:
    """The prompt of a group: three whole blocks and a little."""
    return tokens(3, 5, seed=100 + number)


def rounds(served: EngineHarness, groups: int, samples: int, **attributes) -> int:
    """Samples in the order in which trainers repeat a batch: one of each group, then the next one. Returns the reused tokens."""
    sent = [served.add(group(number), **attributes) for _ in range(samples) for number in range(groups)]
    served.run()
    return sum(served.finished[number].num_cached_tokens for number in sent)


def test_samples_that_wait_keep_the_state_of_their_prompt(model, monkeypatch):
    """The groups need more memory than there is. What is pinned is used by all of its samples."""
    served = EngineHarness(model, **SMALL)
    reused = rounds(served, groups=24, samples=3)
    served.check()
    stats = served.cache.stats().pins
    assert stats["pinned"] > stats["no_room"] == 0 and stats["spared"] > 0
    assert not served.cache._device.pins.kept, "each sample has come"
    blind = EngineHarness(model, **SMALL)
    monkeypatch.setattr(PrefixScheduling, "_group_of", lambda self, known: 0)
    assert rounds(blind, groups=24, samples=3) < reused
    assert not blind.cache._device.pins.kept


@pytest.mark.parametrize("said", [{"cache_uses": 2}, {"cache_pin": {"requests": 80}}, {"cache_pin": {"seconds": 3600}}])
def test_a_prompt_that_comes_later_is_kept(model, said):
    served = EngineHarness(model, **SMALL)
    others = iter(range(1000))
    for attributes in (said, {}):
        served.send(group(next(others)), **attributes)
    for turn in range(2):
        for _ in range(30):
            served.send(tokens(3, 5, seed=next(others)))
        reused = [served.send(group(number)).num_cached_tokens for number in (0, 1)]
        assert reused == [3 * BLOCK, 0] or turn, "the other one went"
        assert reused[0] == 3 * BLOCK
    served.check()


def test_what_a_preempted_request_says_counts_once(model):
    served = EngineHarness(model, blocks=11, async_sched_mode="async", tokenizer=IdTokenizer())
    for seed in range(4):
        served.add(tokens(1, 50 + seed, seed=seed), 40, cache_ttls=[(BLOCK, 50)])
    served.run()
    served.check()
    stats = served.cache.stats().pins
    assert served.engine.evicted_request_count and stats["pinned"] + stats["no_room"] == 4


def test_more_than_the_tenants_share_is_refused_and_nothing_is_pinned(model):
    served = EngineHarness(model, **SMALL)
    for number in range(2):
        served.send(group(number), cache_pin={"requests": 9}, cache_salt="a")
    with pytest.raises(
        ValueError, match=r"request \d+: cache_pin: 3 blocks and a state have no room in the tenant's share"
    ):
        served.add(group(2), cache_pin={"requests": 9}, cache_salt="a")
    assert served.cache.stats().pins["pinned"] == 2 and not served.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="have no room"):  # before any of them runs
        for number in range(2):
            served.add(group(number), cache_pin={"requests": 9}, cache_salt="e")
        served.add(group(2), cache_pin={"requests": 9}, cache_salt="e")
    served.run()
    served.send(group(2), cache_pin={"requests": 9}, cache_salt="b")  # another tenant
    served.send(group(2), cache_pin={"requests": 9}, cache_salt="c", cache_tenant="b2")
    with pytest.raises(ValueError, match="have no room"):
        served.add(group(3), cache_pin={"requests": 9}, cache_salt="d", cache_tenant="a")  # of the same tenant
    served.send(group(4), cache_ttls=[(3 * BLOCK, 300)], cache_tenant="a")  # a server's own is dropped
    stats = served.cache.stats().pins
    assert (stats["pinned"], stats["no_room"]) == (6, 1)


def test_ranks_read_no_clock(model):
    served = EngineHarness(model, **SMALL)
    known = KnownRequests(served.cache, served.context._scores, one_rank=False)
    served.context._requests = known
    served.context._admissions._requests = known
    with pytest.raises(ValueError, match="cache_pin in seconds: ranks need one clock: set cache_now"):
        served.add(group(0), cache_pin={"seconds": 10})
    served.send(group(0), cache_pin={"seconds": 10}, cache_now=1000.0)
    pins = served.cache._device.pins
    assert pins.kept
    served.send(group(1))
    assert pins.kept, "a request that says no time changes none"
    served.send(group(1), cache_now=1010.0)
    assert not pins.kept
