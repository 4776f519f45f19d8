"""The tier on Mooncake Store, with a fake of it: what matches, what is asked, and what is counted when something fails."""

from __future__ import annotations

import logging
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hybrid_prefix.tiers import mooncake, mooncake_client
from megatron_hybrid_prefix.tiers.base import TierBehind
from megatron_hybrid_prefix.tiers.header import HEADER_BYTES
from megatron_hybrid_prefix.tiers.mooncake import MooncakeTier
from megatron_hybrid_prefix.tiers.mooncake_client import MooncakeSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag
from tests.core.entries import BLOCK, KV, NAME, SIZE, STATE, checksum, data, entry, key, keys, prompt_tags, tag
from tests.harness.fake_mooncake import FakeCluster, FakeStore, use_fake_mooncake
from tests.harness.limits import HANG_S, wait_until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    found = FakeCluster()
    use_fake_mooncake(monkeypatch, found)
    return found


def tier_of(settings: MooncakeSettings) -> MooncakeTier:
    return MooncakeTier(settings, block_tokens=BLOCK, make_ranking=lambda: None)


class Process:
    """A tier as of one process, in one namespace."""

    def __init__(self, name: bytes = NAME, **settings: Any) -> None:
        settings = {"master_host": "127.0.0.1", "min_tokens": 0, "ask_s": HANG_S, "refresh_s": 1e-9} | settings
        self.tier, self.name = tier_of(MooncakeSettings(**settings)), name

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.tier.counts)

    def put(self, *tags: Tag, writer: int = 0) -> list[bool]:
        return [self.tier.put(self.name, entry(each, writer)) for each in tags]

    def holds(self, of: Tag, writer: int = 0) -> bool:
        memory = bytearray(SIZE[of.kind])
        views = [memoryview(memory)[:700], memoryview(memory)[700:700], memoryview(memory)[700:]]
        own = self.tier.get(self.name, of, views)
        assert threading.get_ident() not in self.tier._reads
        assert own is None or (own, memory) == (checksum(of, writer), data(of, writer))
        return own is not None

    def kv_depth(self, prompt: list[bytes], first: int) -> int:
        return self.tier.kv_depth(self.name, prompt, first)

    def state_depth(self, prompt: list[bytes], after: int, limit: int) -> int:
        return self.tier.state_depth(self.name, prompt, after, limit)

    def contains(self, kind: EntryKind, of: bytes) -> bool:
        return self.tier.contains(self.name, kind, of)

    def wants(self, of: Tag) -> bool:
        return self.tier.wants(self.name, of)

    def remove(self, of: Tag) -> None:
        self.tier.remove(self.name, [of])

    def settle(self) -> None:
        """The thread has done what it was given."""
        over = threading.Event()
        self.tier._asker.later(over.set)
        assert over.wait(HANG_S)


def object_of(process: Process, of: Tag) -> str:
    return mooncake._object(process.name, of.kind, of.key)


# -- entries -----------------------------------------------------------------------------------------------------------


def test_what_one_process_puts_another_gets(cluster):
    one, other = Process(), Process()
    tags = prompt_tags(1, 3)
    assert one.put(*tags) == [True] * 4
    for process in (one, other):
        prompt = keys(1, 5)
        assert process.kv_depth(prompt, 0) == 3 == process.kv_depth(prompt, 2) and process.kv_depth(prompt, 4) == 4
        assert process.state_depth(prompt, 0, 5) == 3 == process.state_depth(prompt, 3, 5)
        assert process.state_depth(prompt, 0, 2) == 0
        assert all(process.holds(each) for each in tags) and not process.holds(tag(KV, 2, 1))
        assert process.counts == {"gone": 1}


def test_a_prompt_is_one_question(cluster):
    Process().put(*prompt_tags(1, 3))
    process = Process(refresh_s=HANG_S)
    cluster.questions.clear()
    assert not process.contains(KV, key(1, 1)) and cluster.questions == []  # it does not know yet, and asks nobody
    for _ in range(2):
        assert process.kv_depth(keys(1, 5), 0) == 3 and process.state_depth(keys(1, 5), 0, 3) == 3
    assert [len(names) for names in cluster.questions] == [10]
    assert process.contains(KV, key(1, 3)) and not process.contains(KV, key(1, 4))
    assert process.kv_depth(keys(2, 2), 0) == 0 and len(cluster.questions) == 2


def test_what_was_never_asked_is_not_known_however_short_the_machine_runs(cluster, monkeypatch):
    Process().put(*prompt_tags(1, 3))
    process = Process(refresh_s=HANG_S)
    clock = SimpleNamespace(monotonic=lambda: 1.0)  # a second after the start of the machine
    monkeypatch.setattr(mooncake, "time", clock)
    assert process.kv_depth(keys(1, 5), 0) == 3


def test_a_prompt_that_is_worth_no_load_is_not_asked(cluster):
    process = Process(min_tokens=3 * BLOCK)
    assert process.kv_depth(keys(1, 2), 0) == 0 == process.state_depth(keys(1, 5), 0, 2) and cluster.questions == []


@pytest.mark.parametrize("other", ["namespace", "key", "parent", "kind"])
def test_another_entry_never_matches(cluster, other):
    """Also where its object has the name of the one that is asked for."""
    one, wanted = Process(), tag(STATE, 1, 2)
    one.put(*prompt_tags(1, 2), *prompt_tags(2, 2))
    if other == "namespace":
        another = Process(name=b"m" * 16)
        assert another.kv_depth(keys(1, 2), 0) == 0 and not another.holds(wanted)
        another.put(*prompt_tags(1, 2), writer=1)
        its = object_of(another, wanted)
    else:
        its = object_of(one, {"key": tag(STATE, 2, 2), "parent": tag(STATE, 2, 2), "kind": tag(KV, 1, 2)}[other])
    cluster.objects[object_of(one, wanted)] = cluster.objects[its]
    assert not one.holds(wanted) and one.counts == {"not_valid": 1}
    one.settle()
    assert one.put(wanted) == [True] and one.holds(wanted)


def test_what_is_here_is_not_wanted_again(cluster):
    one, other, tags = Process(), Process(), prompt_tags(1, 1)
    assert one.wants(tags[0]) and one.put(*tags) == [True] * 2
    assert not one.wants(tags[0]) and not other.wants(tags[0])
    cluster.objects.clear()  # the master evicts
    assert one.wants(tags[0])


def test_new_weights_have_another_namespace(cluster):
    old, new = b"a" * 16, b"b" * 16
    weights, process = [old], Process(name=old)
    behind = TierBehind(process.tier)
    assert not behind.namespace() and behind.kv_depth(keys(1, 1), 0) == 0 and cluster.questions == []
    behind.name_entries(lambda: weights[0])
    assert process.put(*prompt_tags(1, 1)) == [True] * 2 and behind.kv_depth(keys(1, 1), 0) == 1
    weights[0] = new
    behind.invalidate(1)
    assert behind.kv_depth(keys(1, 1), 0) == 0 and behind.namespace(0) == b"" and behind.namespace(1) == new
    assert not Process(name=new).holds(tag(KV, 1, 1, epoch=1))
    weights[0] = old
    behind.invalidate(0)
    assert behind.kv_depth(keys(1, 1), 0) == 1 and process.holds(tag(KV, 1, 1))


def test_memory_is_registered_once_per_thread(cluster):
    """It grows to the largest entry. What is not used any more stays: a late transfer may write there."""
    process, tags = Process(), prompt_tags(1, 3)
    memory = process.tier._client._store.memory
    assert process.put(*tags) == [True] * 4 and all(map(process.holds, tags))
    sizes = sorted(HEADER_BYTES + size for size in SIZE.values())
    assert sorted(memory.values()) == sizes
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.extend(map(process.holds, reversed(tags))))
    other.start()
    other.join()
    assert found == [True] * 4 and sorted(memory.values()) == [*sizes, sizes[-1]] and process.counts == {}
    kept = {each.ctypes.data: each.nbytes for each in process.tier._client._registered}
    assert kept == memory


def test_no_transfer_writes_to_the_memory_of_others(cluster, monkeypatch):
    """The network may delay one until the call is over, and the pages belong to another entry."""
    process, of = Process(), tag(KV, 1, 1)
    process.put(of)
    into: list[int] = []
    get = FakeStore.batch_get_into_multi_buffers
    monkeypatch.setattr(
        FakeStore,
        "batch_get_into_multi_buffers",
        lambda self, names, pointers, sizes: into.extend(pointers[0]) or get(self, names, pointers, sizes),
    )
    assert process.holds(of) and into == [process.tier._mine.memory.ctypes.data]


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["header bit", "truncated", "longer", "other content"])
def test_an_object_that_is_not_valid_is_removed_and_written_again(cluster, fault):
    one, other = Process(), Process()
    of = tag(KV, 1, 1)
    one.put(of)
    content = cluster.objects[object_of(one, of)]
    cluster.objects[object_of(one, of)] = {
        "header bit": bytearray([content[0] ^ 4]) + content[1:],
        "truncated": content[:-1],
        "longer": content + b"x",
        "other content": bytearray(len(content)),
    }[fault]
    assert not one.holds(of) and one.counts == {"not_valid": 1}
    one.settle()
    assert cluster.objects == {} and cluster.removals[-1][1]  # although it was read just now
    assert other.put(of) == [True] and one.holds(of) and other.holds(of)


def test_every_bit_of_a_header_counts(cluster):
    process, of = Process(), tag(KV, 1, 1)
    process.put(of)
    content = cluster.objects[object_of(process, of)]
    for bit in range(8 * HEADER_BYTES):
        spoilt = bytearray(content)
        spoilt[bit // 8] ^= 1 << bit % 8
        cluster.objects[object_of(process, of)] = spoilt
        assert not process.holds(of)
        process.settle()
    assert process.counts == {"not_valid": 8 * HEADER_BYTES}


def test_wrong_bytes_are_removed_and_written_again(cluster):
    """As the device finds them. Until then the object does not exist for this process."""
    process, tags = Process(), prompt_tags(1, 2)
    process.put(*tags)
    assert all(process.holds(each) for each in tags)
    cluster.gate.clear()  # it cannot be removed yet
    process.remove(tags[-1])
    assert process.wants(tags[-1])
    assert process.state_depth(keys(1, 2), 1, 2) == 1 and not process.contains(STATE, key(1, 2))
    cluster.gate.set()
    process.settle()
    assert object_of(process, tags[-1]) not in cluster.objects and process.counts == {"wrong": 1}
    assert process.put(tags[-1], writer=1) == [True] and process.holds(tags[-1], writer=1)
    assert process.state_depth(keys(1, 2), 0, 2) == 2


def test_a_wrong_object_that_cannot_be_removed_is_not_written_over(cluster, monkeypatch):
    """The put would say yes and keep the old bytes."""
    process, of = Process(), tag(KV, 1, 1)
    process.put(of)
    with monkeypatch.context() as broken:
        broken.setattr(FakeStore, "remove", lambda *arguments: -706)
        process.remove(of)
        process.settle()
        assert process.put(of) == [False] and process.counts == {"wrong": 1, "write_wrong": 1}
    assert process.kv_depth(keys(1, 1), 0) == 0
    assert process.put(of, writer=1) == [True] and process.holds(of, writer=1)


def test_two_writers_of_one_key_with_other_bytes(cluster):
    """The first one's bytes stay, with its checksum. Both processes read them."""
    one, other = Process(), Process()
    of = tag(KV, 1, 1)
    assert one.put(of) == [True] == other.put(of, writer=1)
    assert one.holds(of) and other.holds(of)
    assert one.counts == {} == other.counts


def test_a_transfer_that_breaks_leaves_the_object(cluster, caplog):
    process, of = Process(), tag(KV, 1, 1)
    with caplog.at_level(logging.ERROR):
        cluster.broken_transfers = 2
        assert process.put(of, of) == [False] * 2
        assert process.put(of) == [True]
        cluster.broken_transfers = 1
        assert not process.holds(of) and process.holds(of)
    assert process.counts == {"write_transfer_failed": 2, "read_transfer_failed": 1} and cluster.removals == []
    assert len(caplog.records) == 2  # once for each reason


def test_a_full_store(cluster):
    process = Process()
    cluster.room_bytes = 3000
    assert process.put(*prompt_tags(1, 2)) == [True, True, False] and process.counts == {"write_no_room": 1}


def test_a_master_that_is_away_and_returns(cluster):
    process, tags = Process(), prompt_tags(1, 1)
    process.put(*tags)
    cluster.is_away = True
    assert not process.holds(tags[0]) and process.tier._asker.is_down
    cluster.questions.clear()
    assert process.kv_depth(keys(1, 1), 0) == 0 and process.put(*tags) == [False] * 2 and not process.holds(tags[0])
    assert process.counts == {"no_master": 5}
    wait_until(lambda: len(cluster.questions) > 1, "it is looked for", pause_s=0.001)
    assert all(len(names) == 1 for names in cluster.questions)  # by the thread alone
    cluster.restart()
    wait_until(lambda: not process.tier._asker.is_down, "it is found", pause_s=0.001)
    assert process.kv_depth(keys(1, 1), 0) == 0 and not process.holds(tags[0])  # it has forgotten all
    assert process.put(*tags) == [True] * 2 and process.kv_depth(keys(1, 1), 0) == 1
    assert process.counts == {"no_master": 5, "gone": 1}


def test_a_master_whose_port_is_closed_is_not_called(cluster, monkeypatch):
    """A call that is under way when the process ends would abort it."""
    process, looks = Process(), []

    def closed(settings: MooncakeSettings) -> str:
        looks.append(settings)
        raise ValueError("cannot reach it")

    monkeypatch.setattr(MooncakeSettings, "own_address", closed)
    process.tier._asker.note_down()
    wait_until(lambda: len(looks) > 2, "it is looked for", pause_s=0.001)
    assert cluster.questions == [] and process.tier._asker.is_down
    process.tier._asker.finish()
    assert not process.tier._asker._thread.is_alive()


def test_the_engine_waits_once_for_an_answer_that_is_late(cluster):
    process = Process(ask_s=0.001)
    process.put(*prompt_tags(1, 1))
    cluster.gate.clear()
    assert process.kv_depth(keys(1, 1), 0) == 0 and process.counts == {"late_answer": 1}
    process.tier._asker._wait_s = HANG_S
    assert process.kv_depth(keys(1, 1), 0) == 0 and process.counts == {"late_answer": 2}  # did not wait
    cluster.gate.set()
    process.settle()
    assert process.kv_depth(keys(1, 1), 0) == 1


def test_a_read_that_hangs_hides_the_states(cluster):
    process = Process(wait_s=1e-9)
    process.put(*prompt_tags(1, 1))
    process.tier._reads[0] = 0.0  # a thread has read since the machine was started
    assert process.state_depth(keys(1, 1), 0, 1) == 0 and process.counts == {"stuck": 1}
    process.tier._reads.clear()
    assert process.state_depth(keys(1, 1), 0, 1) == 1


@pytest.mark.parametrize("end", ["close", "collect"])
def test_the_client_is_closed_after_its_last_call(cluster, end):
    process, of = Process(), tag(KV, 1, 1)
    client = process.tier._client
    store = client._store
    process.put(of)
    process.remove(of)
    wait_until(lambda: cluster.removals, "the thread has removed it", pause_s=0.001)
    cluster.gate.clear()
    caller = threading.Thread(target=process.tier._has_other_size, args=("x", -800, 1))
    caller.start()
    wait_until(lambda: cluster.waiting, "the call has begun", pause_s=0.001)
    if end == "close":
        process.tier.close()
        wait_until(lambda: client._closed, "the thread has been told", pause_s=0.001)
        assert process.put(of) == [False] and not process.holds(of)
    else:
        del process  # the thread is the last who has the tier
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


def raises(error: Exception) -> None:
    raise error
