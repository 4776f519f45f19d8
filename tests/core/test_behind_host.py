"""The mover with a tier behind it whose threads run when they are told: what arrives, what is written, and what is not."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.units import LoadState, Tag
from megatron_hybrid_prefix.transfers import behind, jobs
from tests.core.pools import KV, STATE, OnItsWay, Pools, SteadyTier
from tests.harness.limits import HANG_S, wait_until


@pytest.fixture
def tier() -> SteadyTier:
    return SteadyTier()


@pytest.fixture
def pools(tier: SteadyTier) -> Iterator[Pools]:
    made = Pools(tier=tier)
    yield made
    tier.may_read.set()
    tier.may_write.set()
    made.mover.close()


# -- loads -------------------------------------------------------------------------------------------------------------


def test_a_load_whose_page_went_to_another_entry_is_a_miss(pools):
    """Two requests waited for one entry. It was late for the first, so its page went to another entry."""
    for key in (b"a", b"b"):
        pools.give_to_tier(0, 0, key)
    own = [pools.new_load(fetches=True) for _ in range(3)]
    fetch = [pools.behind_unit(KV, 1, key, take=False) for key in (b"a", b"b")]
    pools.mover.carry_out([fetch[0], pools.unit(KV, 3, 1, own[0], key=b"a"), fetch[1]])
    assert pools.arrives(own[0]) is False
    pools.mover.to_device.wait_for(own[0])
    pools.mover.carry_out([pools.unit(KV, 3, 1, own[1], key=b"b")])
    assert pools.arrives(own[1]) is True and pools.is_right(own[1])
    pools.mover.carry_out([pools.unit(KV, 3, 1, own[2], key=b"a")])
    assert pools.arrives(own[2]) is False


@pytest.mark.parametrize("written_again", [False, True])
def test_an_entry_that_arrived_for_one_load_and_is_gone_is_a_miss_for_the_other(pools, written_again):
    """And the entry that its page went to is right. The first may have gone back to the tier, which had lost it."""
    for index in range(2):
        pools.write(KV, index, 1.0 + index)
    pools.give_to_tier(0, 0, b"a")
    first, second = (pools.new_load(fetches=True) for _ in range(2))
    units = [pools.unit(KV, index, 1, load, key=b"a") for index, load in ((3, first), (4, second))]
    pools.mover.carry_out([pools.behind_unit(KV, 1, b"a", take=False), *units])
    assert pools.arrives(first) is True and pools.is_right(first)
    if written_again:
        pools.mover.carry_out([pools.behind_unit(KV, 1, b"a", take=True)])
        assert pools.mover.behind.threads.drain(HANG_S)
    pools.store(1, 1, b"b")
    assert pools.arrives(second) is False
    assert pools.load(5, 1, b"b") and pools.value(5) == 2.0


@pytest.mark.parametrize("mamba_layers", [0, 3])
def test_an_entry_is_not_here_until_it_has_arrived(tier, mamba_layers):
    """Also where it was before. A rank without layers waits for its empty entry, as the others do: they agree on the load."""
    pools, kind = Pools(mamba_layers=mamba_layers, tier=tier), KV if mamba_layers else STATE
    pools.give_to_tier(1, 5, kind=kind)
    for entry in (5, 6):
        tier.may_read.clear()
        load = pools.bring(2, entry, kind=kind)
        assert pools.arrives(load, 0.0) is None
        tier.may_read.set()
        assert pools.arrives(load) and pools.is_right(load)
    pools.mover.close()


def test_a_load_that_fetches_also_needs_what_was_just_stored(pools):
    """Its copy to the host need not be launched yet."""
    for index in range(2):
        pools.write(KV, index, 1.0 + index)
    pools.give_to_tier(0, 0)
    pools.mover.carry_out([pools.behind_unit(KV, 1, b"k", take=False)])
    load = pools.new_load(fetches=True)
    units = [pools.unit(KV, 3, 1, load), pools.unit(KV, 4, 2, load, key=b"new")]
    pools.mover.carry_out([pools.unit(KV, 1, 2, key=b"new"), *units])
    assert pools.mover.fetch(load.load_id, time.monotonic() + HANG_S, wait=True) is LoadState.COPYING
    assert pools.is_right(load) and [pools.value(index) for index in (3, 4)] == [1.0, 2.0]


@pytest.mark.parametrize("end", ["arrives", "late", "late before"])
def test_what_has_arrived_is_loaded_while_the_rest_is_read(pools, tier, end, monkeypatch):
    """If the load is late, the model waits for what was launched of it, and then all of it is zeros."""
    monkeypatch.setattr(behind, "GROUP_BYTES", 1)
    keys = (b"a", b"b")
    for index, key in enumerate(keys):
        pools.write(KV, index, 1.0 + index)
        pools.give_to_tier(index, index, key)
        pools.write(KV, 5 + index, 9.0)
    waits: list[Any] = []
    tier.slow = {b"b"} if end != "late before" else {b"a", b"b"}
    tier.may_read.clear()
    monkeypatch.setattr(pools.mover.to_device.queue, "wait", waits.append)
    load = pools.new_load(fetches=True)
    fetch = [pools.behind_unit(KV, 2 + index, key, take=False) for index, key in enumerate(keys)]
    units = [pools.unit(KV, 5 + index, 2 + index, load, key=key) for index, key in enumerate(keys)]
    pools.mover.carry_out([*fetch, *units])

    def is_loaded() -> bool:
        assert pools.arrives(load, 0.1) is None
        return (pools.value(5), pools.value(6)) == (9.0 if end == "late before" else 1.0, 9.0)

    wait_until(is_loaded, "what has arrived is loaded, and nothing else")
    if end == "arrives":
        tier.may_read.set()
        assert pools.arrives(load) is True and not pools.mover.to_device.is_wrong(load)
        assert (pools.value(5), pools.value(6)) == (1.0, 2.0)
        return
    assert pools.mover.fetch(load.load_id, 0.0, wait=False) is LoadState.LATE
    assert len(waits) == (end != "late before")
    assert (pools.value(5), pools.value(6)) == (0.0, 0.0)


def test_a_page_that_is_being_read_into_takes_nothing_else(pools, tier, caplog):
    """The disk hangs, and the page's load was given up. What goes there is lost, and nothing waits for the disk."""
    pools.write(KV, 0, 3.0)
    pools.give_to_tier(0, 0, b"a")
    tier.may_read.clear()
    load = pools.bring(3, 1, b"a")
    assert tier.began.wait(HANG_S) and pools.arrives(load, 0.01) is None
    pools.mover.to_device.wait_for(load)
    for _ in range(2):  # the page stays taken
        pools.mover.carry_out([pools.unit(KV, 0, 1, key=b"b"), pools.unit(KV, 0, 2, key=b"c")])
    assert "have no place" in caplog.text
    assert not pools.load(4, 1, b"b") and pools.load(4, 2, b"c")
    load = pools.bring(3, 1, b"a")
    tier.may_read.set()
    assert pools.arrives(load) is False
    pools.mover.to_device.wait_for(load)
    pages = pools.unit(KV, 0, 1).pages
    wait_until(lambda: not pools.mover.behind.threads.overwrite(pages), "the disk answers")
    pools.store(0, 1, b"b")
    assert pools.load(5, 1, b"b") and pools.value(5) == 3.0


# -- checksums ---------------------------------------------------------------------------------------------------------


def test_the_checksum_of_an_entry_from_behind_goes_back_with_it(pools, tier, monkeypatch):
    """Also if an earlier store brings older checksums to the host after the entry has arrived there."""
    pools.write(KV, 0, 3.0)
    pools.give_to_tier(0, 0)
    stored = dict(tier.entries)
    assert pools.arrives(pools.bring(3, 1))
    sums = torch.zeros_like(pools.mover.pages.sums)
    monkeypatch.setattr(pools.mover.pages, "sums_seen", sums)  # as of before it arrived
    tier.entries.clear()
    pools.mover.carry_out([pools.behind_unit(KV, 1, b"k", take=True)])
    assert pools.mover.behind.threads.drain(HANG_S) and tier.entries == stored


def test_the_checksum_of_an_entry_from_behind_does_not_go_back_with_another_of_its_name(pools, tier):
    """One that was computed again, in the same page: it may have other bytes."""
    pools.give_to_tier(0, 0)
    assert pools.arrives(pools.bring(3, 1))
    tier.entries.clear()
    pools.write(KV, 0, 5.0)
    pools.give_to_tier(0, 1)
    load = pools.bring(3, 2)
    assert pools.arrives(load) and pools.is_right(load) and pools.value(3) == 5.0


# -- what is written ---------------------------------------------------------------------------------------------------


def test_what_is_not_on_the_host_is_not_written(pools, tier):
    """Else other bytes would get this name, with a checksum that is right for them."""
    pools.store(0, 0, b"other")
    pools.mover.carry_out([pools.behind_unit(KV, 0, b"k", take=True)])
    assert pools.mover.behind.threads.drain(HANG_S) and tier.entries == {} and pools.behind_stats().full == 1


def test_an_entry_that_is_offered_twice_is_written_once(pools, tier):
    tier.may_write.clear()
    pools.offer(0, 0)
    pools.mover.carry_out([pools.behind_unit(KV, 0, b"k", take=True)])
    tier.may_write.set()
    assert pools.mover.behind.threads.drain(HANG_S)
    (stored,) = tier.entries.values()
    assert pools.behind_stats().bytes_stored == len(stored[1]) and pools.behind_stats().full == 0


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_thread_waits_for_the_transfers_that_use_its_pages(pools, tier, way, monkeypatch):
    """For those that are on their way when it is asked: stores write there, and loads read there."""
    mover, done, marks = pools.mover, [], (OnItsWay(), OnItsWay())
    for mark, name in zip(marks, ("stores", "loads"), strict=True):
        mark.synchronize = lambda name=name: done.append(name)
    pools.give_to_tier(0, 0, b"a")
    pools.store(0, 1, b"b")
    mover.to_host.send()
    mover.to_host.stored, mover.to_device.last = marks
    for name in ("put", "get"):
        original = getattr(tier, name)
        monkeypatch.setattr(tier, name, lambda *args, f=original, name=name: (done.append(name), f(*args))[1])
    if way == "write":
        mover.carry_out([pools.behind_unit(KV, 1, b"b", take=True)])
        assert mover.behind.threads.drain(HANG_S) and done == ["stores", "put"]
    else:
        assert pools.arrives(pools.bring(3, 2, b"a"))
        assert done == ["stores", "loads", "get"]


def test_what_is_overwritten_while_a_thread_copies_it_is_not_written(pools, tier, monkeypatch):
    """The thread looks again after it has copied the bytes and the checksum."""
    mover, seen_checksum = pools.mover, pools.mover.pages.seen_checksum

    def overwritten(page: int, tag: Tag) -> int:
        assert not mover.behind.threads.overwrite([page])
        return seen_checksum(page, tag)

    monkeypatch.setattr(mover.pages, "seen_checksum", overwritten)
    pools.give_to_tier(0, 0)
    assert tier.entries == {} and pools.behind_stats().full == 1 and pools.behind_stats().bytes_stored == 0


@pytest.mark.parametrize("page", [0, -1])
def test_what_is_written_late_is_what_was_stored_or_nothing(pools, tier, page):
    """The disk takes its time. One of the entry's pages goes to another entry, before a thread gets to it."""
    tier.may_write.clear()
    for index in range(4):  # more than there are threads
        pools.offer(index, index, str(index).encode(), STATE)
    other = pools.unit(KV, 0, 9, key=b"other")
    pages = (pools.unit(STATE, 0, 3).pages[page], *other.pages[1:])
    pools.mover.carry_out([other._replace(pages=pages)])
    tier.may_write.set()
    assert pools.mover.behind.threads.drain(HANG_S) and pools.behind_stats().full == 1
    assert sorted(key for _, _, key in tier.entries) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("method", ["put", "wants", "get"])
def test_a_tier_that_raises_loses_this_entry_only(pools, tier, method, monkeypatch, caplog):
    """Its threads live on. What it cannot read is a miss, and what it cannot write is counted."""
    original = getattr(tier, method)

    def fails(namespace: bytes, what: Any, *more: Any) -> Any:
        if getattr(what, "tag", what).key.startswith(b"bad"):
            raise LookupError("the disk is on fire")
        return original(namespace, what, *more)

    monkeypatch.setattr(tier, method, fails)
    keys = [b"bad 0", b"bad 1", b"bad 2", b"bad 3", b"good"]  # more than there are threads
    for entry, key in enumerate(keys):
        pools.write(KV, entry, 1.0 + entry)
        pools.give_to_tier(entry, entry, key)
    assert len(tier.entries) == (5 if method == "get" else 1)
    assert pools.behind_stats().full == (0 if method == "get" else 4)
    for key in keys[:-1]:
        load = pools.bring(7, 9, key)
        assert pools.arrives(load) is False
        pools.mover.to_device.wait_for(load)
    load = pools.bring(7, 9, b"good")
    assert pools.arrives(load) and pools.is_right(load) and pools.value(7) == 5.0
    assert caplog.text.count("the disk is on fire") == 4


def test_entries_of_other_weights_are_not_moved(pools, tier):
    """Nor is the tier asked for them."""
    pools.give_to_tier(0, 0)
    behind: TierBehind = pools.mover.behind._behind
    behind.invalidate(1)
    load = pools.bring(3, 1)
    assert pools.arrives(load) is False and not tier.began.is_set()
    pools.mover.to_device.wait_for(load)
    pools.give_to_tier(0, 2, b"late")
    assert len(tier.entries) == 1 and pools.behind_stats().full == 1


# -- the end -----------------------------------------------------------------------------------------------------------


def offered(tier: SteadyTier) -> Pools:
    """Four entries wait for the tier, more than there are threads."""
    pools = Pools(tier=tier)
    tier.may_write.clear()
    for index in range(4):
        pools.offer(index, index, str(index).encode())
    return pools


@pytest.mark.parametrize("how", ["closed", "forgotten", "end of the process"])
def test_an_arena_that_ends_writes_what_is_left_and_ends_its_threads(tier, how, monkeypatch):
    monkeypatch.setattr(tier, "wait_s", HANG_S)
    monkeypatch.setattr(jobs, "_END_S", HANG_S)
    pools = offered(tier)
    threads = pools.mover.behind.threads._threads
    assert len(threads) == 4 and all(thread.is_alive() for thread in threads)
    threading.Timer(0.05, tier.may_write.set).start()
    if how == "closed":
        pools.mover.close()
    elif how == "forgotten":
        del pools
        gc.collect()
    else:
        pools.mover.behind.threads.finish()
        assert len(tier.entries) == 4
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads) and len(tier.entries) == 4


def test_a_process_that_ends_does_not_wait_for_a_disk_that_hangs(tier, monkeypatch):
    monkeypatch.setattr(tier, "wait_s", 0.01)
    monkeypatch.setattr(jobs, "_END_S", 0.01)
    offered(tier).mover.behind.threads.finish()
    assert tier.entries == {}
    tier.may_write.set()
