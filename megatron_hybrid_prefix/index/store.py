"""What is cached: the prefix tree with the blocks and slots that its nodes are in, and how room is made in them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.requests import LiveRequest
from megatron_hybrid_prefix.index.tree import NO_BLOCK, NO_SLOT, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import Reason
from megatron_hybrid_prefix.pool.slots import SlotPool


class PrefixStore:
    """Tree, blocks, slots and host tier, changed together.

    Args:
        blocks: Who holds which KV block.
        slots: Who owns which checkpoint slot.
        eviction: Ranks the states.
        stats: Where evictions and published states are counted.

    Attributes:
        host: Where KV and states go when the device has no room for them; None: nowhere.
        write_through: Whether they go there as soon as they are published.
        epoch: Weights epoch of what is published.
    """

    def __init__(self, blocks: KVBlocks, slots: SlotPool, eviction: EvictionPolicy[Node], stats: PrefixStats) -> None:
        self.tree = PrefixTree()
        self.host: HostTier | None = None
        self.write_through = False
        self.epoch = 0
        self.blocks = blocks
        self.slots = slots
        self.eviction = eviction
        self._stats = stats

    def has_state(self, key: bytes) -> bool:
        """Whether the state at the end of the block with this key is kept."""
        node = self.tree.get(key)
        return node is not None and node.slot != NO_SLOT

    def take_blocks(self, count: int) -> list[int]:
        """``count`` of the available blocks, evicting cached ones, let go longest ago first, where too few are free."""
        while self.blocks.free_blocks < count:
            node = self.blocks.oldest()
            assert node is not None, "more blocks taken than available"
            if node.slot != NO_SLOT:
                self._evict_state(node)  # without its KV it could not be reached
            if self.host is not None:
                self.host.store_kv(node, self.epoch)
            self.blocks.unbind(node)
            self.tree.prune(node)
            self._stats.kv_evictions += 1
        return self.blocks.take(count)

    def take_slot(self) -> int | None:
        """A reserved slot, evicting the state that the policy ranks last; None when every slot is pinned or reserved."""
        slot = self.slots.reserve()
        if slot is None:
            slot = self._slot_of(self.eviction.victim(self._is_evictable))
        return slot

    def take_spare_slot(self, path: Sequence[Node]) -> int | None:
        """A reserved slot for a state that is kept on a guess: a free one, or that of a spare state; else None.

        Args:
            path: Nodes of the request. Spare states on it stay, or a prompt computed in chunks would push out its own.
        """
        slot = self.slots.reserve()
        if slot is None:

            def is_elsewhere(node: Node) -> bool:
                return node.depth_blocks > len(path) or path[node.depth_blocks - 1] is not node

            slot = self._slot_of(self.eviction.victim(is_elsewhere, spare_only=True))
        return slot

    def register(self, live: LiveRequest, full_blocks: int) -> None:
        """The request's first ``full_blocks`` blocks, computed by finished forwards, become matchable."""
        path, keys = live.path, live.chain.keys
        first = len(path)
        for index in range(first, full_blocks):
            block_id = live.block_ids[index]
            node = self.tree.get(keys[index])
            if node is None:
                node = self.tree.insert(keys[index], path[-1] if path else None, block_id)
                self.blocks.bind(node)
            elif node.block_id == NO_BLOCK:
                node.block_id = block_id
                self.blocks.bind(node)
                self.tree.version += 1
            else:
                self.blocks.merge(node, block_id)
            path.append(node)
        if self.host is not None and self.write_through:
            for node in reversed(path[first:]):
                self.host.store_kv(node, self.epoch)

    def publish_state(self, node: Node, slot: int, reason: Reason) -> None:
        """The state in the reserved ``slot`` becomes matchable; the node must not have one."""
        self.slots.publish(slot)
        self.tree.set_state(node, slot, reason)
        self.eviction.added(node)
        self._stats.checkpoints_published += 1
        self._stats.checkpoints_by_reason[reason.name.lower()] += 1
        # (The state that a decode reached is copied to its slot later, and soon replaced by the next one.)
        if self.host is not None and self.write_through and reason != Reason.DECODE:
            self.host.store_state(node, self.epoch)

    def restore_state(self, node: Node, slot: int) -> None:
        """The node's state, which a request resumed from, was loaded to the reserved ``slot``: it is back on the device."""
        reason = node.reason
        assert reason is not None, node
        self.slots.publish(slot)
        self.tree.set_state(node, slot, reason)
        self.eviction.added(node)
        self.use_state(node)

    def confirm_state(self, key: bytes, reason: Reason) -> None:
        """The state at the end of the block with this key, if it is kept for a while only, is wanted for ``reason`` now."""
        node = self.tree.get(key)
        if node is None or node.slot == NO_SLOT or node.used:
            return
        if node.reason in (Reason.INTERVAL, Reason.DECODE):
            node.reason = reason
            self.eviction.used(node)

    def use_state(self, node: Node) -> None:
        """A request resumes from the state of this node, which is on the device."""
        node.used = True
        self.eviction.used(node)
        if self.host is not None:
            self.host.use_state(node)

    def drop_decoded(self, node: Node, slot: int) -> None:
        """A newer state of the same answer takes the place of this one, unless it is gone already or somebody used it."""
        if node.slot == slot and node.reason == Reason.DECODE and not node.used:
            self.eviction.removed(node)
            self.slots.retire(self.tree.drop_state(node))

    def forget(self) -> None:
        """Empties the tree. Blocks stay with their holders, pinned slots with who pinned them; the others are free."""
        for node in self.tree:
            if node.slot != NO_SLOT:
                self.slots.retire(node.slot)
            if node.block_id != NO_BLOCK:
                self.blocks.unbind(node)
        self.eviction.clear()
        self.tree.clear()
        if self.host is not None:
            self.host.reset()

    def reset(self) -> None:
        """Empties everything, whoever holds it."""
        if self.host is not None:
            self.host.reset()
        self.eviction.clear()
        self.tree.clear()
        self.blocks.reset()
        self.slots.reset()

    def _slot_of(self, victim: Node | None) -> int | None:
        if victim is None:
            return None
        self._evict_state(victim)
        return self.slots.reserve()

    def _is_evictable(self, node: Node) -> bool:
        return self.slots.pins(node.slot) == 0

    def _evict_state(self, node: Node) -> None:
        if self.host is not None:
            self.host.store_state(node, self.epoch)
        self.eviction.removed(node)
        self.slots.retire(self.tree.drop_state(node))
        self._stats.evictions += 1
