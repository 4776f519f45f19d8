"""`FolderIndex`: which entries a shared folder has, as this process knows it, and the locks by which processes know of each other."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.tiers.header import VERSION
from megatron_hybrid_prefix.tiers.listing import PARTS, FileName, Listing, by_need, part_of
from megatron_hybrid_prefix.tiers.locks import Lock
from megatron_hybrid_prefix.tiers.space import Space
from megatron_hybrid_prefix.tiers.units import EntryKind

AT_ONCE = 64  # entries that are deleted, or noted, while others wait for the index


class FolderIndex:
    """What is in a folder: looked at, used and deleted. Thread-safe.

    Args:
        folder: The folder.
        make_ranking: Makes the eviction policy of a namespace.
        reason: See `Space`.
        wait_s: Longest time to wait for a lock that another process holds.

    Attributes:
        lock: Held while `space` is used.
        space: The namespace that this process uses; None until `use_space`.

    Raises:
        OSError: The folder cannot be made or written to, or its file system has no locks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        make_ranking: Callable[[], EvictionPolicy[Any]],
        reason: CheckpointReason | None = None,
        wait_s: float = 1.0,
    ) -> None:
        self._wait_s = wait_s
        self._make_ranking, self._reason = make_ranking, reason
        self._top = folder
        self._root = folder / f"v{VERSION}"
        self._root_text = str(self._root)
        self.lock = threading.RLock()
        self._looking = threading.Lock()  # held while the folder is read
        self.space: Space | None = None
        self._name: str | None = None
        self._listing: Listing | None = None
        self._others: dict[str, Listing] = {}
        self._others_bytes = 0
        self._space_lock: Lock | None = None
        self._writing: Path | None = None
        self._writing_lock: Lock | None = None
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
                    if name is not None and listing.remove(part, str(name)) is not None:
                        space.remove(name)
            names = ((FileName.of(text), stat) for text, stat in new.items())
            found += [(name, stat) for name, stat in names if name is not None and name.part == part]
        new_names = iter(sorted(found, key=by_need))
        while batch := list(islice(new_names, AT_ONCE)):
            with self.lock:
                for name, stat in batch:
                    if listing.add(name.part, str(name), stat.st_size):
                        space.add(name, stat.st_size, stat.st_mtime_ns)
            time.sleep(0)  # else others that wait for the lock do not get it

    def path(self, name: FileName) -> Path:
        """Where the entry of the namespace in use is, or would be."""
        return Path(self.place(name.key, str(name)))

    def place(self, key: bytes, text: str) -> str:
        """The same as text, of a name as text: for calls that are made often."""
        assert self._name is not None
        return f"{self._root_text}/{self._name}/{part_of(key)}/{text}"

    @property
    def bytes_used(self) -> int:
        """Bytes of all namespaces, as of the last look."""
        with self.lock:
            return self._others_bytes + (0 if self.space is None else self.space.bytes)

    # -- write ---------------------------------------------------------------------------------------------------------

    def forget(self, name: FileName) -> int:
        """The file is gone, or is not to be read again. Returns its bytes; 0 if it was not known."""
        with self.lock:
            if self.space is None or self._listing is None:
                return 0
            self.space.remove(name)
            return self._listing.remove(name.part, str(name)) or 0

    def delete(self, name: FileName) -> int:
        """Delete the file. Returns its bytes.

        Raises:
            OSError: It cannot be deleted.
        """
        with self.lock:
            if self._name is None:
                return 0
            place = self.path(name)
        place.unlink(missing_ok=True)
        return self.forget(name)

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
        """Make the folders that are missing, and lock them. Raises TimeoutError if another process keeps a lock."""
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
                late = time.monotonic() + self._wait_s
                while self._space_lock is None:
                    os.makedirs(place, mode=0o700, exist_ok=True)
                    try:
                        self._space_lock = Lock(place / "lock", shared=True)
                    except FileNotFoundError:  # another process has just deleted the folder
                        continue
                    except BlockingIOError:  # another process deletes files of it; or it was stopped meanwhile
                        if time.monotonic() > late:
                            raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(place)) from None
                        time.sleep(0.01)
                for number in range(PARTS):
                    os.makedirs(place / f"{number:02x}", mode=0o700, exist_ok=True)

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
