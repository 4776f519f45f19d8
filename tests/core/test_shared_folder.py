"""The shared folder: its index, its budget, several processes on it, and files of others. The rest: ``test_tiers.py``."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers import folder as folders
from megatron_hybrid_prefix.tiers import space as spaces
from megatron_hybrid_prefix.tiers.file import HEADER_BYTES, FileTier
from megatron_hybrid_prefix.tiers.folder import FolderSettings
from megatron_hybrid_prefix.tiers.space import FileName
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag
from tests.core.entries import BLOCK, KV, NAME, SIZE, STATE, get, holds, key, keys, prompt_tags, put, raises, tag
from tests.core.tier_kinds import file_name, wait_for_namespace
from tests.harness.limits import HANG_S, wait_until
from tests.harness.selection import mostly_slow

make_ranking = partial(make_eviction_policy, "recompute_cost", state_blocks=SIZE[STATE] / SIZE[KV])


def tier_on(folder: Path, *, budget_bytes: int = 10**9, name: bytes | None = NAME, **settings: Any) -> FileTier:
    """A tier as of one process. It looks at the folder only when told to."""
    settings = {"min_tokens": 0, "refresh_s": 10.0**6} | settings
    tier = FileTier(
        FolderSettings(folder=folder, budget_bytes=budget_bytes, **settings),
        block_tokens=BLOCK,
        make_ranking=make_ranking,
    )
    if name is not None:
        tier.use_namespace(name)
    return tier


def path_of(tier: FileTier, of: Tag) -> Path:
    folder, name = tier.folder.space.place(file_name(of))
    return folder.path / name


def files(folder: Path) -> dict[str, int]:
    """Entries and other files, but locks."""
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def check(folder: Path, *tiers: FileTier) -> None:
    """Each index holds exactly the entries of the folder, and counts their bytes."""
    found = files(folder)
    for tier in tiers:
        tier.folder.look()
        assert tier.folder.bytes_used == sum(found.values())
        sizes, nodes = tier.folder.space.sizes.values(), tier.folder.space._nodes.values()
        listed = {name: size for part in sizes for name, size in part.items()}
        assert listed.items() <= found.items()
        indexed = [
            *(name for each in tier.folder.space._orphans.values() for name in each),
            *(name for node in nodes for name in node.names.values()),
        ]
        assert sorted(map(str, indexed)) == sorted(listed)


@pytest.fixture
def no_grace(monkeypatch):
    """KV that no state needs may go at once."""
    monkeypatch.setattr(spaces, "_GRACE_S", -1.0)


# -- files -----------------------------------------------------------------------------------------------------------


def open_files(folder: Path) -> list[str]:
    """This process's open files below ``folder``."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed by another thread
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EMFILE, errno.EACCES, errno.EISDIR])
def test_a_read_that_fails(tmp_path, monkeypatch, code):
    """No file stays open. What cannot be read tomorrow either is written again."""
    tier, tags, stays = tier_on(tmp_path), prompt_tags(1, 1), code in (errno.EAGAIN, errno.EMFILE)
    put(tier, *tags)
    before = open_files(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", lambda *arguments: raises(OSError(code, "broken")))
        assert not holds(tier, tags[-1]) and open_files(tmp_path) == before
    assert tier.counts == {f"read_{errno.errorcode[code]}": 1} and tier.contains(NAME, STATE, tags[-1].key) == stays
    assert put(tier, tags[-1], writer=1) == [True] and holds(tier, tags[-1], writer=int(not stays))
    check(tmp_path, tier)


def test_new_weights_have_nothing_and_take_nothing_until_a_look(tmp_path):
    """Nobody waits for a disk that hangs, and the old weights have nothing any more."""
    tier, of, other = tier_on(tmp_path), tag(KV, 1, 1), b"m" * 16
    put(tier, of)
    assert not tier.contains(other, KV, of.key) and not holds(tier, of, name=other)
    with tier.folder._looking:  # as a look that does not come back
        tier.use_namespace(other)
        for name in (NAME, other):
            assert tier.kv_depth(name, [of.key], 0) == 0 and not holds(tier, of, name=name)
            assert put(tier, tag(KV, 9, 1), name=name) == [False]  # a thread was late
            tier.remove(name, [of])
    assert tier.counts == {"gone": 3, "old_weights": 2}
    wait_for_namespace(tier, other)
    tier.use_namespace(NAME)
    wait_until(lambda: holds(tier, of), "the first namespace is open again")


def test_a_late_write_deletes_nothing_of_old_weights(tmp_path, no_grace):
    tier, other = tier_on(tmp_path, budget_bytes=6_000), b"m" * 16
    put(tier, *prompt_tags(1, 2))
    old, before = tier.folder.space, files(tmp_path)
    tier.use_namespace(other)
    wait_for_namespace(tier, other)
    assert not tier.folder.write(old, file_name(tag(KV, 1, 3)), [bytes(1_000)]) and files(tmp_path) == before


# -- faults ------------------------------------------------------------------------------------------------------------


class FullDisk:
    """A disk with room for so many bytes of entries. Counts writes that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.writes = room, 0

        def write_all(file: int, content: memoryview) -> None:
            self.writes += len(content) == HEADER_BYTES
            fits = self.room - sum(files(folder).values())
            os.write(file, content[: max(0, fits)])
            if fits < len(content):
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(folders, "write_all", write_all)


@pytest.mark.parametrize("code", mostly_slow([errno.ENOSPC, errno.EDQUOT], errno.ENOSPC))
def test_a_disk_that_is_full_before_the_budget_is(tmp_path, monkeypatch, code):
    """What is worth least makes room, as if the budget were used up."""
    tier = tier_on(tmp_path)
    disk = FullDisk(monkeypatch, tmp_path, 26_000, code)
    for number in range(1, 20):
        assert put(tier, *prompt_tags(number, 2)) == [True] * 3
        assert holds(tier, tag(STATE, 1, 2))  # used, so the others go first
        assert all(holds(tier, each) for each in prompt_tags(number, 2))
    assert disk.writes <= 2 * 3 * 19 and not tier.counts
    check(tmp_path, tier)


def test_a_full_disk_with_nothing_to_delete_is_left_alone(tmp_path, monkeypatch):
    tier = tier_on(tmp_path)
    disk = FullDisk(monkeypatch, tmp_path, 500)
    assert put(tier, *prompt_tags(1, 4)) == [False] * 5
    assert tier.counts == {"write_ENOSPC": 1, "no_room": 4} and disk.writes == 1
    disk.room = 10**6
    monkeypatch.setattr(tier.folder, "_full_until", time.monotonic())  # the pause is over
    assert put(tier, *prompt_tags(1, 4)) == [True] * 5
    check(tmp_path, tier)


def test_a_disk_that_others_fill_is_not_tried_for_ever(tmp_path, monkeypatch, no_grace):
    """What is deleted here is used up elsewhere at once."""
    tier = tier_on(tmp_path)
    for number in range(9):
        put(tier, *prompt_tags(number, 2))
    disk = FullDisk(monkeypatch, tmp_path, 0)
    assert put(tier, *prompt_tags(20, 2)) == [False] * 3
    assert disk.writes == folders._TRIES and tier.counts == {"write_ENOSPC": 1, "no_room": 2}
    assert tier.folder.space.counts[STATE] >= 9 - folders._TRIES
    check(tmp_path, tier)


def test_a_folder_that_is_deleted_is_made_again(tmp_path):
    import shutil

    top = tmp_path / "cache"
    tier = tier_on(top)
    put(tier, *prompt_tags(1, 2))
    shutil.rmtree(top)
    assert not holds(tier, tag(KV, 1, 1)) and tier.counts == {"gone": 1}
    assert put(tier, *prompt_tags(2, 2)) == [True] * 3
    check(top, tier)
    assert all(holds(tier, each) for each in prompt_tags(2, 2))
    assert tier.kv_depth(NAME, [key(1, 1)], 0) == 0
    put(tier, *prompt_tags(1, 2))
    check(top, tier, tier_on(top))


def test_a_reader_keeps_the_file_that_it_opened(tmp_path, monkeypatch):
    """While it reads, the file is replaced, then deleted."""
    one, other = tier_on(tmp_path), tier_on(tmp_path)
    of = tag(KV, 1, 1)
    put(one, of)
    preadv, changes = os.preadv, []

    def replaced_first(*arguments: Any) -> int:
        if not changes:
            changes.append(put(other, of, writer=1))
            other.remove(NAME, [of])
            other.look()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", replaced_first)
    assert holds(one, of) and changes == [[True]]
    wait_until(lambda: not holds(one, of), "the file is deleted")  # by `look` above, or by the thread that looks
    assert one.counts == {"gone": 1}


def test_a_wrong_file_that_was_replaced_stays(tmp_path, monkeypatch):
    tier, of = tier_on(tmp_path), tag(KV, 1, 1)
    put(tier, of)
    monkeypatch.setattr(tier._wake, "set", lambda: None)  # a look that comes late
    tier.remove(NAME, [of])
    assert not tier.contains(NAME, KV, of.key) and put(tier, of, writer=1) == [True]
    tier.look()
    assert holds(tier, of, writer=1)


def test_a_clock_that_jumps_changes_no_answer(tmp_path, monkeypatch):
    tier = tier_on(tmp_path, budget_bytes=16_000)
    now = time.time_ns()
    for number, at in enumerate((now, now - 10**18, now + 10**18, 0)):
        monkeypatch.setattr(time, "time_ns", lambda at=at: at)
        put(tier, *prompt_tags(number, 2))
        assert all(holds(tier, each) for each in prompt_tags(number, 2))
        os.utime(path_of(tier, tag(STATE, number, 2)), ns=(at, at))
    monkeypatch.setattr(spaces, "_GRACE_S", -1.0)
    for number in range(4, 9):
        assert put(tier, *prompt_tags(number, 2)) == [True] * 3
    check(tmp_path, tier)


# -- budget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_look_that_fails_is_repeated(tmp_path, monkeypatch, error):
    tags = prompt_tags(1, 2)
    put(tier_on(tmp_path), *tags)
    with monkeypatch.context() as broken:
        broken.setattr(folders.SharedFolder, "look", lambda self: raises(error("broken")))
        tier = tier_on(tmp_path, refresh_s=0.05)
        wait_until(lambda: tier.counts["look_error"] > 2, "more looks")
    wait_until(lambda: holds(tier, tags[-1]), "a look that succeeds")


def test_an_entry_is_looked_at_once_per_parent(monkeypatch):
    """Many prompts whose first block is gone do not slow down the others."""
    placed, place = [], spaces.Space._put_in_tree
    monkeypatch.setattr(spaces.Space, "_put_in_tree", lambda self, *args: placed.append(args) or place(self, *args))
    space = spaces.Space(make_eviction_policy("recompute_cost"), NAME)
    for prompt in range(100):
        space.add(FileName(KV, 2, key(prompt, 2), key(prompt, 1)), 1, 0)
    for prompt in range(100, 200):
        space.add(FileName(KV, 1, key(prompt, 1), b""), 1, 0)
    assert len(placed) == 200
    space.add(FileName(KV, 1, key(0, 1), b""), 1, 0)
    assert len(placed) == 202 and space.get(KV, key(0, 2)) is not None


def test_the_budget_holds_whatever_is_written(tmp_path, no_grace):
    budget, dice = 30_000, random.Random(0)
    tiers = [tier_on(tmp_path, budget_bytes=budget) for _ in range(3)]
    for _ in range(60):
        tier = dice.choice(tiers)
        tier.folder.look()
        put(tier, *prompt_tags(dice.randrange(12), dice.randint(1, 4)))
        assert sum(files(tmp_path).values()) <= budget
    check(tmp_path, *tiers)
    assert {reason for tier in tiers for reason in tier.counts} <= {"gone"}
    for tier in tiers:
        for of in (tag(kind, prompt, depth) for kind in SIZE for prompt in range(12) for depth in range(1, 5)):
            assert holds(tier, of) == tier.contains(NAME, of.kind, of.key)


def test_what_others_deleted_is_room(tmp_path):
    tier, other = tier_on(tmp_path, budget_bytes=11_500), tier_on(tmp_path)
    put(tier, *prompt_tags(1, 2), *prompt_tags(2, 2))
    other.look()
    other.remove(NAME, prompt_tags(2, 2))
    other.look()
    assert put(tier, *prompt_tags(3, 2)) == [True] * 3 and all(holds(tier, each) for each in prompt_tags(1, 2))


def test_what_is_used_stays_and_its_kv_with_it(tmp_path, no_grace):
    tier, other = (tier_on(tmp_path, budget_bytes=26_000) for _ in range(2))
    put(tier, *prompt_tags(1, 2))
    other.folder.look()
    for number in range(2, 30):
        assert holds(other, tag(STATE, 1, 2)), number  # used by another process than the one that deletes
        put(tier, *prompt_tags(number, 2))
    assert all(holds(tier, each) for each in prompt_tags(1, 2))
    check(tmp_path, tier, other)


@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_kv_that_no_state_needs_is_found_without_a_search(no_grace, monkeypatch, seed):
    """Against all nodes, after random changes. Each change looks at the nodes above the entry at most."""
    noted = []
    note = spaces.Space.note_kv
    monkeypatch.setattr(spaces.Space, "note_kv", lambda *args, **kwargs: noted.append(1) or note(*args, **kwargs))
    space, dice = spaces.Space(make_eviction_policy("lru"), NAME), random.Random(seed)

    def name(kind: EntryKind, prompt: int, depth: int) -> FileName:
        keys = [b"", *(bytes([at, prompt // 3 ** (4 - at)]) * 8 for at in range(1, 5))]  # three blocks after each block
        return FileName(kind, depth, keys[depth], keys[depth - 1])

    def unneeded() -> set[FileName]:
        return {node.names[KV] for node in space._nodes.values() if KV in node.names and node not in space.users}

    for step in range(200):
        prompt, depth = dice.randrange(3**4), dice.randint(1, 4)
        for at in range(1, depth + 1):
            space.add(name(KV, prompt, at), 1, 0)
        if dice.random() < 0.3:
            space.add(name(STATE, prompt, depth), 1, 0)
        if step % 3 == 0:
            node = dice.choice([node for node in space._nodes.values() if node.names])
            space.remove(dice.choice(list(node.names.values())))
        space.check_needs(space._nodes.values())
    assert len(noted) < 200 * 2 * (4 + 2 * 4)
    expected, found = unneeded(), []
    assert expected
    while file := space.next_unneeded():
        found.append(file)
        assert found[-1].key not in {node.parent.key for node in space._nodes.values() if node.parent}, "deepest first"
        space.remove(found[-1])
    assert len(set(found)) == len(found) and expected <= set(found) and not unneeded()


def test_queries_and_looks_hold_no_one_up(tmp_path, monkeypatch):
    """The engine's thread waits for no lock, and a look at a large folder lets others in again and again."""
    first, count = tier_on(tmp_path), 3 * spaces.AT_ONCE + 1
    tags = [tag(KV, 1 + number % 200, 1 + number // 200) for number in range(count)]
    put(first, *tags)
    added = [0]
    add = spaces.Space.add
    monkeypatch.setattr(spaces.Space, "add", lambda *args: added.append(added.pop() + 1) or add(*args))
    monkeypatch.setattr(time, "sleep", lambda pause_s: added.append(0))
    tier = tier_on(tmp_path)
    assert sum(added) == count and max(added) == spaces.AT_ONCE
    for holder, lock in ((tier.folder, "_looking"), (tier.folder, "_room"), (tier.folder.space, "_lock")):
        monkeypatch.setattr(holder, lock, None)
    tier.describe(TierStats())
    assert tier.contains(NAME, KV, key(1, 1)) and tier.kv_depth(NAME, [key(1, 1)], 0) == 1
    assert not tier.state_depth(NAME, [key(1, 1)], 0, 1)


def test_kv_goes_with_the_last_state_that_needs_it(tmp_path, no_grace):
    tier = tier_on(tmp_path, budget_bytes=20_000)
    put(tier, *prompt_tags(1, 3), tag(STATE, 1, 1))
    space = tier.folder.space
    assert space.next_unneeded() is None

    def gone() -> list[bytes]:
        """Keys of the files that go with the next state, in this order."""
        deleted, remove = [], space.remove
        space.remove = lambda name: deleted.append(name.key) or remove(name)
        assert tier.folder._delete_state(space)
        del space.remove
        return deleted

    assert gone() == [key(1, 1)], "the other state needs its KV"
    assert gone() == [key(1, 3), key(1, 3), key(1, 2), key(1, 1)], "the state, then the deepest KV first"
    assert not space.counts.total()


def test_kv_that_waits_for_its_state_stays(tmp_path):
    tier = tier_on(tmp_path, budget_bytes=8_000)
    assert put(tier, tag(KV, 1, 1), tag(KV, 1, 2)) == [True, True]
    assert put(tier, *prompt_tags(2, 3))[-1] is False and tier.counts == {"no_room": 1}
    assert holds(tier, tag(KV, 1, 2))


def test_namespaces_that_nobody_uses_go_before_states(tmp_path):
    """What is deleted to make room is counted; not what is wrong."""
    old, used = (tier_on(tmp_path, name=name) for name in (b"o" * 16, b"u" * 16))
    stored = sum(put(old, *prompt_tags(1, 2), name=b"o" * 16) + put(used, *prompt_tags(1, 2), name=b"u" * 16))
    old.close()
    tier, stats = tier_on(tmp_path, budget_bytes=25_000), TierStats()
    stored += sum(sum(put(tier, *prompt_tags(number, 2))) for number in range(9))
    assert all(holds(used, each, name=b"u" * 16) for each in prompt_tags(1, 2))
    assert not (tmp_path / "v1" / (b"o" * 16).hex()).exists()
    assert sum(files(tmp_path).values()) <= 25_000
    check(tmp_path, tier)
    wrong = next(tag(STATE, number, 2) for number in range(9) if tier.contains(NAME, STATE, key(number, 2)))
    path_of(tier, wrong).write_bytes(b"")
    assert not holds(tier, wrong)
    tier.describe(stats)
    assert stats.evictions == stored - 1 - len(files(tmp_path)) > 3
    assert stats.bytes_used == sum(files(tmp_path).values()) and stats.bytes_budget == 25_000


def test_an_entry_whose_parent_was_deleted_has_no_place(tmp_path):
    tier = tier_on(tmp_path)
    put(tier, *prompt_tags(1, 3))
    tier._drop(tier.folder.space, file_name(tag(KV, 1, 2)))
    other = tier_on(tmp_path)
    prompt = keys(1, 3)
    assert tier.kv_depth(NAME, prompt, 0) == 1 == other.kv_depth(NAME, prompt, 0)
    assert not other.contains(NAME, STATE, key(1, 3))  # an orphan
    check(tmp_path, tier, other)
    put(other, tag(KV, 1, 2))
    assert other.kv_depth(NAME, prompt, 0) == 3 == other.state_depth(NAME, prompt, 0, 3)
    check(tmp_path, other)


# -- several processes -------------------------------------------------------------------------------------------------


forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # the children start their own threads


def in_child(work: Any) -> int:
    """Runs ``work`` in a child process; returns its id."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return pid


@forks
@pytest.mark.slow
def test_processes_write_read_and_delete_side_by_side(tmp_path, no_grace):
    def work(seed: int) -> None:
        dice, tier = random.Random(seed), tier_on(tmp_path, budget_bytes=30_000)
        for _ in range(40):
            prompt, depth = dice.randrange(20), dice.randint(1, 4)
            put(tier, *prompt_tags(prompt, depth))
            tier.folder.look()
            for each in prompt_tags(dice.randrange(20), dice.randint(1, 4)):
                holds(tier, each)
        assert set(tier.counts) <= {"gone"}, tier.counts

    pids = [in_child(lambda seed=seed: work(seed)) for seed in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 2
    check(tmp_path, tier_on(tmp_path))
    # One may have written a prompt since the other one looked.
    assert sum(files(tmp_path).values()) <= 30_000 + sum(SIZE[each.kind] + HEADER_BYTES for each in prompt_tags(1, 4))


@forks
def test_half_written_files_of_killed_processes_are_deleted(tmp_path, monkeypatch):
    def work() -> None:
        tier = tier_on(tmp_path)
        monkeypatch.setattr(
            folders, "write_all", lambda file, content: (os.write(file, content[:7]), time.sleep(10**6))
        )
        put(tier, tag(KV, 1, 1))

    living = tier_on(tmp_path)
    pid = in_child(work)
    wait_until(lambda: 7 in files(tmp_path).values(), "the child writes")
    living.folder.look()
    assert 7 in files(tmp_path).values()  # it lives
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    living.folder.look()
    assert files(tmp_path) == {} and len(os.listdir(tmp_path / "v1" / "writing")) == 1


def test_two_changes_within_one_tick_are_both_seen(tmp_path):
    tier, other = tier_on(tmp_path), tier_on(tmp_path)
    put(tier, tag(KV, 1, 1))
    part = path_of(tier, tag(KV, 1, 1)).parent
    changed = part.stat().st_mtime_ns
    other.folder.look()
    tier._drop(tier.folder.space, file_name(tag(KV, 1, 1)))
    os.utime(part, ns=(changed, changed))  # the same time
    other.folder.look()
    assert not other.contains(NAME, KV, key(1, 1))


def test_a_settled_folder_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(spaces, "_TICK_S", -1.0)
    tier = tier_on(tmp_path)
    put(tier, tag(KV, 1, 1))
    tier.folder.look()
    monkeypatch.setattr(os, "scandir", lambda path: 1 / 0)
    tier.folder.look()
    assert holds(tier, tag(KV, 1, 1))


@forks
def test_a_process_that_is_stopped_while_it_holds_a_lock(tmp_path):
    """Nobody waits for longer than a request may. What it held is used when it goes on."""
    first = tier_on(tmp_path)
    put(first, *prompt_tags(1, 1))
    first.close()
    space = tmp_path / f"v{folders.VERSION}" / NAME.hex()

    def work() -> None:
        held = Directory(space).lock(shared=False)
        assert held
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = in_child(work)
    os.waitpid(pid, os.WUNTRACED)
    try:
        tiers: list[FileTier] = []
        start = threading.Thread(target=lambda: tiers.append(tier_on(tmp_path, wait_s=0.02)), daemon=True)
        start.start()
        start.join(HANG_S)
        (tier,) = tiers
        assert tier.counts == {"look_ETIMEDOUT": 1} and not tier.contains(NAME, KV, key(1, 1))
        assert put(tier, tag(KV, 1, 1)) == [False] and tier.state_depth(NAME, [key(1, 1)], 0, 1) == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tier.look()
    assert all(holds(tier, each) for each in prompt_tags(1, 1))
    check(tmp_path, tier)


def test_a_lock_whose_file_was_deleted_meanwhile_is_tried_again(tmp_path, monkeypatch):
    folder, flock = Directory(tmp_path), fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.undo()
        folder.delete("lock")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder.lock(shared=False), pytest.raises(BlockingIOError):
        folder.lock(shared=True)


# -- rights, start -----------------------------------------------------------------------------------------------------


def test_only_the_owner_may_read(tmp_path):
    tier = tier_on(tmp_path / "a" / "b")
    put(tier, *prompt_tags(1, 1))
    for path in (tmp_path / "a" / "b").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def fails(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="no locks available"):
        tier_on(tmp_path)


# -- what others plant -------------------------------------------------------------------------------------------------

SPACE, OTHER, DEAD = NAME.hex(), (b"o" * 16).hex(), "0123456789abcdef"


def a_cache(folder: Path) -> Path:
    """A folder that has all that this package deletes, and a key file."""
    tier = tier_on(folder)
    put(tier, *prompt_tags(1, 2))
    for name in (b"o" * 16, NAME):
        tier.use_namespace(name)
        wait_for_namespace(tier, name)
        put(tier, *prompt_tags(3, 2), name=name)
    tier.close()
    for below in (f"writing/{DEAD}", f"writing/{DEAD[::-1]}", SPACE, SPACE + "/03"):
        (folder / "v1" / below).mkdir(mode=0o700, exist_ok=True)
        for name in ("1", "lock", "id_rsa"):
            (folder / "v1" / below / name).write_text("a key")
    return folder


def all_below(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time of change and content of all files and folders; nothing is followed."""
    found = {}
    for path in sorted((folder, *folder.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = status.st_mode, status.st_mtime_ns, content
    return found


def in_time(work: Any) -> Any:
    """What ``work`` returns, which may wait for nothing, such as a pipe."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert found, "it waits, or raised"
    return found[0]


def use(folder: Path, name: bytes = NAME) -> FileTier:
    """Do all that a process does there: look, clean, read, write, make room, end."""
    tier = tier_on(folder, budget_bytes=8_000, name=name)
    for number in range(1, 4):
        put(tier, *prompt_tags(number, 2), name=name)
        for each in prompt_tags(number, 2):
            get(tier, each, name)
        tier.look()
    tier.close()
    return tier


def plant(kind: str, place: Path, target: Path) -> None:
    """Put something in the place of a file or folder. Links lead to ``target``."""
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as one, pytest.MonkeyPatch.context() as there:
            there.chdir(place.parent)  # a socket's path is short
            one.bind(place.name)
        return
    make = {"link": partial(place.symlink_to, target), "hard link": partial(place.hardlink_to, target)}
    make |= {"file": place.touch, "fifo": partial(os.mkfifo, place), "folder": place.mkdir}
    make[kind]()


FOLDERS = pytest.mark.parametrize("where", ["", "v1", "v1/writing", f"v1/{SPACE}", f"v1/{SPACE}/03"])


@FOLDERS
@pytest.mark.parametrize(
    "kind", mostly_slow(["link", "another user's", "open to others", "file", "fifo"], "link", "open to others")
)
def test_a_planted_folder_is_refused_in_one_line(tmp_path, no_grace, where, kind, caplog, monkeypatch):
    """Nothing outside of the folder changes, nor anything in it."""
    outside, top = a_cache(tmp_path / "outside"), a_cache(tmp_path / "cache")
    place = top / where
    if kind == "open to others":
        place.chmod(0o777)
    elif kind == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        place.chmod(0o755)
        os.chown(place, 12345, 12345)
    else:
        place.rename(tmp_path / "moved")
        plant(kind, place, outside / where)
    before = all_below(outside), all_below(place)
    if SPACE not in where:
        with pytest.raises(OSError, match=re.escape(str(place))) as error:
            tier_on(top)
        lines = str(error.value)
        if not where and not place.is_fifo() and not place.is_file():
            monkeypatch.setenv("HYBRID_PREFIX_SECRET", "x" * 16)
            with pytest.raises(ValueError, match=re.escape(str(place))):
                FolderSettings(folder=top, budget_bytes=1).check()
    else:
        tier = in_time(lambda: use(top))
        assert not tier.contains(NAME, KV, key(1, 1)) and {"look_EPERM", "look_ENOTDIR"} & set(tier.counts)
        lines = "".join(record.message for record in caplog.records if "look_" in record.message)
        in_time(lambda: use(top, name=b"p" * 16))  # for which it is an unused namespace
    assert str(place) in lines and "\n" not in lines
    assert (all_below(outside), all_below(place)) == before


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "socket", "folder"])
def test_what_is_planted_in_the_place_of_a_file_harms_nothing(tmp_path, no_grace, kind, caplog):
    """Of an entry, of a half-written file and of locks."""
    outside, top = a_cache(tmp_path / "outside"), a_cache(tmp_path / "cache")
    key_file = outside / "v1" / SPACE / "id_rsa"

    def replace(place: Path) -> None:
        """Links lead to what could be used: the entry, a key, and what a lock would make."""
        place.unlink(missing_ok=True)
        target = outside / "made" if place.name == "lock" else outside / place.relative_to(top)
        plant(kind, place, key_file if kind == "hard link" else target)

    tier = tier_on(top)
    for number in (1, 3):  # one before a look, one after it
        for each in prompt_tags(number, 2):
            replace(path_of(tier, each))
        if number == 1:
            tier.look()
    replace(top / "v1" / "writing" / DEAD / "1")
    replace(top / "v1" / "writing" / DEAD[::-1] / "lock")
    replace(top / "v1" / OTHER / "lock")
    before = all_below(outside)
    tags = [*prompt_tags(1, 2), *prompt_tags(3, 2)]
    for _ in range(3):
        assert not in_time(lambda: [each for each in tags if holds(tier, each)])
        tier.look()
    written = put(tier, *tags)
    counts = dict(tier.counts)
    assert written == [kind != "folder"] * 6 == [holds(tier, each) for each in tags] == put(tier, *tags)
    if kind == "folder":
        tier.look()
        assert put(tier, *tags) == [False] * 6 and counts["write_EISDIR"] == 6, "each is tried once"
        assert tier.counts["write_EISDIR"] == 6 == tier.counts["read_EISDIR"] and "delete_EISDIR" not in tier.counts
    in_time(lambda: use(top, name=b"p" * 16))
    assert all_below(outside) == before and (top / "v1" / "writing" / DEAD / "id_rsa").exists()


def test_files_of_an_unused_namespace_that_become_folders_hang_nothing(tmp_path):
    """After this process has listed them. It cannot delete them, and goes on without."""
    put(unused := tier_on(tmp_path, name=b"o" * 16), *prompt_tags(1, 2), name=b"o" * 16)
    unused.close()
    tier = tier_on(tmp_path, budget_bytes=8_000)
    for file in list((tmp_path / "v1" / OTHER).rglob("*-*-*-*")):
        file.unlink()
        file.mkdir()
    assert not all(in_time(lambda: put(tier, *prompt_tags(2, 2)))) and tier.counts["no_room"]


@FOLDERS
def test_a_link_that_takes_the_place_of_an_open_folder(tmp_path, no_grace, where, caplog):
    outside, top = a_cache(tmp_path / "outside"), tmp_path / "cache"
    tier, tags = tier_on(top), prompt_tags(3, 2)
    put(tier, *tags)
    (top / where).rename(tmp_path / "moved")
    (top / where).symlink_to(outside / where)
    before = all_below(outside)
    assert all(holds(tier, each) for each in tags), "it reads the folder that it opened"
    for number in range(3, 9):
        put(tier, *prompt_tags(number, 2))
        tier.remove(NAME, prompt_tags(number, 2)[:1])
        tier.look()
    tier.close()
    assert all_below(outside) == before and tier.counts["look_ENOTDIR"] >= 6


def test_what_this_package_does_not_make_is_left_and_named_once(tmp_path, no_grace, caplog):
    """No name of a file ends the process, or the thread that looks."""
    top, right = a_cache(tmp_path / "cache"), str(FileName(KV, 1, key(2, 1), b""))
    strays = [top / "v1" / SPACE / "3e" / name for name in ("kv-1--", "kv-01" + right[4:], "kv- 1" + right[4:], right)]
    for stray in strays:  # the last one lies in the wrong folder
        stray.write_bytes(b"x")
    tier = tier_on(top)
    tier.look()
    assert all(holds(tier, each) for each in prompt_tags(1, 2)) and not tier.contains(NAME, KV, key(2, 1))
    tier.close()
    for _ in range(2):
        in_time(lambda: use(top, name=b"p" * 16))
    dead = [top / "v1" / "writing" / name for name in (DEAD, DEAD[::-1])]
    left = strays + [folder / "id_rsa" for folder in dead]
    left += [top / "v1" / SPACE / "03" / name for name in ("1", "id_rsa", "lock")]
    assert all(path.exists() for path in left) and not any((folder / "1").exists() for folder in dead)
    assert sorted(record.args[0] for record in caplog.records if "left alone" in record.message) == sorted(left)
