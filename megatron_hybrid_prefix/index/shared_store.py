"""`SharedStore`: KV and states in one memory. Who gets the next bytes is decided across both.

What goes first, when bytes are needed:

1. Worthless KV, behind which no request can resume: released or worthless longest ago first, the deepest block first.
   Its keys are remembered (``ghosts.py``).
2. The state that the eviction policy names. Evicting it makes the KV worthless that only it made useful. So policies rank
   by value per byte *freed*, if they can (`SharesMemory`).

An interval state that nobody used is a guess. It only gets free bytes, or those of another guess, and makes no KV useful.

KV is valued like states: a block is worth what the states at and below it are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.checkpoints import CheckpointTable
from megatron_hybrid_prefix.index.ghosts import Ghosts
from megatron_hybrid_prefix.index.host_tier import HostTier, is_probationary
from megatron_hybrid_prefix.index.requests import LiveRequest
from megatron_hybrid_prefix.index.shared_blocks import SharedBlocks
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy, SharesMemory
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import NO_SLOT, PageSlots, SlotState
from megatron_hybrid_prefix.tiers.units import BlockMove, PageClear


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Who uses the shared memory now.

    Attributes:
        total_blocks: KV blocks that fit.
        free_blocks: Free blocks.
        held_blocks: Blocks that requests hold.
        cached_blocks: Blocks with a key that no request holds.
        worthless_blocks: Those of them behind which no request can resume; O(blocks) to count.
        state_pages: Pages that hold a state.
        live_slots: Those of them that hold the state of a running request.
        padding_bytes: Bytes lost because a state is no whole number of blocks.
        moved_blocks: Blocks moved so far, to empty pages.
        pages_to_states: Pages that changed so far from KV to states.
        pages_to_kv: Pages that changed so far from states to KV.
        blocked_slots: Times a state got no page, or evicted another state for it, while there were enough free blocks: each
            page without a state had a block that a request held.
    """

    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    worthless_blocks: int
    state_pages: int
    live_slots: int
    padding_bytes: int
    moved_blocks: int
    pages_to_states: int
    pages_to_kv: int
    blocked_slots: int


class SharedStore(PrefixStore):
    """Prefix tree, KV blocks and states in one memory.

    Args:
        tree: An empty tree.
        pages: The memory.
        eviction: Ranks the states.
        host: Host tier for evicted KV and states; None: evicted entries are lost.
        stats: Counts evictions and published states.
        share_live_states: Whether running requests get slots from it.
        first_slot: Id of the first page's slot.

    Attributes:
        pages: The memory.
    """

    blocks: SharedBlocks
    slots: PageSlots
    checkpoints: SharedCheckpoints
    ghosts: Ghosts

    def __init__(
        self,
        tree: PrefixTree,
        pages: Pages,
        eviction: EvictionPolicy[Node],
        host: HostTier | None,
        stats: PrefixStats,
        *,
        share_live_states: bool = True,
        first_slot: int = 0,
    ) -> None:
        self.pages = pages
        self.slots_per_request, self.blocks_per_slot = int(share_live_states), pages.layout.page_blocks
        slots = PageSlots(pages, first_slot)
        super().__init__(tree, SharedBlocks(pages, slots), slots, eviction, host, stats)
        self.ghosts = Ghosts(pages.layout.total_blocks)
        if isinstance(eviction, SharesMemory):
            eviction.share_memory(state_blocks=pages.layout.page_blocks)
        self.checkpoints = SharedCheckpoints(self, eviction, host, stats)
        self._moved_blocks = self._blocked_slots = 0

    def has_room(
        self, blocks: int, path: Sequence[Node] = (), *, slots: int = 0, source_slot: int | None = None
    ) -> bool:
        """See PrefixStore."""
        pages, page_blocks = self.pages, self.pages.layout.page_blocks
        tail = path[len(path) - self.blocks.unreferenced_tail(path) :]
        pinned = (
            source_slot is not None
            and self.slots.state(source_slot) == SlotState.PUBLISHED
            and not self.slots.pins(source_slot)
        )
        if blocks > self.blocks.available_blocks - len(tail) - page_blocks * (slots + pinned):
            return False
        if not slots:
            return True
        touched = {pages.page_of(node.block_id) for node in tail}
        unheld = pages.unheld_pages - sum(pages.is_whole(page) and not pages.held_in(page) for page in touched)
        return unheld + self.slots.used_slots - self.slots.stuck_slots - pinned >= slots

    def take_blocks(self, count: int) -> list[int]:
        """See PrefixStore; evicts what is worth least per byte, KV or states."""
        while self.pages.free_blocks < count:
            if not self._evict_next():
                raise CacheCorruptionError("more blocks taken than available")
        block_ids = self.blocks.take(count)
        self._clear_pages()
        return block_ids

    def take_live_slot(self) -> int | None:
        """See PrefixStore."""
        if not self.slots_per_request:
            return None
        slot = self.checkpoints.take_slot()
        if slot is None:
            raise CacheCorruptionError("no slot for a request that was promised one")
        self.slots.make_live(slot)
        return slot

    def let_go(self, live: LiveRequest) -> None:
        """See PrefixStore."""
        super().let_go(live)
        if live.live_slot is not None:
            self.slots.end_live(live.live_slot)
            live.live_slot = None

    def register(self, live: LiveRequest, full_blocks: int) -> None:
        """See PrefixStore."""
        for key in live.chain.keys[len(live.path) : full_blocks]:
            self.ghosts.discard(key)
        super().register(live, full_blocks)

    def forget(self, epoch: int) -> None:
        """See PrefixStore."""
        super().forget(epoch)
        self.ghosts.clear()

    def reset(self) -> None:
        """See PrefixStore."""
        clears = [copy for copy in self.copies if isinstance(copy, PageClear)]
        super().reset()
        self.copies += clears
        self.ghosts.clear()

    # -- who gets the next bytes ---------------------------------------------------------------------------------------

    def make_page(self) -> bool:
        """Empties a page for a state, by moves or by eviction. False: there is none that can be emptied."""
        pages = self.pages
        while pages.empty_page is None:
            if pages.can_be_emptied():
                self._compact()
                return True
            # No KV page can be emptied: only a state's own page helps.
            blocked = pages.unheld_pages == 0
            self._blocked_slots += blocked and pages.free_blocks >= pages.layout.page_blocks
            if not self._evict_next(states_only=blocked):
                return False
        return True

    def make_free_page(self) -> bool:
        """Empties a page for a guess: by moves only, without eviction."""
        if self.pages.empty_page is not None:
            return True
        if not self.pages.can_be_emptied():
            return False
        self._compact()
        return True

    def _compact(self) -> None:
        _, moves = self.pages.empty()
        self.blocks.move(moves)
        for source, target in moves:
            self.copies.append(BlockMove(source_block=source, target_block=target))
            self.on_move(source, target)
        self._moved_blocks += len(moves)
        self.tree.version += 1

    def _clear_pages(self) -> None:
        """What states left in pages is cleared before KV is written there."""
        self.copies.extend(map(PageClear, self.pages.with_old_state))
        self.pages.with_old_state.clear()

    def _evict_next(self, *, states_only: bool = False) -> bool:
        """Evicts one entry: see the top of this file. False: nothing can be evicted."""
        checkpoints = self.checkpoints
        node = None if states_only else self.blocks.oldest()
        if node is not None:
            self._drop_kv(node)
            return True
        state = checkpoints.victim()
        if state is not None:
            checkpoints.evict(state)
            return True
        # All that is left is KV below states that wait for their copy. Without those states it is worthless.
        return not states_only and checkpoints.drop_protected()

    def _drop_kv(self, node: Node) -> None:
        if node.slot != NO_SLOT:
            self.checkpoints.evict(node)  # a guess: it cannot be reached without its KV
        if self.host is not None:
            self.host.store_kv(node)
        self.ghosts.add(node.key)
        self.blocks.unbind(node)
        self.tree.prune(node)
        self._stats.kv_evictions += 1

    # -- which KV is worthless -----------------------------------------------------------------------------------------

    def gain_state(self, node: Node) -> None:
        """A state is kept at the node that is no guess. O(blocks that become useful)."""
        above: Node | None = node
        while above is not None:
            above.users += 1
            if above.users > 1:
                return
            self.blocks.now_useful(above)
            above = above.parent

    def lose_state(self, node: Node) -> None:
        """That state is gone. O(blocks that become worthless)."""
        above: Node | None = node
        while above is not None:
            above.users -= 1
            if above.users:
                return
            self.blocks.now_worthless(above)
            above = above.parent

    def memory_use(self) -> MemoryUse:
        """Who uses the memory now. O(blocks)."""
        layout = self.pages.layout
        return MemoryUse(
            total_blocks=layout.total_blocks,
            free_blocks=self.pages.free_blocks,
            held_blocks=self.pages.held_blocks,
            cached_blocks=self.blocks.cached_blocks,
            worthless_blocks=sum(1 for _ in self.blocks.queue()),
            state_pages=self.pages.state_pages,
            live_slots=self.slots.live_slots,
            padding_bytes=self.pages.state_pages * layout.padding_bytes,
            moved_blocks=self._moved_blocks,
            pages_to_states=self.pages.pages_to_states,
            pages_to_kv=self.pages.pages_to_kv,
            blocked_slots=self._blocked_slots,
        )

    def check(self) -> None:
        """Checks the counts of useful KV.

        Raises:
            CacheCorruptionError: A count is wrong.
        """
        users = {node: int(node.slot != NO_SLOT and not is_probationary(node)) for node in self.tree}
        for node in sorted(self.tree, key=lambda node: -node.depth_blocks):
            if node.users != users[node]:
                raise CacheCorruptionError(f"{node} counts {node.users} users, has {users[node]}")
            if node.users and node.block_id == NO_BLOCK:
                raise CacheCorruptionError(f"{node} has a state at or below it, but no KV")
            if node.users and node.parent is not None:
                users[node.parent] += 1


class SharedCheckpoints(CheckpointTable):
    """`CheckpointTable` whose slots are pages of a `SharedStore`.

    Args:
        store: The store.
        eviction: Ranks the states.
        host: Host tier for evicted states.
        stats: Counts evictions and published states.
    """

    slots: PageSlots

    def __init__(
        self, store: SharedStore, eviction: EvictionPolicy[Node], host: HostTier | None, stats: PrefixStats
    ) -> None:
        super().__init__(store.tree, store.slots, eviction, host, stats)
        self._store = store
        self.protected: list[int] = []

    def bind(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """See CheckpointTable."""
        super().bind(node, slot, reason)
        if not is_probationary(node):
            self._store.gain_state(node)

    def _take_off(self, node: Node) -> int:
        counted = not is_probationary(node)
        slot = super()._take_off(node)
        if counted:
            self._store.lose_state(node)
        return slot

    def take_slot(self) -> int | None:
        """See CheckpointTable; evicts what is worth least per byte, KV or states."""
        return self.slots.reserve() if self._store.make_page() else None

    def take_probationary_slot(self, path: Sequence[Node]) -> int | None:
        """See CheckpointTable: takes free bytes, or the page of another probationary state."""
        if not self._store.make_free_page():
            return self._slot_of(self._guess_elsewhere(path))
        return self.slots.reserve()

    def confirm(self, key: bytes, reason: CheckpointReason) -> None:
        """See CheckpointTable."""
        node = self._tree.get(key)
        was_guess = node is not None and node.slot != NO_SLOT and is_probationary(node)
        super().confirm(key, reason)
        if node is not None and was_guess and not is_probationary(node):
            self._store.gain_state(node)

    def use(self, node: Node) -> None:
        """See CheckpointTable."""
        was_guess = is_probationary(node)
        super().use(node)
        if was_guess:
            self._store.gain_state(node)

    def victim(self) -> Node | None:
        """The state to evict next; None if there is none."""
        return self.eviction.victim(self._is_evictable)

    # -- states that wait for their copy -------------------------------------------------------------------------------

    def protect(self, slot: int) -> None:
        """See CheckpointTable: the slot's page must not be given away before the state is copied to it."""
        self.slots.pin(slot)
        self.protected.append(slot)

    def end_protection(self) -> None:
        """The engine makes all copies now."""
        for slot in self.protected:
            self.slots.unpin(slot)
        self.protected.clear()

    def drop_protected(self) -> bool:
        """Drops one of these states. Its page stays in use until `end_protection`. False: there is none."""
        waiting = set(self.protected)
        node = self.eviction.victim(lambda node: node.slot in waiting and self.slots.pins(node.slot) == 1)
        if node is not None:
            self.unbind(node)
        return node is not None

    def reset(self) -> None:
        """See CheckpointTable."""
        super().reset()
        self.protected.clear()
