"""`CheckpointTable`: which node's state is in which slot, and how a slot is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_hybrid_prefix.index.host_tier import HostTier, is_probationary
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotPool


class _Store(Protocol):
    """What the table needs of a `PrefixStore`."""

    tree: PrefixTree
    slots: SlotPool
    host: HostTier | None

    def make_place(self) -> bool:
        """Makes a slot free, by moves or by eviction."""

    def make_free_place(self) -> bool:
        """Makes a slot free by moves only."""

    def gain_state(self, node: Node) -> None:
        """A state is kept at the node that is no guess."""

    def lose_state(self, node: Node) -> None:
        """That state is gone."""


class CheckpointTable:
    """Keeps tree, slots and eviction policy consistent: only `bind` and `unbind` move a state in or out of a slot.

    Args:
        store: The store that it is part of.
        eviction: Ranks the states.
        stats: Counts evictions and published states.

    Attributes:
        slots: The slots.
        eviction: See Args.
        protected: Slots that `protect` pinned.
    """

    def __init__(self, store: _Store, eviction: EvictionPolicy[Node], stats: PrefixStats) -> None:
        self._store, self.slots, self.eviction = store, store.slots, eviction
        self._tree, self._host, self._stats = store.tree, store.host, stats
        self._node_of: dict[int, Node] = {}  # by slot
        self.protected: list[int] = []

    def bind(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """Gives the node the state in the reserved ``slot``. The node must have no state on the device."""
        self.slots.publish(slot)
        self._tree.set_state(node, slot, reason)
        self._node_of[slot] = node
        self.eviction.added(node)
        if self._host is not None:
            self._host.state_also_on_device(node)
        if not is_probationary(node):
            self._store.gain_state(node)

    def unbind(self, node: Node) -> None:
        """Takes the node's state off the device. The slot becomes free, at once or with its last unpin."""
        self.slots.retire(self._take_off(node))

    def has(self, key: bytes) -> bool:
        """Whether the device has the state at the end of the block with this key."""
        node = self._tree.get(key)
        return node is not None and node.slot != NO_SLOT

    def take_slot(self) -> int | None:
        """Reserves a slot, if need be by eviction of what is worth least. None: there is none."""
        if self.slots.is_full:
            return self._slot_of(self.victim())
        return self.slots.reserve() if self._store.make_place() else None

    def take_probationary_slot(self, path: Sequence[Node]) -> int | None:
        """Reserves a slot for a probationary state: a free slot, or the slot of another probationary state.

        Args:
            path: Nodes of the request. Probationary states on this path are not evicted; otherwise a prompt computed in
                chunks would evict its own.

        Returns:
            The slot; None if there is none.
        """
        if not self.slots.is_full and self._store.make_free_place():
            return self.slots.reserve()
        return self._slot_of(self._guess_elsewhere(path))

    def protect(self, slot: int) -> None:
        """The state in the published ``slot`` is copied there later, after the queued copies. Until then it stays there."""
        self.slots.pin(slot)
        self.protected.append(slot)

    def end_protection(self) -> None:
        """The engine makes all copies now."""
        for slot in self.protected:
            self.slots.unpin(slot)
        self.protected.clear()

    def drop_protected(self) -> bool:
        """Drops one of these states. Its slot stays in use until `end_protection`. False: there is none."""
        waiting = set(self.protected)
        node = self.eviction.victim(lambda node: node.slot in waiting and self.slots.pins(node.slot) == 1)
        if node is not None:
            self.unbind(node)
        return node is not None

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
            was_guess = is_probationary(node)
            node.reason = reason
            self.eviction.used(node)
            if was_guess and not is_probationary(node):
                self._store.gain_state(node)

    def use(self, node: Node) -> None:
        """A request resumes from this node's state on the device."""
        was_guess = is_probationary(node)
        node.used = True
        self.eviction.used(node)
        if self._host is not None:
            self._host.use_state(node)
        if was_guess:
            self._store.gain_state(node)

    def victim(self, *, loose: bool = False) -> Node | None:
        """The state to evict next; None if there is none. ``loose``: of those in pages that eviction can free."""
        return self.eviction.victim(
            lambda node: self.slots.is_loose(node.slot) if loose else not self.slots.pins(node.slot)
        )

    def evict(self, node: Node) -> None:
        """Evicts the node's state, to the host tier if it has room."""
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
        for node in list(self._node_of.values()):
            self.slots.retire(self._tree.drop_state(node))
        self._node_of.clear()
        self.eviction.clear()

    def reset(self) -> None:
        """Frees all slots, even pinned ones. The caller empties the tree."""
        self._node_of.clear()
        self.protected.clear()
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
        if self._host is not None and node.slot not in self.protected:
            self._host.store_state(node)
        self._stats.evictions += 1
        return self._take_off(node)

    def _take_off(self, node: Node) -> int:
        """Takes the node's state off the device. Returns its slot, which no node has now."""
        counted = not is_probationary(node)
        self.eviction.removed(node)
        slot = self._tree.drop_state(node)
        del self._node_of[slot]
        if counted:
            self._store.lose_state(node)
        return slot
