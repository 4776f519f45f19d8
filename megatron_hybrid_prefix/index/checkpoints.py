"""`CheckpointTable`: which node's state is in which slot, and how a slot is had."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotPool


class CheckpointTable:
    """Tree, slots and eviction policy, told together: `bind` and `unbind` alone change where a state is.

    Args:
        tree: Its nodes say which slot their state is in.
        slots: Who owns which checkpoint slot.
        eviction: Ranks the states.
        host: Where states go when they are evicted; None: nowhere.
        stats: Where evictions and published states are counted.
    """

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

    def bind(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """The state in the reserved ``slot`` is that of the node, which must have none on the device."""
        self.slots.publish(slot)
        self._tree.set_state(node, slot, reason)
        self.eviction.added(node)

    def unbind(self, node: Node) -> None:
        """The node has no state on the device any more; its slot is free, or with the last unpin."""
        self.eviction.removed(node)
        self.slots.retire(self._tree.drop_state(node))

    def has(self, key: bytes) -> bool:
        """Whether the state at the end of the block with this key is on the device."""
        node = self._tree.get(key)
        return node is not None and node.slot != NO_SLOT

    def take_slot(self) -> int | None:
        """A reserved slot, evicting the state that the policy ranks last; None when every slot is pinned or reserved."""
        slot = self.slots.reserve()
        if slot is None:
            slot = self._slot_of(self.eviction.victim(self._is_evictable))
        return slot

    def take_probationary_slot(self, path: Sequence[Node]) -> int | None:
        """A reserved slot for a state that is kept on a guess: a free one, or that of a probationary state; else None.

        Args:
            path: Nodes of the request. Spare states on it stay, or a prompt computed in chunks would push out its own.
        """
        slot = self.slots.reserve()
        if slot is None:

            def is_elsewhere(node: Node) -> bool:
                return node.depth_blocks > len(path) or path[node.depth_blocks - 1] is not node

            slot = self._slot_of(self.eviction.victim(is_elsewhere, probationary_only=True))
        return slot

    def publish(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """The state in the reserved ``slot`` becomes matchable; the node must not have one."""
        self.bind(node, slot, reason)
        self._stats.checkpoints_published += 1
        self._stats.checkpoints_by_reason[reason.name.lower()] += 1
        # (The state that a decode reached is copied to its slot later, and soon replaced by the next one.)
        if self._host is not None and self._host.write_through and reason != CheckpointReason.DECODE:
            self._host.store_state(node)

    def restore(self, node: Node, slot: int) -> None:
        """The node's state, which a request resumed from, was loaded to the reserved ``slot``: it is back on the device."""
        assert node.reason is not None, node
        self.bind(node, slot, node.reason)
        self.use(node)

    def confirm(self, key: bytes, reason: CheckpointReason) -> None:
        """The state at the end of the block with this key, if it is kept for a while only, is wanted for ``reason`` now."""
        node = self._tree.get(key)
        if node is None or node.slot == NO_SLOT or node.used:
            return
        if node.reason in (CheckpointReason.INTERVAL, CheckpointReason.DECODE):
            node.reason = reason
            self.eviction.used(node)

    def use(self, node: Node) -> None:
        """A request resumes from the state of this node, which is on the device."""
        node.used = True
        self.eviction.used(node)
        if self._host is not None:
            self._host.use_state(node)

    def evict(self, node: Node) -> None:
        """The node's state leaves the device, for the host where there is one and it has room."""
        if self._host is not None:
            self._host.store_state(node)
        self.unbind(node)
        self._stats.evictions += 1

    def drop_decoded(self, node: Node, slot: int) -> None:
        """A newer state of the same answer takes the place of this one, unless it is gone already or somebody used it."""
        if node.slot == slot and node.reason == CheckpointReason.DECODE and not node.used:
            self.unbind(node)

    def unbind_all(self) -> None:
        """No node has a state on the device; pinned slots stay with who pinned them."""
        for node in self._tree:
            if node.slot != NO_SLOT:
                self.slots.retire(self._tree.drop_state(node))
        self.eviction.clear()

    def reset(self) -> None:
        """All slots are free, whoever uses them; the tree is emptied by its owner."""
        self.eviction.clear()
        self.slots.reset()

    def _slot_of(self, victim: Node | None) -> int | None:
        if victim is None:
            return None
        self.evict(victim)
        return self.slots.reserve()

    def _is_evictable(self, node: Node) -> bool:
        return self.slots.pins(node.slot) == 0
