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

Every folder is opened through the one above it, and only if nobody else can write to it: no link is followed. Only what has
a name of the above is deleted; the rest is left, and named once.

The locks are released by the kernel when a process dies, however it dies. No decision depends on a clock or a process id.

The byte budget counts all namespaces. A process that needs room deletes, in this order: KV that no state needs; entries
of namespaces that no process uses, oldest first; and states of its own namespace, by the value that the eviction policy
gives them, with the KV that only they need. It does the same if the disk is full before the budget is used up.

All is in one class, because looks, writes and deletions share the index, the bytes that are counted, and the locks.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.header import VERSION
from megatron_hybrid_prefix.tiers.listing import PARTS, FileName, Listing, by_need, leave, names_in
from megatron_hybrid_prefix.tiers.locks import Lock
from megatron_hybrid_prefix.tiers.space import Space
from megatron_hybrid_prefix.tiers.units import EntryKind

AT_ONCE = 64  # entries that are deleted, or noted, while others wait for the index
# A disk that is full although there is nothing to delete is left alone for this long.
_PAUSE_S = 10.0
_TRIES = 3  # others may use up what was made free
_PROCESS, _FILE, _SPACE = "[0-9a-f]{16}", "[1-9][0-9]*|lock", "[0-9a-f]{32}|writing"  # names, as in the layout


class SharedFolder:
    """The files of a folder: looked at, used, written within a budget, and deleted. Thread-safe.

    Args:
        folder: The folder.
        budget_bytes: Most bytes of all namespaces.
        make_ranking: Makes the eviction policy of a namespace.
        wait_s: Longest time to wait for a lock that another process holds.

    Attributes:
        lock: Held while `space` is used.
        space: The namespace that this process uses; None until `use_space`.
        evictions: Files that this process deleted to make room.

    Raises:
        OSError: The folder cannot be made or written to, others can write to it, or its file system has no locks.
    """

    def __init__(
        self, folder: Path, *, budget_bytes: int, make_ranking: Callable[[], EvictionPolicy[Any]], wait_s: float = 1.0
    ) -> None:
        self.budget_bytes, self._make_ranking, self._wait_s = budget_bytes, make_ranking, wait_s
        self._top = folder
        self.lock = threading.RLock()
        self._looking = threading.Lock()  # held while the folder is read
        self.space: Space | None = None
        self._others: dict[str, Listing] = {}
        self._others_bytes = 0
        self._space_lock: Lock | None = None
        self._above: tuple[Directory, ...] = ()  # what `_open_above` opened
        self._writing_lock: Lock | None = None
        self._reserved_bytes = self._written = self.evictions = 0
        self._full_until = 0.0  # the disk is full (monotonic)
        self.open()

    # -- the namespace -------------------------------------------------------------------------------------------------

    def use_space(self, name: str) -> None:
        """Use the entries of this namespace from now on."""
        self.leave_space()
        with self.lock:
            self.space = Space(self._make_ranking(), name)
        self.open()
        self.refresh()

    def leave_space(self) -> None:
        """Use no entries. Does not wait for the disk."""
        with self.lock:
            if self._space_lock is not None:
                self._space_lock.release()
            self._space_lock = self.space = None

    def refresh(self) -> None:
        """Look at what other processes have written and deleted, and delete what dead ones left half-written."""
        with self._looking:
            self._clean()
            self._look_at_others()
            self._look()

    def _look_at_others(self) -> None:
        root = self._above[1]
        names, others, self._others = names_in(root, _SPACE), self._others, {}
        for name in names:
            if name != "writing" and (self.space is None or name != self.space.name):
                other = others.get(name, Listing())
                try:
                    other.look(Directory(root.path / name, root), self.lock)
                    self._others[name] = other
                except OSError as error:
                    leave(error)

    def _look(self) -> None:
        """Look at the namespace in use."""
        space = self.space
        with self.lock:
            self._others_bytes = sum(other.bytes for other in self._others.values())
        if space is None or not space.folders:
            return
        found: list[tuple[FileName, os.stat_result]] = []
        for _, gone, new in space.listing.read(space.folders[""], self.lock):
            with self.lock:
                for name in map(FileName.of, gone):
                    if name is not None:
                        space.remove(name)
            found += new.items()
        new_names = iter(sorted(found, key=by_need))
        while batch := list(islice(new_names, AT_ONCE)):
            with self.lock:
                for name, stat in batch:
                    space.add(name, stat.st_size, stat.st_mtime_ns)
            time.sleep(0)  # else others that wait for the lock do not get it

    def place(self, name: FileName) -> tuple[Directory, str]:
        """Where the entry of the namespace in use is, or would be."""
        assert self.space is not None
        return self.space.folders[name.part], str(name)

    @property
    def bytes_used(self) -> int:
        """Bytes of all namespaces, as of the last look."""
        with self.lock:
            return self._others_bytes + (0 if self.space is None else self.space.listing.bytes)

    # -- files ---------------------------------------------------------------------------------------------------------

    def forget(self, name: FileName) -> int:
        """The file is gone, or is not to be read again. Returns its bytes; 0 if it was not known."""
        with self.lock:
            return 0 if self.space is None else self.space.remove(name)

    def delete(self, name: FileName, *, evict: bool = False) -> int:
        """Delete the file, and count that if it makes room. Returns its bytes; above 0, even if others were faster.

        Raises:
            OSError: It cannot be deleted.
        """
        with self.lock:
            if self.space is None:
                return 0
            folder, text = self.place(name)
        deleted = folder.delete(text)
        with self.lock:
            self.evictions += evict and deleted
            return max(1, self.forget(name))

    def touch(self, name: FileName) -> None:
        """A request resumes from this state: it goes later."""
        with self.lock:
            node = None if self.space is None else self.space.node(name.key)
            if self.space is None or node is None or EntryKind.STATE not in node.names:
                return
            now_ns = time.time_ns()
            self.space.use(node, now_ns)
            folder, text = self.place(name)
        with suppress(OSError):
            os.utime(text, ns=(now_ns, now_ns), dir_fd=folder.fd, follow_symlinks=False)

    def close(self) -> None:
        """Let go of the locks, and of the folder for half-written files."""
        self.leave_space()
        with self.lock:
            if self._writing_lock is not None:
                self._writing_lock.release()
                self._writing_lock = None
        with suppress(OSError):
            self._clean()

    def write(self, name: FileName, pieces: Sequence[Any], space: Space) -> bool:
        """Write a file under a temporary name, and rename it. Others see all of it or nothing.

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
        if time.monotonic() < self._full_until or not self._make_room(size):
            return False
        try:
            with self.lock:
                if self.space is not space:
                    return False
            self._write_with_room(space, name, pieces, size)
            with self.lock:
                if self.space is space:
                    space.add(name, size, time.time_ns())
        finally:
            with self.lock:
                self._reserved_bytes -= size
        return True

    # -- locks ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open, make and lock the folders, unless the open ones are in their places. Does nothing once closed.

        Raises:
            TimeoutError: Another process keeps a lock.
            OSError: One is a link or no folder, or others can write to it.
        """
        with self._looking:
            if self._above and self._writing_lock is None:
                return
            moved = not (self._above and all(folder.is_in_place() for folder in self._above))
            if moved:
                self._open_above()
            space = self.space
            if space is not None:
                folders = space.folders.values()
                if moved or not folders or not all(folder.is_in_place() for folder in folders):
                    self._open_space(space, self._above[1])

    def _open_above(self) -> None:
        os.makedirs(self._top.parent, exist_ok=True)
        top = Directory(self._top, make=True)
        root = Directory(self._top / f"v{VERSION}", top, make=True)
        writing = Directory(root.path / "writing", root, make=True)
        if self._writing_lock is not None:
            self._writing_lock.release()
        while True:
            name = os.urandom(8).hex()
            os.mkdir(name, 0o700, dir_fd=writing.fd)
            # Another process may take it for that of a dead one before it is locked.
            with suppress(FileNotFoundError, BlockingIOError):
                own = Directory(writing.path / name, writing)
                self._writing_lock = Lock(own, shared=False)
                break
        self._above = top, root, writing, own

    def _open_space(self, space: Space, root: Directory) -> None:
        if self._space_lock is not None:
            self._space_lock.release()
            self._space_lock = None
        path, late = root.path / space.name, time.monotonic() + self._wait_s
        while self._space_lock is None:
            try:
                folder = Directory(path, root, make=True)
                self._space_lock = Lock(folder, shared=True)
            except (FileNotFoundError, BlockingIOError):  # another process deletes from it, or was stopped meanwhile
                if time.monotonic() > late:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(path)) from None
                time.sleep(0.01)
        space.folders = {"": folder} | {part: Directory(path / part, folder, make=True) for part in PARTS}

    def _clean(self) -> None:
        """Delete the half-written files of dead processes."""
        *_, writing, own = self._above
        for name in names_in(writing, _PROCESS):
            if name == own.path.name and self._writing_lock is not None:
                continue
            try:
                folder = Directory(writing.path / name, writing)
                lock = Lock(folder, shared=False)
                try:
                    for entry in names_in(folder, _FILE):
                        folder.delete(entry)
                finally:
                    lock.release()
                with suppress(OSError):  # not empty
                    os.rmdir(name, dir_fd=writing.fd)
            except OSError as error:
                leave(error)

    # -- room ----------------------------------------------------------------------------------------------------------

    def _write_with_room(self, space: Space, name: FileName, pieces: Sequence[Any], size: int) -> None:
        """Write a file. Makes room if the disk is full, and the folder if somebody has deleted it."""
        for left in reversed(range(_TRIES)):
            try:
                self._write_and_rename(space.folders[name.part], str(name), pieces)
                return
            except OSError as error:
                if left and error.errno in (errno.ENOENT, errno.ESTALE):
                    self.open()
                    continue
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not left or not self._delete_bytes(size):
                    self._full_until = time.monotonic() + _PAUSE_S
                    raise

    def _write_and_rename(self, folder: Directory, name: str, pieces: Sequence[Any]) -> None:
        with self.lock:
            self._written += 1
            beside, own = str(self._written), self._above[-1]
        file = own.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                for piece in pieces:
                    write_all(file, memoryview(piece))
            finally:
                os.close(file)
            os.rename(beside, name, src_dir_fd=own.fd, dst_dir_fd=folder.fd)
        except BaseException:
            with suppress(OSError):
                own.delete(beside)
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
            if not self._delete_some():
                return False

    def _delete_bytes(self, size: int) -> bool:
        """Delete files of this many bytes. False: there are not that many."""
        while size > 0 and (deleted := self._delete_some()):
            size -= deleted
        return size <= 0

    def _delete_some(self) -> int:
        """Delete what is worth least. Returns its bytes; 0 if there is nothing to delete."""
        return self._delete_unneeded() or self._delete_unused_space() or self._delete_state()

    def _delete_unneeded(self) -> int:
        name, more = None, True
        while more and name is None:
            with self.lock:
                if self.space is None:
                    return 0
                more = self.space.grow_up(AT_ONCE)
                name = self.space.next_unneeded()
        return 0 if name is None else self.delete(name, evict=True)

    def _delete_state(self) -> int:
        """Delete a state, and the KV that only it needed: whoever writes the state again writes that KV, too."""
        while True:
            with self.lock:
                node = None if self.space is None else self.space.next_state()
                if node is None or self.space is None:
                    return 0
                name = node.names[EntryKind.STATE]
                folder, text = self.place(name)
            try:
                used_ns = os.stat(text, dir_fd=folder.fd, follow_symlinks=False).st_mtime_ns
            except OSError:
                self.forget(name)
                return 1
            with self.lock:
                if self.space is None or self.space.node(name.key) is not node or EntryKind.STATE not in node.names:
                    continue
                if used_ns > node.used_ns:  # another process used it
                    self.space.use(node, used_ns)
                    continue
            deleted = self.delete(name, evict=True)
            while more := self._delete_unneeded():
                deleted += more
            return deleted

    def _delete_unused_space(self) -> int:
        """Delete the oldest files of a namespace that no process uses."""
        with self._looking:
            root = self._above[1]
            for name, other in self._others.items():
                if not other.bytes:
                    continue
                try:
                    folder = Directory(root.path / name, root)
                    lock = Lock(folder, shared=False)
                except OSError:
                    continue
                try:
                    if deleted := self._delete_oldest(other, folder):
                        return deleted
                finally:
                    lock.release()
        return 0

    def _delete_oldest(self, other: Listing, folder: Directory) -> int:
        ages, before = [], other.bytes
        for part, names in other.sizes.items():
            with suppress(FileNotFoundError, NotADirectoryError):
                opened = Directory(folder.path / part, folder)
                for text in names:
                    with suppress(FileNotFoundError):
                        status = os.stat(text, dir_fd=opened.fd, follow_symlinks=False)
                        ages.append((status.st_mtime_ns, text, opened))
        deleted = sum(opened.delete(text) for _, text, opened in sorted(ages)[: max(1, len(ages) // 8)])
        other.look(folder, self.lock)
        if not other.bytes:  # nobody else can be in the folder: its lock is held
            with suppress(OSError):
                for part in PARTS:
                    os.rmdir(part, dir_fd=folder.fd)
                folder.delete("lock")
                os.rmdir(folder.path.name, dir_fd=self._above[1].fd)
        with self.lock:
            self.evictions += deleted
            self._others_bytes = sum(each.bytes for each in self._others.values())
        return max(before - other.bytes, len(ages))


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes. (One call writes at most 2 GiB.)"""
    while len(data):
        data = data[os.write(file, data) :]
