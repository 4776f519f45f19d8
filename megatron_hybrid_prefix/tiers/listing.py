"""`FileName` and `Listing`: what the names of a shared folder's files say, and which files a namespace has."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_hybrid_prefix.tiers.units import EntryKind

PARTS = 64  # folders of a namespace
_PARTS = [f"{number:02x}" for number in range(PARTS)]
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
        return _PARTS[self.key[0] % PARTS]

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
        self._sizes: dict[str, dict[str, int]] = {part: {} for part in _PARTS}  # by part, by name
        # By part: its time of change, when that was first seen (monotonic), and whether it need not be read again.
        self._looks: dict[str, tuple[int, float, bool]] = {}
        self.bytes = 0

    def files(self) -> dict[str, int]:
        """All files and their bytes."""
        return {name: size for part in self._sizes.values() for name, size in part.items()}

    def add(self, part: str, name: str, size: int) -> bool:
        """A file is there. Returns whether it is new."""
        if name in self._sizes[part]:
            return False
        self._sizes[part][name] = size
        self.bytes += size
        return True

    def remove(self, part: str, name: str) -> int | None:
        """A file is gone. Returns its bytes; None if it was not there."""
        size = self._sizes[part].pop(name, None)
        self.bytes -= size or 0
        return size

    def read(self, lock: threading.RLock) -> Iterator[tuple[str, set[str], dict[str, os.stat_result]]]:
        """Read the parts that changed.

        Args:
            lock: Held by whoever calls `add` and `remove`.

        Yields:
            Name of a part, files that are gone, files that are new. Files that changed since the part was read are in neither.
        """
        for part, sizes in self._sizes.items():
            place, before = f"{self.folder}/{part}", set[str]()
            found: dict[str, os.stat_result | None] = {}
            try:
                changed_ns, now = os.stat(place).st_mtime_ns, time.monotonic()
                last_ns, since, settled = self._looks.get(part, (None, now, False))
                if last_ns != changed_ns:
                    since, settled = now, False
                if settled:
                    continue
                with lock:
                    before = set(sizes)
                with os.scandir(place) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            found[entry.name] = None if entry.name in before else entry.stat(follow_symlinks=False)
                # Two changes within one tick of the file system's clock have the same time: read it again later.
                self._looks[part] = changed_ns, since, now - since > _TICK_S
            except (FileNotFoundError, NotADirectoryError):
                self._looks.pop(part, None)
                with lock:
                    before = set(sizes)
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


def by_need(found: tuple[FileName, os.stat_result]) -> tuple[bool, int]:
    """KV before states; KV from the front, states in the order of their use."""
    name, stat = found
    return (True, stat.st_mtime_ns) if name.kind == EntryKind.STATE else (False, name.depth_blocks)
