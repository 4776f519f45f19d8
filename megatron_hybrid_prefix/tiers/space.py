"""The files of a namespace in a shared folder: what a name says (`FileName`), which files there are (`Listing`), and, for
the namespace in use, as a prefix tree, which of them go first (`Space`).
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.units import EntryKind

logger = logging.getLogger(__name__)
_LEFT: set[str] = set()  # what `leave` has named

PARTS = [f"{number:02x}" for number in range(64)]  # folders of a namespace
AT_ONCE = 64  # entries that are noted before other threads get their turn
_TICK_S = 1.0  # a change may leave a folder's time of change as it is within this time
_GRACE_S = 60.0  # KV that no state needs may be waiting for the state that is being written


class FileName(NamedTuple):
    """The fields of a file's name. The depth is in blocks; the parent's key is empty for the first block."""

    kind: EntryKind
    depth_blocks: int
    key: bytes
    parent: bytes

    def __str__(self) -> str:
        return f"{self.kind.name.lower()}-{self.depth_blocks}-{self.key.hex()}-{self.parent.hex()}"

    @property
    def part(self) -> str:
        """The folder it is in."""
        return PARTS[self.key[0] % len(PARTS)]

    @classmethod
    def of(cls, text: str) -> FileName | None:
        """The reverse of ``str``; None if the file is no entry."""
        try:
            kind, depth, key, parent = text.split("-")
            name = cls(EntryKind[kind.upper()], int(depth), bytes.fromhex(key), bytes.fromhex(parent))
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

    def remove(self, name: FileName) -> None:
        """A file is gone, or about to be deleted."""
        self.bytes -= self.sizes[name.part].pop(str(name), 0)

    def look(self, folder: Directory) -> None:
        """Read the parts that changed. What is no regular file, or has no name of an entry, is not there.

        Files that this process adds or removes meanwhile stay as it says.
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


class KeptFile:
    """A block with KV, a state or both in the folder.

    Attributes:
        key, parent, depth_blocks: As in the prefix tree.
        names: Its files, by kind.
        children: Number of child nodes.
        since: When this process learned of the block (monotonic). Before all time, if its KV waits for no state.
        used_ns: Time of the state's last use, as its file says.
    """

    __slots__ = ("children", "depth_blocks", "key", "names", "parent", "since", "used_ns")

    reason = CheckpointReason.TAIL  # why the state was kept is not stored

    def __init__(self, name: FileName, parent: KeptFile | None) -> None:
        self.key, self.parent, self.depth_blocks = name.key, parent, name.depth_blocks
        self.names: dict[EntryKind, FileName] = {}
        self.children = self.used_ns = 0
        self.since = time.monotonic()


class Space(Listing, TierIndex[KeptFile]):
    """Index of the namespace in use. It only notes; nothing is read or deleted here.

    Thread-safe. No method but `look` takes longer if there are more entries.

    Attributes:
        folders: Folders of its files, by part; "" is the namespace's own. Empty until they are open.
        counts: Entries by kind.
        wrong: Files to be deleted. They are not here any more.
        blocked: Folders are in the places of these files: they are not tried again.
    """

    def __init__(self, eviction: EvictionPolicy[KeptFile], namespace: bytes) -> None:
        Listing.__init__(self)
        TierIndex.__init__(self, eviction)
        self.namespace = namespace
        self.folders: dict[str, Directory] = {}
        self.counts: Counter[EntryKind] = Counter()
        self.wrong: set[FileName] = set()
        self.blocked: set[FileName] = set()
        self._lock = threading.Lock()
        self._nodes: dict[bytes, KeptFile] = {}
        # Files whose parent is not here, by its key, with the time of last use, and when they were seen (monotonic).
        self._orphans: dict[bytes, dict[FileName, tuple[int, float]]] = {}

    def place(self, name: FileName) -> tuple[Directory, str]:
        """Where a file is, or would be."""
        return self.folders[name.part], str(name)

    def get(self, kind: EntryKind, key: bytes) -> FileName | None:
        """The entry's file; None if it is not here. Waits for no lock: each step is one of the interpreter's."""
        node = self._nodes.get(key)
        return None if node is None else node.names.get(kind)

    def add(self, name: FileName, size: int, used_ns: int) -> bool:
        """Files below it that were waiting for it get their places, too."""
        with self._lock:
            if not super().add(name, size, used_ns) or self.get(name.kind, name.key) is not None:
                return False
            found = [(name, (used_ns, time.monotonic()))]
            while found:
                name, seen = found.pop()
                if self._put_in_tree(name, seen[0]):
                    found += self._orphans.pop(name.key, {}).items()
                else:
                    self._orphans.setdefault(name.parent, {})[name] = seen
            return True

    def remove(self, name: FileName) -> None:
        with self._lock:
            super().remove(name)
            orphans = self._orphans.get(name.parent, {})
            if orphans.pop(name, None) and not orphans:
                del self._orphans[name.parent]
            node = self._nodes.get(name.key)
            if node is None or node.names.get(name.kind) != name:
                return
            del node.names[name.kind]
            self.counts[name.kind] -= 1
            if name.kind == EntryKind.STATE:
                self.drop_state(node)
                self._goes_first(node)
            else:
                self.drop_kv(node)
            while not node.names and not node.children:
                del self._nodes[node.key]
                if node.parent is None:
                    break
                node = node.parent
                node.children -= 1
                self._goes_first(node)  # right after what was below it

    def use(self, name: FileName, used_ns: int) -> None:
        """A request resumed from the state."""
        with self._lock:
            node = self._nodes.get(name.key)
            if node is not None and node in self.states:
                node.used_ns = max(node.used_ns, used_ns)
                self.use_state(node)

    def has_kv(self, node: KeptFile) -> bool:
        """KV below goes first."""
        return EntryKind.KV in node.names and not node.children

    def next_unneeded(self) -> FileName | None:
        """The file to delete next, of KV that no state needs, and of orphans. Young ones are left out. None: there is none."""
        with self._lock:
            late = time.monotonic() - _GRACE_S
            orphan = next(((name, since) for each in self._orphans.values() for name, (_, since) in each.items()), None)
            if orphan is not None and orphan[1] < late:
                return orphan[0]
            node = self.next_kv()  # the oldest
            return None if node is None or node.since >= late else node.names[EntryKind.KV]

    def next_used_least(self) -> tuple[FileName, int] | None:
        """The file of the state to delete next, and the time of its last use; None: there is none."""
        with self._lock:
            node = self.next_state()
            return None if node is None else (node.names[EntryKind.STATE], node.used_ns)

    def _put_in_tree(self, name: FileName, used_ns: int) -> bool:
        """Give a file its place. False: its parent is not here."""
        node = self._nodes.get(name.key)
        if node is None:
            parent = self._nodes.get(name.parent)
            above_blocks = 0 if parent is None else parent.depth_blocks
            if (parent is None and name.parent) or name.depth_blocks != above_blocks + 1:
                return False
            node = self._nodes[name.key] = KeptFile(name, parent)
            if parent is not None:
                parent.children += 1
                self.drop_kv(parent)
        node.names[name.kind] = name
        self.counts[name.kind] += 1
        if name.kind == EntryKind.STATE:
            node.used_ns = used_ns
            self.add_state(node)
        elif self.has_kv(node) and node not in self.users:
            self.note_kv(node)
        return True

    def _goes_first(self, node: KeptFile) -> None:
        """What needed the node's KV has gone: it waits for no state, and goes before all other KV unless another state needs it."""
        node.since = -math.inf
        if self.has_kv(node) and node not in self.users:
            self.note_kv(node, first=True)
