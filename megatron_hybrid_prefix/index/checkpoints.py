"""`CheckpointTable`: which node's state is in which slot, and how a slot is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotPool


class CheckpointTable:
    """Keeps tree, slots and eviction policy consistent: only `bind` and `unbind` move a state in or out of a slot.

    Args:
        tree: The prefix tree. Its nodes say which slot holds their state.
        slots: Owners of the checkpoint slots.
        eviction: Ranks the states.
        host: Host tier for evicted states; None: evicted states are lost.
        stats: Counts evictions and published states.

    Attributes:
        protected: Slots that `protect` pinned.
    """

    protected: Sequence[int] = ()

    def __init__(
        self,
        tree: PrefixTree,
        slots: SlotPool,
        eviction: EvictionPolicy[Node],
        host: HostTier | None,
        stats: PrefixStats,
    ) -> None:
        self.slots = slots
        self.eviction = eviction
        self._tree, self._host, self._stats = tree, host, stats
        self._unwritten: set[int] = set()  # published slots whose states are copied there later

    def bind(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """Gives the node the state in the reserved ``slot``. The node must have no state on the device."""
        self.slots.publish(slot)
        self._tree.set_state(node, slot, reason)
        self.eviction.added(node)
        if self._host is not None:
            self._host.state_also_on_device(node)

    def unbind(self, node: Node) -> None:
        """Takes the node's state off the device. The slot becomes free, at once or with its last unpin."""
        self.slots.retire(self._take_off(node))

    def has(self, key: bytes) -> bool:
        """Whether the device has the state at the end of the block with this key."""
        node = self._tree.get(key)
        return node is not None and node.slot != NO_SLOT

    def take_slot(self) -> int | None:
        """Reserves a slot, if need be by eviction. None: every slot is pinned or reserved."""
        slot = self.slots.reserve()
        if slot is None:
            slot = self._slot_of(self.eviction.victim(self._is_evictable))
        return slot

    def take_probationary_slot(self, path: Sequence[Node]) -> int | None:
        """Reserves a slot for a probationary state: a free slot, or the slot of another probationary state.

        Args:
            path: Nodes of the request. Probationary states on this path are not evicted; otherwise a prompt computed in
                chunks would evict its own.

        Returns:
            The slot; None if there is none.
        """
        slot = self.slots.reserve()
        return self._slot_of(self._guess_elsewhere(path)) if slot is None else slot

    def protect(self, slot: int) -> None:
        """The state in the published ``slot`` is copied there later, after the queued copies. Until then it must not be stored."""
        self._unwritten.add(slot)

    def end_protection(self) -> None:
        """The engine makes all copies now."""
        self._unwritten.clear()

    def publish(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """Makes the state in the reserved ``slot`` matchable. The node must have no state on the device."""
        self.bind(node, slot, reason)
        self._stats.checkpoints_published += 1
        self._stats.checkpoints_by_reason[reason.name.lower()] += 1
        if self._host is not None and self._host.stores_published(reason):
            self._host.store_state(node)
            self._host.state_also_on_device(node)

    def abandon(self, slot: int) -> None:
        """Frees the reserved ``slot``: it was not written, or is no longer needed."""
        self.slots.abandon(slot)

    def restore(self, node: Node, slot: int) -> None:
        """The node's state was loaded into the reserved ``slot``, and a request resumed from it."""
        assert node.reason is not None, node
        self.bind(node, slot, node.reason)
        self.use(node)

    def confirm(self, key: bytes, reason: CheckpointReason) -> None:
        """Changes the reason of an unused interval or decode state to ``reason``. Does nothing if there is no such
        state.

        Args:
            key: Key of the block whose end the state is at.
            reason: The new reason.
        """
        node = self._tree.get(key)
        if node is None or node.slot == NO_SLOT or node.used:
            return
        if node.reason in (CheckpointReason.INTERVAL, CheckpointReason.DECODE):
            node.reason = reason
            self.eviction.used(node)

    def use(self, node: Node) -> None:
        """A request resumes from this node's state on the device."""
        node.used = True
        self.eviction.used(node)
        if self._host is not None:
            self._host.use_state(node)

    def evict(self, node: Node) -> None:
        """Evicts the node's state, to the host tier if it has room and the state is in its slot already."""
        self.slots.retire(self._evicted(node))

    def drop_decoded(self, node: Node, slot: int) -> None:
        """Drops an older decode state of a request, unless it is gone already or another request used it."""
        if node.slot == slot and node.reason == CheckpointReason.DECODE and not node.used:
            self.unbind(node)

    def end_decoded(self, node: Node, slot: int) -> None:
        """A request ended, and this is its latest decode state, unless it is gone already."""
        if self._host is not None and node.slot == slot:
            self._host.store_answer(node)

    def unbind_all(self) -> None:
        """Takes all states off the device. Pinned slots stay in use until they are unpinned."""
        for node in self._tree:
            if node.slot != NO_SLOT:
                self.slots.retire(self._tree.drop_state(node))
        self.eviction.clear()

    def reset(self) -> None:
        """Frees all slots, even pinned ones. The caller empties the tree."""
        self._unwritten.clear()
        self.eviction.clear()
        self.slots.reset()

    def _guess_elsewhere(self, path: Sequence[Node]) -> Node | None:
        """The probationary state to evict next that is not on the path."""

        def is_elsewhere(node: Node) -> bool:
            return node.depth_blocks > len(path) or path[node.depth_blocks - 1] is not node

        return self.eviction.victim(is_elsewhere, probationary_only=True)

    def _slot_of(self, victim: Node | None) -> int | None:
        return None if victim is None else self.slots.reserve_again(self._evicted(victim))

    def _evicted(self, node: Node) -> int:
        """Evicts the node's state. Returns its slot, which no node has now."""
        if self._host is not None and node.slot not in self._unwritten:
            self._host.store_state(node)
        self._stats.evictions += 1
        return self._take_off(node)

    def _take_off(self, node: Node) -> int:
        """Takes the node's state off the device. Returns its slot, which no node has now."""
        self.eviction.removed(node)
        return self._tree.drop_state(node)

    def _is_evictable(self, node: Node) -> bool:
        return self.slots.pins(node.slot) == 0
