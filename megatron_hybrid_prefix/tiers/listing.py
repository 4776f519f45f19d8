"""`FileName` and `Listing`: what the names of a shared folder's files say, and which files a namespace has."""

from __future__ import annotations

import logging
import os
import re
import time
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
AT_ONCE = 64  # entries that are noted before other threads get their turn
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

    def __init__(self) -> None:
        self.sizes: dict[str, dict[str, int]] = {part: {} for part in PARTS}  # by part, by name
        # By part: its time of change, when that was first seen (monotonic), and whether it need not be read again.
        self._looks: dict[str, tuple[int, float, bool]] = {}
        self.bytes = 0

    def add(self, name: FileName, size: int, used_ns: int) -> bool:
        """There is a file of ``size`` bytes, used last at this time. Returns whether it is new."""
        files, text = self.sizes[name.part], str(name)
        if text in files:
            return False
        files[text] = size
        self.bytes += size
        return True

    def remove(self, name: FileName) -> int:
        """A file is gone, or about to be deleted. Returns its bytes; 0 if it was not known."""
        size = self.sizes[name.part].pop(str(name), 0)
        self.bytes -= size
        return size

    def look(self, folder: Directory) -> None:
        """Read the parts that changed. What is no regular file, or has no name of an entry, is not there.

        Files that this process adds or removes meanwhile stay as it says.

        Args:
            folder: That of the namespace.
        """
        gone: list[str] = []
        new: list[tuple[FileName, int, int]] = []
        for part, sizes in self.sizes.items():
            before, seen = set(sizes), set[str]()
            try:
                changed_ns, now = folder.status(part).st_mtime_ns, time.monotonic()
                last_ns, since, settled = self._looks.get(part, (None, now, False))
                if last_ns != changed_ns:
                    since, settled = now, False
                if settled:
                    continue
                opened = folder.below(part)
                with os.scandir(opened.fd) as entries:
                    for entry in entries:
                        seen.add(entry.name)
                        if entry.name in before:
                            continue
                        name = FileName.of(entry.name)
                        if name is None or name.part != part or not entry.is_file(follow_symlinks=False):
                            leave(opened.path / entry.name)
                            continue
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            new.append((name, status.st_size, status.st_mtime_ns))
                # Two changes within one tick of the file system's clock have the same time: read it again later.
                self._looks[part] = changed_ns, since, now - since > _TICK_S
            except (FileNotFoundError, NotADirectoryError):
                self._looks.pop(part, None)
            gone += before - seen
        for name in map(FileName.of, gone):
            if name is not None:
                self.remove(name)
        for number, found in enumerate(sorted(new, key=_by_need), 1):
            self.add(*found)
            if number % AT_ONCE == 0:
                time.sleep(0)  # else others that wait for a lock do not get it


def _by_need(found: tuple[FileName, int, int]) -> tuple[bool, int]:
    """KV before states; KV from the front, states in the order of their use."""
    name, _, used_ns = found
    return (True, used_ns) if name.kind == EntryKind.STATE else (False, name.depth_blocks)


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
