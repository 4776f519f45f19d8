"""The tier on Mooncake Store, with a fake of it: what is asked, its memory, its client and its master. The rest: ``test_tiers.py``."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hybrid_prefix.tiers import mooncake, mooncake_client
from megatron_hybrid_prefix.tiers.base import HEADER_BYTES
from megatron_hybrid_prefix.tiers.mooncake import MooncakeTier
from megatron_hybrid_prefix.tiers.mooncake_client import MooncakeSettings
from tests.core.entries import BLOCK, KV, NAME, SIZE, STATE, holds, key, keys, prompt_tags, put, raises, tag
from tests.core.tier_kinds import Mooncake
from tests.harness.fake_mooncake import FakeCluster, FakeStore
from tests.harness.limits import HANG_S, wait_until


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mooncake:
    return Mooncake(tmp_path, monkeypatch)


@pytest.fixture
def cluster(store: Mooncake) -> FakeCluster:
    return store.cluster


def tier_of(settings: MooncakeSettings) -> MooncakeTier:
    return MooncakeTier(settings, block_tokens=BLOCK, make_ranking=lambda: None)


# -- entries -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_one_question(store, cluster):
    put(store.tier(), *prompt_tags(1, 3))
    tier = store.tier(refresh_s=HANG_S)
    cluster.questions.clear()
    assert not tier.contains(NAME, KV, key(1, 1)) and cluster.questions == []  # it does not know yet, and asks nobody
    for _ in range(2):
        assert tier.kv_depth(NAME, keys(1, 5), 0) == 3 and tier.state_depth(NAME, keys(1, 5), 0, 3) == 3
    assert [len(names) for names in cluster.questions] == [10]
    assert tier.contains(NAME, KV, key(1, 3)) and not tier.contains(NAME, KV, key(1, 4))
    assert tier.kv_depth(NAME, keys(2, 2), 0) == 0 and len(cluster.questions) == 2


def test_what_was_never_asked_is_not_known_however_short_the_machine_runs(store, cluster, monkeypatch):
    put(store.tier(), *prompt_tags(1, 3))
    tier = store.tier(refresh_s=HANG_S)
    clock = SimpleNamespace(monotonic=lambda: 1.0)  # a second after the start of the machine
    monkeypatch.setattr(mooncake, "time", clock)
    assert tier.kv_depth(NAME, keys(1, 5), 0) == 3


def test_a_prompt_that_is_worth_no_load_is_not_asked(store, cluster):
    tier = store.tier(min_tokens=3 * BLOCK)
    assert (
        tier.kv_depth(NAME, keys(1, 2), 0) == 0 == tier.state_depth(NAME, keys(1, 5), 0, 2) and cluster.questions == []
    )


def test_what_is_here_is_not_wanted_again(store, cluster):
    one, other, tags = store.tier(), store.tier(), prompt_tags(1, 1)
    assert one.wants(NAME, tags[0]) and put(one, *tags) == [True] * 2
    assert not one.wants(NAME, tags[0]) and not other.wants(NAME, tags[0])
    cluster.objects.clear()  # the master evicts
    assert one.wants(NAME, tags[0])


def test_memory_is_registered_once_per_thread(store, cluster):
    """It grows to the largest entry. What is not used any more stays: a late transfer may write there."""
    tier, tags = store.tier(), prompt_tags(1, 3)
    memory = tier._client._opened.store.memory
    assert put(tier, *tags) == [True] * 4 and all(holds(tier, each) for each in tags)
    sizes = sorted(HEADER_BYTES + size for size in SIZE.values())
    assert sorted(memory.values()) == sizes
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.extend(holds(tier, each) for each in reversed(tags)))
    other.start()
    other.join()
    assert found == [True] * 4 and sorted(memory.values()) == [*sizes, sizes[-1]] and tier.counts == {}
    kept = {each.ctypes.data: each.nbytes for each in tier._client._registered}
    assert kept == memory


def test_no_transfer_writes_to_the_memory_of_others(store, cluster, monkeypatch):
    """The network may delay one until the call is over, and the pages belong to another entry."""
    tier, of = store.tier(), tag(KV, 1, 1)
    put(tier, of)
    into: list[int] = []
    get = FakeStore.batch_get_into_multi_buffers
    monkeypatch.setattr(
        FakeStore,
        "batch_get_into_multi_buffers",
        lambda self, names, pointers, sizes: into.extend(pointers[0]) or get(self, names, pointers, sizes),
    )
    assert holds(tier, of) and into == [tier._mine.memory.ctypes.data]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_not_here_until_they_are_removed(store, cluster):
    """As the device finds them. Until then the object does not exist for this process."""
    tier, tags = store.tier(), prompt_tags(1, 2)
    put(tier, *tags)
    assert all(holds(tier, each) for each in tags)
    cluster.gate.clear()  # it cannot be removed yet
    tier.remove(NAME, [tags[-1]])
    assert tier.wants(NAME, tags[-1])
    assert tier.state_depth(NAME, keys(1, 2), 1, 2) == 1 and not tier.contains(NAME, STATE, key(1, 2))
    cluster.gate.set()
    store.settle(tier)
    assert store.name(NAME, tags[-1]) not in cluster.objects and tier.counts == {"wrong": 1}


def test_a_wrong_object_that_cannot_be_removed_is_not_written_over(store, cluster, monkeypatch):
    """The put would say yes and keep the old bytes."""
    tier, of = store.tier(), tag(KV, 1, 1)
    put(tier, of)
    with monkeypatch.context() as broken:
        broken.setattr(FakeStore, "remove", lambda *arguments: -706)
        tier.remove(NAME, [of])
        store.settle(tier)
        assert put(tier, of) == [False] and tier.counts == {"wrong": 1, "write_wrong": 1}
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 0
    assert put(tier, of, writer=1) == [True] and holds(tier, of, writer=1)


def test_a_transfer_that_breaks_leaves_the_object(store, cluster):
    tier, of = store.tier(), tag(KV, 1, 1)
    put(tier, of)
    cluster.broken_transfers = 1
    assert not holds(tier, of) and holds(tier, of) and cluster.removals == []


def test_a_master_that_is_away_and_returns(store, cluster):
    tier, tags = store.tier(), prompt_tags(1, 1)
    put(tier, *tags)
    cluster.is_away = True
    assert not holds(tier, tags[0]) and tier._client.is_down
    cluster.questions.clear()
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 0 and put(tier, *tags) == [False] * 2 and not holds(tier, tags[0])
    assert tier.counts == {"no_master": 5}
    wait_until(lambda: len(cluster.questions) > 1, "it is looked for", pause_s=0.001)
    assert all(len(names) == 1 for names in cluster.questions)  # by the thread alone
    cluster.restart()
    wait_until(lambda: not tier._client.is_down, "it is found", pause_s=0.001)
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 0 and not holds(tier, tags[0])  # it has forgotten all
    assert put(tier, *tags) == [True] * 2 and tier.kv_depth(NAME, keys(1, 1), 0) == 1
    assert tier.counts == {"no_master": 5, "gone": 1}


def test_a_master_whose_port_is_closed_is_not_called(store, cluster, monkeypatch):
    """A call that is under way when the process ends would abort it."""
    tier, looks = store.tier(), []

    def closed(settings: MooncakeSettings) -> str:
        looks.append(settings)
        raise ValueError("cannot reach it")

    monkeypatch.setattr(MooncakeSettings, "own_address", closed)
    tier._client.note_down()
    wait_until(lambda: len(looks) > 2, "it is looked for", pause_s=0.001)
    assert cluster.questions == [] and tier._client.is_down
    tier._client.finish()
    assert not tier._client._thread.is_alive()


def test_the_engine_waits_once_for_an_answer_that_is_late(store, cluster):
    tier = store.tier(ask_s=0.001)
    put(tier, *prompt_tags(1, 1))
    cluster.gate.clear()
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 0 and tier.counts == {"late_answer": 1}
    tier._client._settings = replace(tier._client._settings, ask_s=HANG_S)
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 0 and tier.counts == {"late_answer": 2}  # did not wait
    cluster.gate.set()
    store.settle(tier)
    assert tier.kv_depth(NAME, keys(1, 1), 0) == 1


@pytest.mark.parametrize("end", ["close", "collect"])
def test_the_client_is_closed_after_its_last_call(store, cluster, end):
    tier, of = store.tier(), tag(KV, 1, 1)
    client = tier._client
    store = client._opened.store
    put(tier, of)
    tier.remove(NAME, [of])
    wait_until(lambda: cluster.removals, "the thread has removed it", pause_s=0.001)
    cluster.gate.clear()
    caller = threading.Thread(target=tier._has_other_size, args=("x", -800, 1))
    caller.start()
    wait_until(lambda: cluster.waiting, "the call has begun", pause_s=0.001)
    if end == "close":
        tier.close()
        wait_until(lambda: client._opened is None, "the thread has been told", pause_s=0.001)
        assert put(tier, of) == [False] and not holds(tier, of)
    else:
        del tier  # the thread is the last who has the tier
    assert not store.closed
    cluster.gate.set()
    caller.join()
    wait_until(lambda: store.closed, "it is closed", pause_s=0.001)


def test_what_is_missing_is_one_line(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, but nobody listens
        settings = MooncakeSettings(master_host="127.0.0.1", master_port=port)
        with pytest.raises(ValueError, match=f"cannot reach Mooncake's master at 127.0.0.1:{port}"):
            tier_of(settings)
        free.listen()
        monkeypatch.setattr(mooncake_client, "new_store", lambda: raises(ImportError("libibverbs.so.1: no such file")))
        with pytest.raises(ValueError, match="libraries: libibverbs"):
            tier_of(settings)
        monkeypatch.setattr(mooncake_client, "new_store", lambda: FakeStore(away))
        away = FakeCluster()
        away.is_away = True
        with pytest.raises(ValueError, match="refuses this client: error -1"):
            tier_of(settings)
