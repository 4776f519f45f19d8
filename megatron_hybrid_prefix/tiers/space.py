"""`Space`: the files of a namespace in a shared folder, as a prefix tree, and which of them go first."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice

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
        since: When this process learned of the block (monotonic).
        used_ns: Time of the state's last use, as its file says.
    """

    __slots__ = ("children", "depth_blocks", "key", "names", "parent", "since", "used_ns")

    reason = CheckpointReason.TAIL  # why the state was kept is not stored

    def __init__(self, name: FileName, parent: KeptFile | None) -> None:
        self.key, self.parent, self.depth_blocks = name.key, parent, name.depth_blocks
        self.names: dict[EntryKind, FileName] = {}
        self.children = self.used_ns = 0
        self.since = time.monotonic()


class Space(TierIndex[KeptFile]):
    """Index of one namespace. It only notes; nothing is read or deleted here.

    Callers hold a lock, except those of `get`. No method takes longer if there are more entries.

    Args:
        eviction: Ranks the states.
        name: Of the namespace.

    Attributes:
        name: As given.
        listing: Its files.
        folders: Their folders, by part; "" is the namespace's own. Empty until they are open.
        counts: Entries by kind.
    """

    def __init__(self, eviction: EvictionPolicy[KeptFile], name: str) -> None:
        super().__init__(eviction)
        self.name, self.listing = name, Listing()
        self.folders: dict[str, Directory] = {}
        self._nodes: dict[bytes, KeptFile] = {}
        # Files whose parent is not here, with the time of last use, and when they were seen (monotonic).
        self._orphans: dict[FileName, tuple[int, float]] = {}
        self._orphans_of: dict[bytes, set[FileName]] = {}  # by the parent's key
        # Nodes that may still get a state below, in the order in which they were seen. (KV is written before its state.)
        self._young: dict[KeptFile, None] = {}
        self.counts: Counter[EntryKind] = Counter()

    def get(self, kind: EntryKind, key: bytes) -> FileName | None:
        """The entry's file; None if it is not here. Needs no lock: each step is one of the interpreter's."""
        node = self._nodes.get(key)
        return None if node is None else node.names.get(kind)

    def add(self, name: FileName, size: int, used_ns: int) -> None:
        """There is a file of ``size`` bytes, used last at this time."""
        if not self.listing.add(name.part, str(name), size) or self.get(name.kind, name.key) is not None:
            return
        if self._place(name, used_ns):
            self._adopt(name.key)
        else:
            self._orphans[name] = used_ns, time.monotonic()
            self._orphans_of.setdefault(name.parent, set()).add(name)

    def remove(self, name: FileName) -> int:
        """A file is gone, or about to be deleted. Returns its bytes; 0 if it was not known."""
        size = self.listing.remove(name.part, str(name)) or 0
        if name in self._orphans:
            self._pop_orphan(name)
            return size
        node = self._nodes.get(name.key)
        if node is None or node.names.get(name.kind) != name:
            return size
        del node.names[name.kind]
        self.counts[name.kind] -= 1
        if name.kind == EntryKind.STATE:
            above: KeptFile | None = node
            while above is not None and self.users[above] == 1:  # only this state needs it: it waits for no other
                self._young.pop(above, None)
                above = above.parent
            self.drop_state(node)
        else:
            self.drop_kv(node)
        self._prune(node)
        return size

    def use(self, node: KeptFile, used_ns: int) -> None:
        """A request resumed from the state."""
        node.used_ns = max(node.used_ns, used_ns)
        self.use_state(node)

    def node(self, key: bytes) -> KeptFile | None:
        """The node of a block."""
        return self._nodes.get(key)

    def has_kv(self, node: KeptFile) -> bool:
        """KV below goes first, and young KV waits for its state."""
        return EntryKind.KV in node.names and not node.children and node not in self._young

    def grow_up(self, most: int) -> bool:
        """Note which KV no state is being written for any more, at most so many. Returns whether there may be more."""
        late = time.monotonic() - _GRACE_S
        nodes = list(islice(self._young, most))
        for node in nodes:
            if node.since >= late:
                return False
            del self._young[node]
            self._note(node)
        return bool(nodes)

    def next_unneeded(self) -> FileName | None:
        """The file to delete next, of KV that no state needs, and of orphans. Young ones are left out. None: there is none."""
        late = time.monotonic() - _GRACE_S
        for name, (_, since) in islice(self._orphans.items(), 1):
            if since < late:
                return name
        node = self.next_kv()
        return None if node is None else node.names[EntryKind.KV]

    def _place(self, name: FileName, used_ns: int) -> bool:
        node = self._nodes.get(name.key)
        if node is None:
            parent = self._nodes.get(name.parent) if name.parent else None
            if (parent is None) != (name.depth_blocks == 1) or name.depth_blocks < 1:
                return False
            if parent is not None and parent.depth_blocks != name.depth_blocks - 1:
                return False
            node = self._nodes[name.key] = KeptFile(name, parent)
            self._young[node] = None
            if parent is not None:
                parent.children += 1
                self.drop_kv(parent)
        node.names[name.kind] = name
        self.counts[name.kind] += 1
        if name.kind == EntryKind.STATE:
            node.used_ns = used_ns
            self.add_state(node)
        else:
            self._note(node)
        return True

    def _adopt(self, key: bytes) -> None:
        """Give the orphans below this block their places."""
        parents = [key]
        while parents:
            for name in sorted(self._orphans_of.get(parents.pop(), ())):
                used_ns, _ = self._orphans[name]
                if self._place(name, used_ns):
                    self._pop_orphan(name)
                    parents.append(name.key)

    def _pop_orphan(self, name: FileName) -> None:
        del self._orphans[name]
        siblings = self._orphans_of[name.parent]
        siblings.discard(name)
        if not siblings:
            del self._orphans_of[name.parent]

    def _prune(self, node: KeptFile) -> None:
        while not node.names and not node.children:
            del self._nodes[node.key]
            self._young.pop(node, None)
            if node.parent is None:
                return
            node = node.parent
            node.children -= 1
            self._note(node, first=True)  # right after what was below it

    def _note(self, node: KeptFile, *, first: bool = False) -> None:
        if self.has_kv(node) and node not in self.users:
            self.note_kv(node, first=first)
