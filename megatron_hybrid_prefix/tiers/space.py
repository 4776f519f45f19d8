"""`Space`: the files of a namespace in a shared folder, as a prefix tree, and which of them go first."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import TierIndex
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.listing import FileName, Listing
from megatron_hybrid_prefix.tiers.units import EntryKind

# KV that no state needs may be waiting for the state that is being written.
_GRACE_S = 60.0


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

    Args:
        eviction: Ranks the states.
        namespace: The namespace.

    Attributes:
        namespace: As given.
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

    def remove(self, name: FileName) -> int:
        with self._lock:
            size, orphans = super().remove(name), self._orphans.get(name.parent, {})
            if orphans.pop(name, None) and not orphans:
                del self._orphans[name.parent]
            node = self._nodes.get(name.key)
            if node is None or node.names.get(name.kind) != name:
                return size
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
            return size

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
