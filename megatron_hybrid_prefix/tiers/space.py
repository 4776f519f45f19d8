"""`Space`: which entries of a namespace are in a shared folder, as a prefix tree, and which of them may go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from megatron_hybrid_prefix.tiers.listing import FileName
from megatron_hybrid_prefix.tiers.units import EntryKind

# KV that no state needs may be waiting for the state that is being written.
_GRACE_S = 60.0


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

    Callers hold a lock, except those of `get`. No method takes longer if there are more entries, except `files`.

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
        # Nodes that may still get a state below, in the order in which they were seen. (KV is written before its state.)
        self._young: dict[Kept, None] = {}
        self._needless: dict[Kept, None] = {}  # other nodes with KV and nothing below, and no state
        self.bytes = 0
        self.counts: Counter[EntryKind] = Counter()

    def get(self, kind: EntryKind, key: bytes) -> str | None:
        """Name of the entry's file; None if it is not here. Needs no lock: each step is one of the interpreter's."""
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

    def grow_up(self, most: int) -> bool:
        """Note which KV no state is being written for any more, at most so many. Returns whether there may be more."""
        late = time.monotonic() - _GRACE_S
        nodes = list(islice(self._young, most))
        for node in nodes:
            if node.since >= late:
                return False
            del self._young[node]
            self._note_needless(node)
        return bool(nodes)

    def needless(self, most: int) -> list[str]:
        """Files that no state needs: KV without a state below, and orphans. Young ones are left out.

        Args:
            most: At most so many. Later calls return others, once these are removed.

        Returns:
            Names; deeper KV before the KV above it.
        """
        late = time.monotonic() - _GRACE_S
        found = [text for text, (*_, since) in islice(self._orphans.items(), most) if since < late]
        for node in islice(self._needless, most):
            at: Kept | None = node
            while at is not None and not at.users and at.children <= (at is not node) and at not in self._young:
                if EntryKind.KV in at.names:
                    found.append(at.names[EntryKind.KV])
                at = at.parent
            if len(found) >= most:
                break
        return found[:most]

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
            self._young[node] = None
            if parent is not None:
                parent.children += 1
                self._note_needless(parent)
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
            self._note_needless(at)
            if at.users != max(0, change):  # it had users before, or has some left
                return
            at = at.parent

    def _prune(self, node: Kept | None) -> None:
        while node is not None and not node.names and not node.children:
            del self._nodes[node.key]
            self._young.pop(node, None)
            self._needless.pop(node, None)
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent
        if node is not None:
            self._note_needless(node)

    def _note_needless(self, node: Kept) -> None:
        """Its users or children have changed, or it is not young any more."""
        if node.users or node.children or node in self._young:
            self._needless.pop(node, None)
        else:
            self._needless[node] = None
