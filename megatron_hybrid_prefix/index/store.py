"""`PrefixStore`: the cached blocks and states, and their eviction."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.checkpoints import CheckpointTable
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.requests import LiveRequest
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotPool
from megatron_hybrid_prefix.tiers.units import Copy


class PrefixStore:
    """Prefix tree, KV blocks, checkpoints and host tier, changed together.

    KV blocks and slots have separate memory here; in ``shared_store.py`` they share one.

    Args:
        tree: An empty tree.
        blocks: Reference counts of the KV blocks.
        slots: Owners of the checkpoint slots.
        eviction: Ranks the states.
        host: Host tier for evicted KV and states; None: evicted entries are lost.
        stats: Counts evictions and published states.

    Attributes:
        copies: Queued copies, to be carried out in this order.
        ghosts: Keys of evicted blocks that a prompt still recognises.
        on_move: Called at once when a cached block moves: (from block, to block).
    """

    ghosts: Container[bytes] = frozenset()

    def __init__(
        self,
        tree: PrefixTree,
        blocks: KVBlocks,
        slots: SlotPool,
        eviction: EvictionPolicy[Node],
        host: HostTier | None,
        stats: PrefixStats,
    ) -> None:
        self.tree, self.blocks, self.slots, self.host = tree, blocks, slots, host
        self.checkpoints = CheckpointTable(tree, slots, eviction, host, stats)
        self._stats = stats
        self.copies: list[Copy] = [] if host is None else host.transfers
        self.on_move: Callable[[int, int], None] = lambda source, target: None

    slots_per_request = 0
    """Slots that a running request takes: 0 if the engine has slots of its own for their states."""
    blocks_per_slot = 0
    """KV blocks whose memory a slot takes."""

    def has_room(
        self, blocks: int, path: Sequence[Node] = (), *, slots: int = 0, source_slot: int | None = None
    ) -> bool:
        """Whether blocks (and slots) can be taken, if need be by eviction, after a request has shared a path.

        Args:
            blocks: Number of new blocks.
            path: Nodes that the request shares.
            slots: Number of slots, 0 or 1. Only counts if slots share their memory with KV.
            source_slot: Slot that the request pins.
        """
        return blocks <= self.blocks.available_blocks - self.blocks.unreferenced_tail(path)

    def take_live_slot(self) -> int | None:
        """Takes a slot for a running request; None if the engine has slots of its own for them."""
        return None

    def take_copies(self) -> list[Copy]:
        """Takes the queued copies."""
        copies = list(self.copies)
        self.copies.clear()
        return copies

    def copies_taken(self) -> None:
        """The engine carries out all queued copies now."""
        self.checkpoints.end_protection()

    def take_blocks(self, count: int) -> list[int]:
        """Takes ``count`` of the available blocks. If too few are free, evicts the cached ones released longest ago."""
        blocks, host = self.blocks, self.host
        for _ in range(count - blocks.free_blocks):
            node = blocks.oldest()
            assert node is not None, "more blocks taken than available"
            if node.slot != NO_SLOT:
                self.checkpoints.evict(node)  # a state cannot be reached without its KV
            if host is not None:
                host.store_kv(node)
            blocks.unbind(node)
            self.tree.prune(node)
            self._stats.kv_evictions += 1
        return blocks.take(count)

    def register(self, live: LiveRequest, full_blocks: int) -> None:
        """Makes the request's first ``full_blocks`` blocks matchable. The forwards that compute them are launched."""
        path, keys = live.path, live.chain.keys
        first = len(path)
        for index in range(first, full_blocks):
            block_id = live.block_ids[index]
            node = self.tree.get(keys[index])
            if node is None:
                node = self.tree.insert(keys[index], path[-1] if path else None, block_id)
                node.private = live.chain.private
                self.blocks.bind(node)
            elif node.block_id == NO_BLOCK:
                node.block_id = block_id
                self.blocks.bind(node)
                self.tree.version += 1
            else:
                self.blocks.merge(node, block_id)
            path.append(node)
        if self.host is not None:
            self.host.also_on_device(path[first:])

    def let_go(self, live: LiveRequest) -> None:
        """Drops the request's references to its blocks, and its pin."""
        self.unpin_source(live)
        self.blocks.release(live.block_ids, live.path)

    def unpin_source(self, live: LiveRequest) -> None:
        """Unpins the checkpoint that the request starts from, if it has one."""
        if live.pinned_slot is not None:
            self.slots.unpin(live.pinned_slot)
            live.pinned_slot = None

    def forget(self, epoch: int) -> None:
        """Empties the tree after a change of weights.

        Held blocks stay with their requests, and pinned slots stay pinned. All others become free.

        Args:
            epoch: Epoch of what is published from now on.
        """
        self.tree.epoch = epoch
        self.checkpoints.unbind_all()
        for node in self.tree:
            if node.block_id != NO_BLOCK:
                self.blocks.unbind(node)
        self.tree.clear()
        if self.host is not None:
            self.host.reset()
            if self.host.behind is not None:
                self.host.behind.invalidate(epoch)

    def reset(self) -> None:
        """Frees all blocks, slots and host pages, even held ones."""
        if self.host is not None:
            self.host.reset()
            if self.host.behind is not None:
                self.host.behind.clear()
        self.tree.clear()
        self.blocks.reset()
        self.checkpoints.reset()
        self.copies.clear()

    def check(self) -> None:
        """Checks what only this store counts. For ``check_integrity``."""
