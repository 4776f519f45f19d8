"""`FileName` and `Listing`: what the names of a shared folder's files say, and which files a namespace has."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.units import EntryKind

logger = logging.getLogger(__name__)
_LEFT: set[str] = set()  # what `leave` has named

PARTS = [f"{number:02x}" for number in range(64)]  # folders of a namespace
_KINDS = {EntryKind.KV: "kv", EntryKind.STATE: "state"}
_KIND_OF = {name: kind for kind, name in _KINDS.items()}
_TICK_S = 1.0  # a change may leave a folder's time of change as it is within this time


class FileName(NamedTuple):
    """The fields of a file's name. The depth is in blocks; the parent's key is empty for the first block."""

    kind: EntryKind
    depth_blocks: int
    key: bytes
    parent: bytes

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]}-{self.depth_blocks}-{self.key.hex()}-{self.parent.hex()}"

    @property
    def part(self) -> str:
        """The folder it is in."""
        return PARTS[self.key[0] % len(PARTS)]

    @classmethod
    def of(cls, text: str, part: str | None = None) -> FileName | None:
        """The reverse of ``str``; None if the file is no entry, or not one of this part."""
        try:
            kind, depth, key, parent = text.split("-")
            name = cls(_KIND_OF[kind], int(depth), bytes.fromhex(key), bytes.fromhex(parent))
        except (ValueError, KeyError):
            return None
        return name if name.key and str(name) == text and part in (None, name.part) else None


class Listing:
    """Files of one namespace, and their sizes: as of the last look, and as this process has changed them since."""

    def __init__(self) -> None:
        self.sizes: dict[str, dict[str, int]] = {part: {} for part in PARTS}  # by part, by name
        # By part: its time of change, when that was first seen (monotonic), and whether it need not be read again.
        self._looks: dict[str, tuple[int, float, bool]] = {}
        self.bytes = 0

    def add(self, part: str, name: str, size: int) -> bool:
        """A file is there. Returns whether it is new."""
        if name in self.sizes[part]:
            return False
        self.sizes[part][name] = size
        self.bytes += size
        return True

    def remove(self, part: str, name: str) -> int | None:
        """A file is gone. Returns its bytes; None if it was not there."""
        size = self.sizes[part].pop(name, None)
        self.bytes -= size or 0
        return size

    def read(
        self, folder: Directory, lock: threading.RLock
    ) -> Iterator[tuple[str, set[str], dict[FileName, os.stat_result]]]:
        """Read the parts that changed. What is no regular file, or has no name of an entry, is not there.

        Args:
            folder: That of the namespace.
            lock: Held by whoever calls `add` and `remove`.

        Yields:
            Name of a part, files that are gone, files that are new. Files that changed since the part was read are in neither.
        """
        for part, sizes in self.sizes.items():
            before, kept = set[str](), set[str]()
            new: dict[FileName, os.stat_result] = {}
            try:
                changed_ns = os.stat(part, dir_fd=folder.fd, follow_symlinks=False).st_mtime_ns
                now = time.monotonic()
                last_ns, since, settled = self._looks.get(part, (None, now, False))
                if last_ns != changed_ns:
                    since, settled = now, False
                if settled:
                    continue
                with lock:
                    before = set(sizes)
                opened = Directory(folder.path / part, folder)
                with os.scandir(opened.fd) as entries:
                    for entry in entries:
                        if entry.name in before:
                            kept.add(entry.name)
                        elif (name := FileName.of(entry.name, part)) and entry.is_file(follow_symlinks=False):
                            with suppress(FileNotFoundError):
                                new[name] = entry.stat(follow_symlinks=False)
                        else:
                            leave(opened.path / entry.name)
                # Two changes within one tick of the file system's clock have the same time: read it again later.
                self._looks[part] = changed_ns, since, now - since > _TICK_S
            except (FileNotFoundError, NotADirectoryError):
                self._looks.pop(part, None)
                with lock:
                    before = set(sizes)
            if before - kept or new:
                yield part, before - kept, new

    def look(self, folder: Directory, lock: threading.RLock) -> None:
        """Read the parts that changed, and note what is there."""
        for part, gone, new in self.read(folder, lock):
            with lock:
                for text in gone:
                    self.remove(part, text)
                for name, status in new.items():
                    self.add(part, str(name), status.st_size)


def names_in(folder: Directory, ours: str) -> list[str]:
    """Names that this package makes, by a pattern. Others are left alone. None, if the folder was deleted."""
    found: list[str] = []
    with suppress(FileNotFoundError):
        for name in os.listdir(folder.fd):
            if re.fullmatch(ours, name):
                found.append(name)
            else:
                leave(folder.path / name)
    return sorted(found)


def leave(what: Path | OSError) -> None:
    """Log, once, what is left alone. Not what another process uses or has just deleted, or a network file system has hidden."""
    is_usual = isinstance(what, FileNotFoundError | BlockingIOError) or (isinstance(what, Path) and what.name[0] == ".")
    if not is_usual and str(what) not in _LEFT:
        _LEFT.add(str(what))
        logger.warning("shared: not of this package, left alone: %s", what)


def by_need(found: tuple[FileName, os.stat_result]) -> tuple[bool, int]:
    """KV before states; KV from the front, states in the order of their use."""
    name, status = found
    return (True, status.st_mtime_ns) if name.kind == EntryKind.STATE else (False, name.depth_blocks)
