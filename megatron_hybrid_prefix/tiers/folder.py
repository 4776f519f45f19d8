"""A folder of entries that several processes share: which entries it has, how many bytes they are, which go first.

Layout, below the folder of the URL::

    v1/                      format; another format is another folder, and is left alone
      writing/<process>/     files that a process is writing. A lock says that the process lives
      <space>/               entries of one namespace (weights, layout, rank). A lock says that a process uses it
        00/ .. 3f/
          kv-<depth>-<key>-<parent>       KV of a block
          state-<depth>-<key>-<parent>    the state at the end of a block

A name says what an entry is, so that the index (`Space`) is made of names alone. It is read at the start, and then each
folder again whenever its time of change differs. So an answer may be out of date: an entry that another process has deleted
is a miss when it is read.

The locks are released by the kernel when a process dies, however it dies. No decision depends on a clock or a process id.

The byte budget counts all namespaces. A process that needs room deletes, in this order: KV that no state needs; entries
of namespaces that no process uses, oldest first; and states of its own namespace, by the value that the eviction policy
gives them, with the KV that only they need.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_hybrid_prefix.tiers.header import VERSION
from megatron_hybrid_prefix.tiers.units import EntryKind

_KINDS = {EntryKind.KV: "kv", EntryKind.STATE: "state"}
_KIND_OF = {name: kind for kind, name in _KINDS.items()}
_PARTS = 64
# KV that no state needs may be waiting for the state that is being written.
_GRACE_S = 60.0
_TICK_S = 1.0  # a change may leave a folder's time of change as it is within this time


class FileName(NamedTuple):
    """What the name of a file says. The depth is in blocks; the parent's key is empty for the first block."""

    kind: EntryKind
    depth_blocks: int
    key: bytes
    parent: bytes

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]}-{self.depth_blocks}-{self.key.hex()}-{self.parent.hex()}"

    @property
    def part(self) -> str:
        """The folder it is in."""
        return f"{self.key[0] % _PARTS:02x}"

    @classmethod
    def of(cls, text: str) -> FileName | None:
        """The reverse of ``str``; None if the file is no entry."""
        try:
            kind, depth, key, parent = text.split("-")
            name = cls(_KIND_OF[kind], int(depth), bytes.fromhex(key), bytes.fromhex(parent))
        except (ValueError, KeyError):
            return None
        return name if name.key and str(name) == text else None


class Listing:
    """Files of one namespace, and their sizes: as of the last look, and as this process has changed them since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, dict[str, int]] = {f"{number:02x}": {} for number in range(_PARTS)}  # by part, by name
        # By part: its time of change, when that was first seen (monotonic), and whether it need not be read again.
        self._looks: dict[str, tuple[int, float, bool]] = {}
        self.bytes = 0

    def names(self) -> list[str]:
        """Names of all files."""
        return [name for part in self._sizes.values() for name in part]

    def add(self, part: str, name: str, size: int) -> bool:
        """A file is there. Returns whether it is new."""
        if name in self._sizes[part]:
            return False
        self._sizes[part][name] = size
        self.bytes += size
        return True

    def remove(self, part: str, name: str) -> bool:
        """A file is gone. Returns whether it was there."""
        size = self._sizes[part].pop(name, None)
        self.bytes -= size or 0
        return size is not None

    def read(self, lock: threading.RLock) -> Iterator[tuple[str, set[str], dict[str, os.stat_result]]]:
        """Read the parts that changed.

        Args:
            lock: Held by whoever calls `add` and `remove`.

        Yields:
            Name of a part, files that are gone, files that are new. What was changed since the part was read is neither.
        """
        for part, sizes in self._sizes.items():
            with lock:
                before = set(sizes)
            found: dict[str, os.stat_result | None] = {}
            try:
                changed_ns, now = os.stat(self.folder / part).st_mtime_ns, time.monotonic()
                last_ns, since, settled = self._looks.get(part, (None, now, False))
                if last_ns != changed_ns:
                    since, settled = now, False
                if settled:
                    continue
                with os.scandir(self.folder / part) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            found[entry.name] = None if entry.name in before else entry.stat(follow_symlinks=False)
                # Two changes within one tick of the file system's clock have the same time: read it again later.
                self._looks[part] = changed_ns, since, now - since > _TICK_S
            except (FileNotFoundError, NotADirectoryError):
                self._looks.pop(part, None)
            gone, new = before - set(found), {name: stat for name, stat in found.items() if stat is not None}
            if gone or new:
                yield part, gone, new

    def look(self, lock: threading.RLock) -> None:
        """Read the parts that changed, and note what is there."""
        for part, gone, new in self.read(lock):
            with lock:
                for name in gone:
                    self.remove(part, name)
                for name, stat in new.items():
                    self.add(part, name, stat.st_size)


class Ranking(Protocol):
    """What is used of an eviction policy (``policy/base.py``)."""

    def added(self, state: Any) -> None: ...

    def used(self, state: Any) -> None: ...

    def removed(self, state: Any) -> None: ...

    def victim(self, evictable: Callable[[Any], bool]) -> Any: ...


class Kept:
    """A block with KV, a state or both in the folder. A policy may rank it.

    Attributes:
        key, parent, depth_blocks: As in the prefix tree.
        names: Files by kind.
        sizes: Bytes by kind.
        users: 1 if the state is here, and 1 for each child with users. At 0 no state needs the KV.
        children: Number of child nodes.
        since: When this process learned of the KV (monotonic).
        used_ns: Time of the state's last use, as its file says.
        reason: For the policy; why the state was kept is not stored.
    """

    __slots__ = ("children", "depth_blocks", "key", "names", "parent", "reason", "since", "sizes", "used_ns", "users")

    def __init__(self, name: FileName, parent: Kept | None, reason: Any) -> None:
        self.key, self.parent, self.depth_blocks, self.reason = name.key, parent, name.depth_blocks, reason
        self.names: dict[EntryKind, str] = {}
        self.sizes: dict[EntryKind, int] = {}
        self.users = self.children = self.used_ns = 0
        self.since = time.monotonic()


class Space:
    """Index of one namespace: what is in the folder, as a prefix tree. It only notes; nothing is read or deleted here.

    Callers hold a lock.

    Args:
        ranking: Ranks the states.
        reason: The reason that the ranking is told for each state.
    """

    def __init__(self, ranking: Ranking, reason: Any) -> None:
        self._ranking, self._reason = ranking, reason
        self._nodes: dict[bytes, Kept] = {}
        # Files whose parent is not here, by name, with bytes, time of last use, and when they were seen (monotonic).
        self._orphans: dict[str, tuple[FileName, int, int, float]] = {}
        self._orphans_of: dict[bytes, set[str]] = {}  # their names, by the parent's key
        self.bytes = 0
        self.counts: Counter[EntryKind] = Counter()

    def get(self, kind: EntryKind, key: bytes) -> str | None:
        """Name of the entry's file; None if it is not here."""
        node = self._nodes.get(key)
        return None if node is None else node.names.get(kind)

    def add(self, name: FileName, size: int, used_ns: int) -> None:
        """A file appeared."""
        text = str(name)
        if text in self._orphans or self.get(name.kind, name.key) is not None:
            return
        self.bytes += size
        if self._place(name, size, used_ns):
            self._adopt(name.key)
        else:
            self._orphans[text] = name, size, used_ns, time.monotonic()
            self._orphans_of.setdefault(name.parent, set()).add(text)

    def remove(self, name: FileName) -> None:
        """A file is gone, or about to be deleted."""
        if str(name) in self._orphans:
            self.bytes -= self._pop_orphan(str(name))[1]
            return
        node = self._nodes.get(name.key)
        if node is None or name.kind not in node.names:
            return
        self.bytes -= node.sizes.pop(name.kind)
        del node.names[name.kind]
        self.counts[name.kind] -= 1
        if name.kind == EntryKind.STATE:
            self._ranking.removed(node)
            self._count_user(node, -1)
        self._prune(node)

    def use(self, node: Kept, used_ns: int) -> None:
        """A request resumed from the state."""
        node.used_ns = max(node.used_ns, used_ns)
        self._ranking.used(node)

    def node(self, key: bytes) -> Kept | None:
        """The node of a block."""
        return self._nodes.get(key)

    def needless(self) -> list[str]:
        """Files that no state needs and that no state is being written for: KV without a state below, and orphans.

        Deepest first.
        """
        late = time.monotonic() - _GRACE_S
        kv = [node for node in self._nodes.values() if not node.users and EntryKind.KV in node.names]
        kv = sorted((node for node in kv if node.since < late), key=lambda node: -node.depth_blocks)
        orphans = [text for text, (*_, since) in self._orphans.items() if since < late]
        return [*orphans, *(node.names[EntryKind.KV] for node in kv)]

    def victim(self) -> Kept | None:
        """The state to delete next."""
        found: Kept | None = self._ranking.victim(lambda node: True)
        return found

    def needed_by(self, node: Kept) -> list[str]:
        """Files of the KV that only this state needs, deepest first."""
        found = []
        at: Kept | None = node
        while at is not None and at.users == 1 and (at is node or EntryKind.STATE not in at.names):
            if EntryKind.KV in at.names:
                found.append(at.names[EntryKind.KV])
            at = at.parent
        return found

    def files(self) -> Iterator[tuple[str, int]]:
        """All files and their bytes."""
        yield from ((name, size) for name, (_, size, *_) in self._orphans.items())
        for node in self._nodes.values():
            yield from ((node.names[kind], node.sizes[kind]) for kind in node.names)

    def _place(self, name: FileName, size: int, used_ns: int) -> bool:
        node = self._nodes.get(name.key)
        if node is None:
            parent = self._nodes.get(name.parent) if name.parent else None
            if (parent is None) != (name.depth_blocks == 1) or name.depth_blocks < 1:
                return False
            if parent is not None and parent.depth_blocks != name.depth_blocks - 1:
                return False
            node = self._nodes[name.key] = Kept(name, parent, self._reason)
            if parent is not None:
                parent.children += 1
        node.names[name.kind], node.sizes[name.kind] = str(name), size
        self.counts[name.kind] += 1
        if name.kind == EntryKind.STATE:
            node.used_ns = used_ns
            self._count_user(node, 1)
            self._ranking.added(node)
        return True

    def _adopt(self, key: bytes) -> None:
        """Give the orphans below this block their places."""
        parents = [key]
        while parents:
            for text in sorted(self._orphans_of.get(parents.pop(), ())):
                name, size, used_ns, _ = self._orphans[text]
                if self._place(name, size, used_ns):
                    self._pop_orphan(text)
                    parents.append(name.key)

    def _pop_orphan(self, text: str) -> tuple[FileName, int, int, float]:
        orphan = self._orphans.pop(text)
        siblings = self._orphans_of[orphan[0].parent]
        siblings.discard(text)
        if not siblings:
            del self._orphans_of[orphan[0].parent]
        return orphan

    def _count_user(self, node: Kept, change: int) -> None:
        at: Kept | None = node
        while at is not None:
            at.users += change
            if at.users != max(0, change):  # it had users before, or has some left
                return
            at = at.parent

    def _prune(self, node: Kept | None) -> None:
        while node is not None and not node.names and not node.children:
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent


class Lock:
    """A lock on a file, held until `release` or the end of the process.

    Args:
        path: The file; made if need be.
        shared: Whether others may hold it, too.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The file cannot be made, or the file system has no locks.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.fstat(self._file).st_nlink:
                    return
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)  # deleted by the process that held it before

    def release(self) -> None:
        """Release it. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedFolder:
    """The files of a folder: made, written, deleted and counted. Thread-safe.

    Args:
        folder: The folder.
        budget_bytes: Most bytes of all namespaces.
        make_ranking: Makes the eviction policy of a namespace.
        reason: See `Space`.

    Attributes:
        lock: Held while `space` is used.
        space: The namespace that this process uses; None until `use_space`.

    Raises:
        OSError: The folder cannot be made or written to, or its file system has no locks.
    """

    def __init__(
        self, folder: Path, *, budget_bytes: int, make_ranking: Callable[[], Ranking], reason: Any = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self._make_ranking, self._reason = make_ranking, reason
        self._top = folder
        self._root = folder / f"v{VERSION}"
        self.lock = threading.RLock()
        self._looking = threading.Lock()  # held while the folder is read
        self.space: Space | None = None
        self._name: str | None = None
        self._listing: Listing | None = None
        self._others: dict[str, Listing] = {}
        self._others_bytes = self._reserved_bytes = 0
        self._space_lock: Lock | None = None
        self._writing: Path | None = None
        self._writing_lock: Lock | None = None
        self._written = 0
        self._make_folders()

    # -- the namespace -------------------------------------------------------------------------------------------------

    def use_space(self, name: str) -> None:
        """Use the entries of this namespace from now on."""
        self.leave_space()
        with self.lock:
            self._name, self._listing = name, Listing(self._root / name)
            self.space = Space(self._make_ranking(), self._reason)
        self._make_folders()
        self.refresh()

    def leave_space(self) -> None:
        """Use no entries. Does not wait for the disk."""
        with self.lock:
            if self._space_lock is not None:
                self._space_lock.release()
            self._space_lock = self._name = self._listing = self.space = None

    def refresh(self) -> None:
        """Look at what other processes have written and deleted, and delete what dead ones left half-written."""
        with self._looking:
            self._clean()
            with suppress(FileNotFoundError):
                for name in sorted(set(os.listdir(self._root)) - {"writing", self._name}):
                    self._others.setdefault(name, Listing(self._root / name))
            for name, other in list(self._others.items()):
                with suppress(PermissionError):  # another user's
                    other.look(self.lock)
                if name == self._name or not other.folder.exists():
                    del self._others[name]
            self._look()

    def _look(self) -> None:
        """Look at the namespace in use."""
        listing, space = self._listing, self.space
        with self.lock:
            self._others_bytes = sum(other.bytes for other in self._others.values())
        if listing is None or space is None:
            return
        found: list[tuple[FileName, os.stat_result]] = []
        for part, gone, new in listing.read(self.lock):
            with self.lock:
                for name in map(FileName.of, gone):
                    if name is not None and listing.remove(part, str(name)):
                        space.remove(name)
            names = ((FileName.of(text), stat) for text, stat in new.items())
            found += [(name, stat) for name, stat in names if name is not None and name.part == part]
        with self.lock:
            for name, stat in sorted(found, key=_order):
                if listing.add(name.part, str(name), stat.st_size):
                    space.add(name, stat.st_size, stat.st_mtime_ns)

    def path(self, name: FileName) -> Path:
        """Where the entry of the namespace in use is, or would be."""
        assert self._name is not None
        return self._root / self._name / name.part / str(name)

    @property
    def bytes_used(self) -> int:
        """Bytes of all namespaces, as of the last look."""
        with self.lock:
            return self._others_bytes + (0 if self.space is None else self.space.bytes)

    # -- write ---------------------------------------------------------------------------------------------------------

    def write(self, name: FileName, pieces: Sequence[Any], space: Space) -> bool:
        """Write a file beside its place, and rename it. Others see all of it or nothing.

        The file is not synced. If the machine fails (not only the process), what was written in the last seconds may be
        lost or half there. The checks of the reader make that a miss.

        Args:
            name: The entry.
            pieces: Its bytes, in buffers.
            space: The namespace it belongs to.

        Returns:
            False: there is no room for it, or another namespace is in use by now.

        Raises:
            OSError: It cannot be written; nothing is left of it.
        """
        size = sum(len(piece) for piece in pieces)
        if not self._make_room(size):
            return False
        try:
            with self.lock:
                if self.space is not space:
                    return False
                place = self.path(name)
            try:
                self._write_and_rename(place, pieces)
            except FileNotFoundError:  # somebody deleted the folder: make it again, once
                self._make_folders()
                self._write_and_rename(place, pieces)
            with self.lock:
                if self._listing is not None and self.space is space and self._listing.add(name.part, str(name), size):
                    space.add(name, size, time.time_ns())
        finally:
            with self.lock:
                self._reserved_bytes -= size
        return True

    def forget(self, name: FileName) -> None:
        """The file is gone, or is not to be read again."""
        with self.lock:
            if self.space is not None and self._listing is not None:
                self._listing.remove(name.part, str(name))
                self.space.remove(name)

    def delete(self, name: FileName) -> None:
        """Delete the file.

        Raises:
            OSError: It cannot be deleted.
        """
        with self.lock:
            if self._name is None:
                return
            place = self.path(name)
        place.unlink(missing_ok=True)
        self.forget(name)

    def touch(self, name: FileName) -> None:
        """A request resumes from this state: it goes later."""
        with self.lock:
            node = None if self.space is None else self.space.node(name.key)
            if self.space is None or node is None or EntryKind.STATE not in node.names:
                return
            now_ns = time.time_ns()
            self.space.use(node, now_ns)
            place = self.path(name)
        with suppress(OSError):
            os.utime(place, ns=(now_ns, now_ns))

    def close(self) -> None:
        """Let go of the locks, and of the folder for half-written files."""
        self.leave_space()
        with self.lock:
            if self._writing_lock is not None:
                self._writing_lock.release()
                self._writing_lock = None
        self._clean()

    # -- internal ------------------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        with self._looking:
            for folder in (self._top, self._root, self._root / "writing"):
                if not folder.exists():
                    os.makedirs(folder, mode=0o700, exist_ok=True)
            if self._writing is None or not self._writing.exists():
                if self._writing_lock is not None:
                    self._writing_lock.release()
                while True:
                    self._writing = self._root / "writing" / os.urandom(8).hex()
                    os.mkdir(self._writing, 0o700)
                    # Another process may take it for that of a dead one before it is locked.
                    with suppress(FileNotFoundError, BlockingIOError):
                        self._writing_lock = Lock(self._writing / "lock", shared=False)
                        break
            name = self._name
            if name is not None:
                place = self._root / name
                if self._space_lock is not None and not (place / "lock").exists():
                    self._space_lock.release()
                    self._space_lock = None
                while self._space_lock is None:
                    os.makedirs(place, mode=0o700, exist_ok=True)
                    try:
                        self._space_lock = Lock(place / "lock", shared=True)
                    except FileNotFoundError:  # another process has just deleted the folder
                        continue
                    except BlockingIOError:  # another process deletes files of it
                        time.sleep(0.01)
                for number in range(_PARTS):
                    os.makedirs(place / f"{number:02x}", mode=0o700, exist_ok=True)

    def _write_and_rename(self, place: Path, pieces: Sequence[Any]) -> None:
        with self.lock:
            self._written += 1
            assert self._writing is not None
            beside = self._writing / str(self._written)
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                for piece in pieces:
                    write_all(file, memoryview(piece))
            finally:
                os.close(file)
            os.rename(beside, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise

    def _make_room(self, size: int) -> bool:
        """Reserve bytes, if need be by deleting files. False: there is not enough to delete."""
        if size > self.budget_bytes:
            return False
        fresh = False
        while True:
            with self.lock:
                if self.bytes_used + self._reserved_bytes + size <= self.budget_bytes:
                    self._reserved_bytes += size
                    return True
            if not fresh:  # others may have deleted enough
                self.refresh()
                fresh = True
                continue
            if not (self._delete_needless() or self._delete_unused_space() or self._delete_state()):
                return False

    def _delete(self, names: Sequence[str]) -> None:
        for text in names:
            name = FileName.of(text)
            assert name is not None
            self.delete(name)

    def _delete_needless(self) -> bool:
        with self.lock:
            names = [] if self.space is None else self.space.needless()[:64]
        self._delete(names)
        return bool(names)

    def _delete_state(self) -> bool:
        while True:
            with self.lock:
                node = None if self.space is None else self.space.victim()
                if node is None or self.space is None:
                    return False
                name = FileName.of(node.names[EntryKind.STATE])
                assert name is not None
                place = self.path(name)
            try:
                used_ns = os.stat(place).st_mtime_ns
            except OSError:
                self.forget(name)
                return True
            with self.lock:
                if self.space is None or self.space.node(name.key) is not node or EntryKind.STATE not in node.names:
                    continue
                if used_ns > node.used_ns:  # another process used it
                    self.space.use(node, used_ns)
                    continue
                names = [str(name), *self.space.needed_by(node)]
            self._delete(names)
            return True

    def _delete_unused_space(self) -> bool:
        """Delete the oldest files of a namespace that no process uses."""
        with self._looking:
            for other in list(self._others.values()):
                if not other.bytes:
                    continue
                try:
                    lock = Lock(other.folder / "lock", shared=False)
                except OSError:
                    continue
                try:
                    if self._delete_oldest(other):
                        return True
                finally:
                    lock.release()
        return False

    def _delete_oldest(self, other: Listing) -> bool:
        ages = []
        for text in other.names():
            name = FileName.of(text)
            if name is not None:
                with suppress(OSError):
                    ages.append((os.stat(other.folder / name.part / text).st_mtime_ns, text, name.part))
        for _, text, part in sorted(ages)[: max(1, len(ages) // 8)]:
            with suppress(FileNotFoundError):
                os.unlink(other.folder / part / text)
        other.look(self.lock)
        if not other.bytes:  # nobody else can be in the folder: its lock is held
            with suppress(OSError):
                for number in range(_PARTS):
                    os.rmdir(other.folder / f"{number:02x}")
                os.unlink(other.folder / "lock")
                os.rmdir(other.folder)
        with self.lock:
            self._others_bytes = sum(each.bytes for each in self._others.values())
        return bool(ages)

    def _clean(self) -> None:
        """Delete the half-written files of dead processes."""
        try:
            folders = os.listdir(self._root / "writing")
        except FileNotFoundError:
            return
        for name in folders:
            folder = self._root / "writing" / name
            if folder == self._writing and self._writing_lock is not None:
                continue
            with suppress(OSError):  # BlockingIOError: its process lives
                lock = Lock(folder / "lock", shared=False)
                try:
                    for entry in os.listdir(folder):
                        os.unlink(folder / entry)
                    os.rmdir(folder)
                finally:
                    lock.release()


def _order(found: tuple[FileName, os.stat_result]) -> tuple[bool, int]:
    """KV before states; KV from the front, states in the order of their use."""
    name, stat = found
    return (True, stat.st_mtime_ns) if name.kind == EntryKind.STATE else (False, name.depth_blocks)


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes. (One call writes at most 2 GiB.)"""
    while len(data):
        data = data[os.write(file, data) :]
