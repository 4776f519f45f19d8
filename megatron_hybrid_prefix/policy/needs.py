"""What the kept states of a tier need, and what it evicts next (`TierIndex`). The device, the host and a shared folder have one each.

A prompt resumes from a state, and reads the KV before it. So a state *needs* the KV at its node and above, and KV is worth
what the states that need it are worth. When a tier needs room, these go first:

1. On the device: a guess (``tiers/blocks.py``).
2. *Unneeded* KV: no state of the tier needs it, so no request can resume there. Unneeded longest first; the deepest
   block first. On the host, KV that the device has, too, counts as unneeded: nothing is lost with it.
3. On the host: a state that the device has, too.
4. A state that only ended sessions used (``cache_session``), ended longest ago first.
5. The state that the eviction policy names. The KV that only it needed is unneeded then.

On the device, pinned states (``cache_uses``, ``cache_pin``) go when no other may.

`Ancestry` says which kept states are above and below each other, and how much KV only one of them needs. It is a compressed trie over
the nodes of the prefix tree, with the nodes where a state is kept, and the forks: nodes where the paths to two of them part. The
nodes in between are not in it; they are reached by ``parent``. O(distance) per step, O(states) memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.policy.base import EvictionPolicy, KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


def is_guess(state: KeptState) -> bool:
    """Whether the state is a speculative checkpoint: no prompt has shared it yet."""
    return state.reason == CheckpointReason.INTERVAL


class TierIndex[N: KeptState](ABC):
    """Which states of a tier need which KV, and what goes next. A subclass says where the entries are, and who holds them.

    Adding or dropping a state takes O(blocks that become needed or unneeded), and the policy's share. All else is O(1).

    Args:
        eviction: Ranks the states.

    Attributes:
        eviction: See Args.
        states: The tier's states.
        users: By node: 1 if its state is in ``states``, and 1 for each child with users. A node without users is not in it: no
            state needs its KV.
        unneeded: Nodes of all unneeded KV that no running request holds, in the order of eviction.
        ended: Nodes of states that only ended sessions used, in the order of eviction.
    """

    def __init__(self, eviction: EvictionPolicy[N]) -> None:
        self.eviction = eviction
        self.states: set[N] = set()
        self.users: dict[N, int] = {}
        self.unneeded: OrderedDict[N, None] = OrderedDict()
        self.ended: dict[N, None] = {}

    def clear(self) -> None:
        """All entries are gone."""
        self.eviction.clear()
        self.states.clear()
        self.users.clear()
        self.unneeded.clear()
        self.ended.clear()

    # -- what a subclass knows -----------------------------------------------------------------------------------------

    @abstractmethod
    def has_kv(self, node: N) -> bool:
        """Whether the tier has the node's KV, and no running request holds it."""

    def is_copy(self, node: N) -> bool:
        """Whether a faster tier has the node's KV, too."""
        return False

    def is_pinned(self, node: N, *, kv: bool) -> bool:
        """Whether the node's KV, or its state, must stay for now. It keeps its place in the order."""
        return False

    # -- what happens --------------------------------------------------------------------------------------------------

    def note_kv(self, node: N, *, first: bool = False) -> None:
        """The node's KV is unneeded now: it came, nobody holds it any more, or a faster tier got it, too.

        Args:
            node: Its KV goes after all other unneeded KV.
            first: It goes before it.
        """
        if node in self.unneeded:
            del self.unneeded[node]
        self.unneeded[node] = None
        if first:
            self.unneeded.move_to_end(node, last=False)

    def drop_kv(self, node: N) -> None:
        """The node's KV has left the tier, or is needed or held now."""
        if node in self.unneeded:
            del self.unneeded[node]

    def add_state(self, node: N) -> None:
        """The tier has the node's state now."""
        self.eviction.added(node)
        self.states.add(node)
        self._need(node)

    def use_state(self, node: N) -> None:
        """A request resumes from the node's state."""
        self.eviction.used(node)

    def drop_state(self, node: N) -> None:
        """The node's state has left the tier."""
        self.eviction.removed(node)
        self.states.remove(node)
        self.ended.pop(node, None)
        self._unneed(node)

    # -- what goes next ------------------------------------------------------------------------------------------------

    def next_kv(self) -> N | None:
        """The node whose KV goes next; None if no KV is unneeded."""
        for node in self.unneeded:
            if not self.is_pinned(node, kv=True):
                return node
        return None

    def next_state(self, may_go: Callable[[N], bool] = lambda node: True) -> N | None:
        """The node whose state goes next, once no KV is unneeded; None if there is none.

        Args:
            may_go: Whether a state may go that is not pinned.
        """

        def evictable(node: N) -> bool:
            return not self.is_pinned(node, kv=False) and may_go(node)

        return next(filter(evictable, self.ended), None) or self.eviction.victim(evictable)

    def check_needs(self, nodes: Iterable[N]) -> None:
        """Checks the counts and the order.

        Args:
            nodes: All nodes of the prefix tree.

        Raises:
            CacheCorruptionError: Something is wrong.
        """
        users = {node: int(node in self.states) for node in nodes}
        for node in sorted(users, key=lambda node: -node.depth_blocks):
            if self.users.get(node, 0) != users[node]:
                raise CacheCorruptionError(f"{node} counts {self.users.get(node, 0)} users, has {users[node]}")
            if users[node] and node.parent is not None:
                users[node.parent] += 1
            has_kv = self.has_kv(node)
            if (node in self.unneeded) != has_kv and not (has_kv and node in self.users):
                raise CacheCorruptionError(f"{node}: whether its KV is unneeded is wrong")
            if node in self.unneeded and node in self.users and not self.is_copy(node):
                raise CacheCorruptionError(f"{node}: a state needs its KV, but it goes next")
        if not self.users.keys() | self.unneeded.keys() <= users.keys():
            raise CacheCorruptionError("an entry is counted that is not there")
        if len(self.eviction) != len(self.states) or set(self.eviction) != self.states:
            raise CacheCorruptionError("the states and those of the eviction policy differ")

    # -- internal ------------------------------------------------------------------------------------------------------

    def _need(self, node: N) -> None:
        users, unneeded = self.users, self.unneeded
        above: N | None = node
        while above is not None:
            if above in users:
                users[above] += 1
                return
            users[above] = 1
            if above in unneeded and not self.is_copy(above):
                del unneeded[above]
            above = above.parent

    def _unneed(self, node: N) -> None:
        users, unneeded = self.users, self.unneeded
        above: N | None = node
        while above is not None:
            if users[above] > 1:
                users[above] -= 1
                return
            del users[above]
            if self.has_kv(above):  # as `note_kv`, but this loop may be long
                if above in unneeded:
                    del unneeded[above]
                unneeded[above] = None
            above = above.parent


class Place[T: KeptState]:
    """A node of the trie: a kept state, or a fork.

    Attributes:
        node: Its node in the prefix tree; None for the root, which is before the first token.
        depth_blocks: Blocks before it.
        kept: Whether a state is kept here. Always True for the root, whose state is zero.
        above: The next place above; for the root the root itself.
        via: First node on the path from the place above to here; None for the root.
        below: Places below, by the first node on the path to each. A fork has two or more.
    """

    __slots__ = ("above", "below", "depth_blocks", "kept", "node", "via")

    def __init__(self, node: T | None, *, kept: bool = True) -> None:
        self.node = node
        self.depth_blocks = 0 if node is None else node.depth_blocks
        self.kept = kept
        self.above: Place[T] = self
        self.via: T | None = None
        self.below: dict[T | None, Place[T]] = {}

    def hang(self, other: Place[T], via: T | None) -> None:
        """Puts ``other`` below this place, instead of the place that was there."""
        self.below[via] = other
        other.above, other.via = self, via


class Ancestry[T: KeptState]:
    """The trie of the kept states."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all states."""
        self._places: dict[T | None, Place[T]] = {}
        self._root: Place[T] = Place(None)

    def add(self, node: T) -> None:
        """Adds the state at ``node``, which had none."""
        place = self._places.get(node)
        if place is not None:  # a fork already
            place.kept = True
            return
        place = self._places[node] = Place(node)
        via, parent = node, node.parent
        while parent is not None and parent not in self._places:
            via, parent = parent, parent.parent
        above = self._root if parent is None else self._places[parent]
        other = above.below.get(via)
        if other is None:
            above.hang(place, via)
            return
        assert other.node is not None
        joint, (fork, mine_via, its_via) = place, _part(node, other.node)
        if fork is not node:
            joint = self._places[fork] = Place(fork, kept=False)
            joint.hang(place, mine_via)
        above.hang(joint, via)
        joint.hang(other, its_via)

    def remove(self, node: T) -> T | None:
        """Removes the state at ``node``.

        Returns:
            The kept state whose `exclusive_blocks` grew; None if there is none.
        """
        place = self._places[node]
        place.kept = False
        if len(place.below) > 1:
            return None  # a fork now
        left = self._take_out(place)
        if not left.kept and len(left.below) == 1:  # a fork that lost a branch
            left = self._take_out(left)
        return left.node if left.kept and not left.below else None

    def exclusive_blocks(self, node: T) -> int:
        """Blocks that only the state at ``node`` makes useful: down from the next place above, if no state is below."""
        place = self._places[node]
        return 0 if place.below else place.depth_blocks - place.above.depth_blocks

    def nearest_above(self, node: T) -> T | None:
        """The nearest kept state above ``node``, which must be a place. None: there is only the root."""
        place = self._places[node].above
        while not place.kept:
            place = place.above
        return place.node

    def next_below(self, node: T) -> Iterator[T]:
        """The kept states whose nearest state above is at ``node``, in an order that depends only on earlier calls."""
        waiting = list(self._places[node].below.values())
        while waiting:
            place = waiting.pop()
            if place.kept:
                assert place.node is not None
                yield place.node
            else:
                waiting.extend(place.below.values())

    def _take_out(self, place: Place[T]) -> Place[T]:
        """Removes a place with at most one below. Returns the one below, which takes its place; else the one above."""
        above = place.above
        del self._places[place.node]
        if not place.below:
            del above.below[place.via]
            return above
        (only,) = place.below.values()
        above.hang(only, place.via)
        return only


def _part[T: KeptState](mine: T, its: T) -> tuple[T, T, T]:
    """The fork of the paths to two nodes, and the next node on each path.

    ``its`` is neither ``mine`` nor above it. Both paths start with the same node.
    """
    mine_via, its_via = mine, its
    while mine is not its:
        # The deeper of the two moves up; at the same depth both do.
        mine_depth, its_depth = mine.depth_blocks, its.depth_blocks
        if mine_depth >= its_depth:
            assert mine.parent is not None
            mine_via, mine = mine, mine.parent
        if its_depth >= mine_depth:
            assert its.parent is not None
            its_via, its = its, its.parent
    return mine, mine_via, its_via
