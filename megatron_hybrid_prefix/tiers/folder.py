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

Threads that write and the thread that looks share three locks: each `Space` has one for its index, held for a moment; one is
held while folders are opened and read (`_looking`); and one thread at a time makes room (`_room`).
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote

from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.base import VERSION
from megatron_hybrid_prefix.tiers.settings import TierSettings, gib
from megatron_hybrid_prefix.tiers.space import PARTS, FileName, Listing, Space, leave, names_in

# A disk that is full although there is nothing to delete is left alone for this long.
_PAUSE_S = 10.0
_TRIES = 3  # others may use up what was made free
_PROCESS, _FILE, _SPACE = "[0-9a-f]{16}", "[1-9][0-9]*|lock", "[0-9a-f]{32}|writing"  # names, as in the layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings(TierSettings):
    """A folder.

    Attributes:
        folder: The folder.
        budget_bytes: Most bytes in the folder, of all processes together (``gb``, GiB).
    """

    folder: Path
    budget_bytes: int
    threads: int = 16

    example = "file:///var/cache/prefix?gb=200"
    parameters: ClassVar = {"gb": ("budget_bytes", gib), **TierSettings.parameters}

    @classmethod
    def place(cls, url: str, parts: SplitResult, given: dict[str, str]) -> dict[str, Any]:
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.path == "/":
            raise ValueError(f"shared={url!r}: needs three slashes and the absolute path of a folder: {cls.example}")
        if "gb" not in given:
            raise ValueError(f"shared={url!r}: needs the size of the folder in GiB: {cls.example}")
        return {"folder": Path(unquote(parts.path))}

    def check(self) -> None:
        self.secret()
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        if not existing.is_dir():
            raise ValueError(f"shared: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"shared: cannot write to the folder {existing}")
        try:
            if existing == self.folder:
                Directory(existing)
        except OSError as error:
            raise ValueError(f"shared: {error}") from None


class SharedFolder:
    """The files of a folder: looked at, written within a budget, and deleted. Thread-safe.

    Args:
        settings: Folder and budget, and how long to wait for a lock that another process holds (``wait_s``).
        make_ranking: Makes the eviction policy of a namespace.

    Attributes:
        wanted: The namespace to use; empty: none.
        space: The namespace that is open: the wanted one, as of the last look; or `nothing`.
        nothing: A namespace without a name and without files.
        closed: Nothing is looked at any more.
        evictions: Files that this process deleted to make room.

    Raises:
        OSError: The folder cannot be made or written to, others can write to it, or its file system has no locks.
    """

    def __init__(self, settings: FolderSettings, make_ranking: Callable[[], EvictionPolicy[Any]]) -> None:
        self.settings, self._make_ranking = settings, make_ranking
        self._looking, self._room = threading.Lock(), threading.RLock()
        self.wanted = b""
        self.space = self.nothing = Space(make_ranking(), b"")
        self._others: dict[str, Listing] = {}
        self._own_lock, self._space_lock = ExitStack(), ExitStack()  # of the own folder in ``writing``, and of `space`
        self._temporary = map(str, itertools.count(1))  # names of half-written files
        self._reserved_bytes = self.evictions = 0
        self._full_until = 0.0  # the disk is full (monotonic)
        self.closed = False
        self._open_above()

    # -- looks ---------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at what other processes have written and deleted, and delete what dead ones left half-written.

        Opens, makes and locks the folders first, unless the open ones are in their places. Does nothing once closed.

        Raises:
            TimeoutError: Another process keeps a lock.
            OSError: A folder is a link or none, or others can write to it.
        """
        with self._looking:
            if self.closed:
                return
            moved = not all(folder.is_in_place() for folder in self._above)
            if moved:
                self._open_above()
            space, wanted = self.space, self.wanted
            if space.namespace != wanted:
                space = Space(self._make_ranking(), wanted)
            if wanted:
                folders = space.folders.values()
                if moved or not folders or not all(folder.is_in_place() for folder in folders):
                    self._open_space(space)
            self._clean()
            others = self._look_at_others(space)
            if wanted:
                space.look(space.folders[""])
            self.space, self._others = space, others

    def _look_at_others(self, space: Space) -> dict[str, Listing]:
        root, others = self._above[1], dict[str, Listing]()
        for name in names_in(root, _SPACE):
            if name not in ("writing", space.namespace.hex()):
                other = self._others.get(name, Listing())
                try:
                    other.look(root.below(name))
                    others[name] = other
                except OSError as error:
                    leave(error)
        return others

    def _open_above(self) -> None:
        os.makedirs(self.settings.folder.parent, exist_ok=True)
        top = Directory(self.settings.folder, make=True)
        root = top.below(f"v{VERSION}", make=True)
        writing = root.below("writing", make=True)
        self._own_lock.close()
        while True:
            # Another process may take it for that of a dead one before it is locked.
            with suppress(FileNotFoundError, BlockingIOError):
                own = writing.below(os.urandom(8).hex(), make=True)
                self._own_lock.enter_context(own.lock(shared=False))
                break
        self._above = top, root, writing, own

    def _open_space(self, space: Space) -> None:
        self._space_lock.close()
        root, name, late = self._above[1], space.namespace.hex(), time.monotonic() + self.settings.wait_s
        while True:
            try:
                folder = root.below(name, make=True)
                self._space_lock.enter_context(folder.lock(shared=True))
                break
            except (FileNotFoundError, BlockingIOError):  # another process deletes from it, or was stopped meanwhile
                if time.monotonic() > late:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another process holds the lock", str(root.path / name)
                    ) from None
                time.sleep(0.01)
        space.folders = {"": folder} | {part: folder.below(part, make=True) for part in PARTS}

    def _clean(self) -> None:
        """Delete the half-written files of dead processes."""
        writing = self._above[2]
        for name in names_in(writing, _PROCESS):
            try:
                folder = writing.below(name)
                with folder.lock(shared=False):
                    for entry in names_in(folder, _FILE):
                        folder.delete(entry)
                with suppress(OSError):  # not empty
                    os.rmdir(name, dir_fd=writing.fd)
            except OSError as error:
                leave(error)

    def close(self) -> None:
        """Let go of the locks, and of the folder for half-written files."""
        self.closed, self.space = True, self.nothing
        self._space_lock.close()
        self._own_lock.close()
        with suppress(OSError):
            self._clean()

    # -- write ---------------------------------------------------------------------------------------------------------

    def write(self, space: Space, name: FileName, pieces: Sequence[Any]) -> bool:
        """Write a file under a temporary name, and rename it. Others see all of it or nothing.

        The file is not synced. If the machine fails (not only the process), what was written in the last seconds may be
        lost or half there. The checks of the reader make that a miss.

        Returns:
            False: there is no room for it.

        Raises:
            OSError: It cannot be written; nothing is left of it.
        """
        size = sum(map(len, pieces))
        if time.monotonic() < self._full_until or not self._make_room(space, size):
            return False
        try:
            for left in reversed(range(_TRIES)):
                try:
                    self._write_and_rename(*space.place(name), pieces)
                    break
                except OSError as error:
                    if left and error.errno in (errno.ENOENT, errno.ESTALE):  # somebody has deleted the folder
                        self.look()
                    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    elif not left or not self._delete_down_to(space, self.bytes_used - size):
                        self._full_until = time.monotonic() + _PAUSE_S
                        raise
            space.add(name, size, time.time_ns())
        finally:
            with self._room:
                self._reserved_bytes -= size
        return True

    def _write_and_rename(self, folder: Directory, name: str, pieces: Sequence[Any]) -> None:
        own, beside = self._above[-1], next(self._temporary)
        file = FileIO(own.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w")
        try:
            with file:
                for piece in pieces:
                    write_all(file.fileno(), memoryview(piece))
            os.rename(beside, name, src_dir_fd=own.fd, dst_dir_fd=folder.fd)
        except BaseException:
            with suppress(OSError):
                own.delete(beside)
            raise

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        """Bytes of all namespaces, as of the last look."""
        return self.space.bytes + sum(other.bytes for other in self._others.values())

    def _make_room(self, space: Space, size: int) -> bool:
        """Reserve bytes, if need be by deleting files. False: there is not enough to delete."""
        if size > self.settings.budget_bytes:
            return False
        with self._room:
            most_bytes = self.settings.budget_bytes - self._reserved_bytes - size
            if self.bytes_used > most_bytes:
                self.look()  # others may have deleted enough
            if not self._delete_down_to(space, most_bytes):
                return False
            self._reserved_bytes += size
            return True

    def _delete_down_to(self, space: Space, most_bytes: int) -> bool:
        """Delete what is worth least until at most this is used. False: nothing is left, or the namespace is not open."""
        with self._room:
            while self.bytes_used > most_bytes:
                if space is not self.space:
                    return False
                if not (self._delete_unneeded(space) or self._delete_unused_space() or self._delete_state(space)):
                    return False
        return True

    def _evict(self, space: Space, name: FileName) -> None:
        folder, text = space.place(name)
        self.evictions += folder.delete(text)
        space.remove(name)

    def _delete_unneeded(self, space: Space) -> bool:
        if (name := space.next_unneeded()) is not None:
            self._evict(space, name)
        return name is not None

    def _delete_state(self, space: Space) -> bool:
        """Delete a state, and the KV that only it needed: whoever writes the state again writes that KV, too."""
        while (found := space.next_used_least()) is not None:
            name, used_ns = found
            folder, text = space.place(name)
            with suppress(OSError):
                if (since_ns := folder.status(text).st_mtime_ns) > used_ns:  # another process used it
                    space.use(name, since_ns)
                    continue
            self._evict(space, name)
            while self._delete_unneeded(space):
                pass
            return True
        return False

    def _delete_unused_space(self) -> bool:
        """Delete the oldest files of a namespace that no process uses."""
        with self._looking:
            for name, other in self._others.items():
                if not other.bytes:
                    continue
                try:
                    folder = self._above[1].below(name)
                    lock = folder.lock(shared=False)
                except OSError:
                    continue
                with lock:
                    if self._delete_oldest(other, folder):
                        return True
        return False

    def _delete_oldest(self, other: Listing, folder: Directory) -> bool:
        ages, before = [], other.bytes
        for part, names in other.sizes.items():
            with suppress(FileNotFoundError, NotADirectoryError):
                opened = folder.below(part)
                for text in names:
                    with suppress(FileNotFoundError):
                        ages.append((opened.status(text).st_mtime_ns, text, opened))
        deleted = sum(opened.delete(text) for _, text, opened in sorted(ages)[: max(1, len(ages) // 8)])
        self.evictions += deleted
        other.look(folder)
        if not other.bytes:  # nobody else can be in the folder: its lock is held
            with suppress(OSError):
                for part in PARTS:
                    os.rmdir(part, dir_fd=folder.fd)
                folder.delete("lock")
                os.rmdir(folder.path.name, dir_fd=self._above[1].fd)
        return deleted > 0 or other.bytes < before


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes. (One call writes at most 2 GiB.)"""
    while len(data):
        data = data[os.write(file, data) :]
