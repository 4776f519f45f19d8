"""`DeviceTier`: cached KV and states in one memory. Who gets the next bytes is decided across both.

What goes first is in ``policy/needs.py``: unneeded KV, then the state that the eviction policy names. Policies rank by
value per byte *freed*, if they can (`SharesMemory`). A page of several states is free when the last of them has gone. The keys of
evicted KV are remembered if the policy ranks by value (`Ghosts`). What is evicted is offered to the host, the next tier.

This file is longer than 400 lines because tree, KV blocks, slots and the tier below change together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.hints import Pins
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Ghosts, Node, PrefixTree, Session, Starts
from megatron_hybrid_prefix.metrics import PrefixStats, TierStats
from megatron_hybrid_prefix.policy.base import SharesMemory
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import is_guess
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import LIVE_SIZE, NO_SLOT, SlotPool, SlotState
from megatron_hybrid_prefix.tiers.base import DepthTier
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.host import HostTier, host_pages_of
from megatron_hybrid_prefix.tiers.units import HOST, SHARED, BlockMove, Copy, EntryKind, LoadOver, PageClear, StateMove

_depth = attrgetter("depth_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Who uses the memory now.

    Attributes:
        total_blocks: KV blocks that fit.
        free_blocks: Free blocks.
        held_blocks: Blocks that requests hold.
        keyed_blocks: Blocks that a prompt can match, held or not.
        cached_blocks: Those of them that no request holds.
        unneeded_blocks: Those of them that no state needs.
        state_pages: Pages that hold states.
        live_slots: Slots of running requests.
        moved_blocks: Blocks moved so far, to empty pages.
        pages_to_states: Pages that changed so far from KV to states.
        pages_to_kv: Pages that changed so far from states to KV.
        blocked_slots: Times a state got no page, or evicted another state for it, while there were enough free blocks: each
            page without a state had a block that a request held.
    """

    total_blocks: int
    free_blocks: int
    held_blocks: int
    keyed_blocks: int
    cached_blocks: int
    unneeded_blocks: int
    state_pages: int
    live_slots: int
    moved_blocks: int
    pages_to_states: int
    pages_to_kv: int
    blocked_slots: int


class DeviceTier:
    """Prefix tree, KV blocks, states and the tiers below, changed together. Only `bind` and `unbind` move a state in or out of a slot.

    Args:
        settings: Sizes and rules.
        stats: Counts what happens here.

    Attributes:
        settings, stats: See Args.
        tree: The prefix tree.
        copies: Queued copies of all tiers, to be carried out in this order.
        host: The tier below.
        below: All tiers below that have room, by name, nearest first.
        pages: The memory.
        blocks: Its KV blocks, and what goes first.
        slots: The slots of states, in those pages.
        protected: Slots that `protect` pinned.
        bound: Of each state here its number: no other state has had it.
        slots_per_request: Slots that a running request takes: 0 if the engine has slots of its own for their states.
        ghosts: Keys of evicted blocks that a prompt still recognises.
        starts: How the latest prompts began.
        pins: What callers want kept.
    """

    def __init__(self, settings: CacheSettings, stats: PrefixStats) -> None:
        self.settings, self.stats = settings, stats
        self.tree = PrefixTree(settings.epoch, settings.beside)
        self.copies: list[Copy] = []
        self.pages = pages = Pages(settings.kv_blocks, settings.page_blocks, settings.page_states)
        make_policy = partial(make_eviction_policy, settings.eviction_policy)
        eviction = make_policy(state_blocks=pages.page_blocks / pages.page_sizes[-1])
        below = make_policy(
            state_blocks=host_pages_of(settings)[EntryKind.STATE] / settings.host_kv_pages,
            above=eviction if settings.host_pages else None,
        )
        self.host = HostTier(self.tree, settings, below, stats, self.copies)
        self.below: dict[str, DepthTier] = {HOST: self.host} if settings.host_pages else {}
        if settings.behind is not None:
            self.below[SHARED] = settings.behind
            stats.tiers[SHARED] = TierStats()
        self.slots = slots = SlotPool(pages, settings.first_state_slot, settings.state_slots)
        self.slots_per_request = int(settings.live_states)
        self.ghosts = Ghosts(pages.total_blocks if isinstance(eviction, SharesMemory) else 0)
        self.starts = Starts()
        self.pins = Pins(pages.total_blocks, pages.page_blocks / pages.page_sizes[-1])
        self.blocks = KVBlocks(pages, slots, eviction)
        self.protected: list[int] = []
        self.bound: dict[Node, int] = {}
        self._moved_blocks = self._blocked_slots = self._bound = 0

    def has_room(
        self, blocks: int, path: Sequence[Node] = (), *, slots: int = 0, source_slot: int | None = None
    ) -> bool:
        """Whether blocks and slots can be taken, if need be by eviction, after a request has shared a path.

        Args:
            blocks: Number of new blocks.
            path: Nodes that the request shares.
            slots: Number of slots, 0 or 1.
            source_slot: Slot that the request pins.
        """
        pages, needed = self.pages, slots  # pages that are needed
        tail = self.blocks.unreferenced_tail(path)
        if source_slot is not None:
            needed += self.slots.state(source_slot) == SlotState.PUBLISHED and self.slots.is_loose(source_slot)
        if blocks > self.blocks.available_blocks - len(tail) - pages.page_blocks * needed:
            return False
        if not needed:
            return True
        unheld = pages.unheld_without([node.block_id for node in tail])
        return unheld + pages.state_pages - self.slots.stuck_pages >= needed

    def take_copies(self) -> list[Copy]:
        """Takes the queued copies."""
        copies = list(self.copies)
        self.copies.clear()
        return copies

    def take_blocks(self, count: int) -> list[int]:
        """Takes ``count`` of the available blocks. Evicts what is worth least per byte, KV or states."""
        while self.pages.free_blocks < count:
            if not (self.slots.holes and self._gather_states()) and not self.evict_next():
                raise CacheCorruptionError("more blocks taken than available")
        block_ids = self.blocks.take(count)
        # Bytes of states are cleared before KV is written to their pages.
        self.copies.extend(map(PageClear, self.pages.with_old_state))
        self.pages.with_old_state.clear()
        return block_ids

    def take_live_slot(self) -> int | None:
        """Takes a slot for a running request; None if the engine has slots of its own for them."""
        if not self.slots_per_request:
            return None
        slot = self.reserve_slot(LIVE_SIZE)
        if slot is None:
            raise CacheCorruptionError("no slot for a request that was promised one")
        self.slots.make_live(slot)
        return slot

    # -- requests ------------------------------------------------------------------------------------------------------

    def register(self, path: list[Node], chain: KeyChain, block_ids: Sequence[int], full_blocks: int) -> None:
        """Makes a request's first blocks matchable. The forwards that compute them are launched.

        Args:
            path: Nodes of its first blocks; grows to ``full_blocks``.
            chain: Its keys.
            block_ids: Its blocks.
            full_blocks: Number of blocks that it has filled.
        """
        keys, first = chain.keys, len(path)
        for index in range(first, full_blocks):
            block_id = block_ids[index]
            self.ghosts.discard(keys[index])
            node = self.tree.get(keys[index])
            if node is None:
                node = self.tree.insert(keys[index], path[-1] if path else None, block_id)
                node.private = chain.private
                self.blocks.bind(node)
            elif node.block_id == NO_BLOCK:
                node.block_id = block_id
                self.blocks.bind(node)
                self.tree.version += 1
            else:
                self.blocks.merge(node, block_id)
            path.append(node)
        self.host.also_on_device(path[first:])

    def withdraw(self, states: Sequence[Node], kv: Sequence[Node]) -> None:
        """Drops wrong entries from every tier: the states of some nodes; KV and states of others, and all below them.

        Requests keep their blocks. Their paths must not have the nodes of ``kv`` any more.
        """
        wrong = set(kv)
        for node in sorted(self.tree, key=_depth) if wrong else ():
            if node.parent in wrong:
                wrong.add(node)
        self.host.take_back({node.key for node in (*states, *wrong)})
        for node in sorted({*states, *wrong}, key=_depth, reverse=True):
            if node.slot != NO_SLOT:
                self.unbind(node)
            if node in wrong and node.block_id != NO_BLOCK:
                self.blocks.unbind(node)
            if node in self.host.of_states:
                self.host.remove(EntryKind.STATE, node)
            if node in wrong and node in self.host.kv:
                self.host.remove(EntryKind.KV, node)
            if self.tree.get(node.key) is node:
                self.tree.prune(node)

    def forget(self, epoch: int) -> None:
        """Empties the tree after a change of weights.

        Held blocks stay with their requests, and pinned slots stay pinned. All others become free.

        Args:
            epoch: Epoch of what is published from now on.
        """
        self.tree.epoch = epoch
        for node in self.tree:
            if node.slot != NO_SLOT:
                self.slots.retire(node.slot)
                node.slot = NO_SLOT
            if node.block_id != NO_BLOCK:
                self.blocks.unbind(node)
        self.tree.clear()
        self.blocks.clear()
        self.bound.clear()
        self.ghosts.clear()
        self.pins.clear()
        self.host.reset()
        self.host.behind.invalidate(epoch)

    def reset(self) -> None:
        """Frees all blocks, slots and host pages, even held ones."""
        self.host.reset()
        self.tree.clear()
        self.blocks.reset()
        self.protected.clear()
        self.bound.clear()
        self.slots.reset()
        self.copies[:] = [copy for copy in self.copies if isinstance(copy, PageClear | LoadOver)]
        self.ghosts.clear()
        self.pins.clear()

    def note_session(self, path: Sequence[Node], session: Session | None) -> None:
        """A request of this session, or of none, uses the states on a path."""
        for node in self.tree.sessions.note(path, session):
            self.blocks.ended.pop(node, None)
            self.host.ended.pop(node, None)

    def end_session(self, session: Session) -> None:
        """A session is over."""
        self.stats.sessions_ended += 1
        for node in self.tree.sessions.end(session):
            for tier in (self.blocks, self.host):
                if node in tier.states:
                    tier.ended[node] = None

    # -- states --------------------------------------------------------------------------------------------------------

    def bind(self, node: Node, slot: int, reason: CheckpointReason) -> None:
        """Gives the node the state in the reserved ``slot``. The node must have no state on the device."""
        assert node.slot == NO_SLOT, node
        if reason == CheckpointReason.INTERVAL and node.reason is not None:
            reason = node.reason  # the host's copy is no guess
        self.slots.publish(slot)
        node.slot, node.reason, node.used = slot, reason, False
        self._bound += 1
        self.bound[node] = self._bound
        self.tree.version += 1
        self.blocks.add_state(node)
        self.host.state_also_on_device(node)

    def unbind(self, node: Node) -> None:
        """Takes the node's state off the device. The slot becomes free, at once or with its last unpin."""
        self.slots.retire(self._take_state(node))

    def take_slot(self, *, live: bool = False) -> int | None:
        """Reserves a slot, if need be by eviction of what is worth least. None: there is none.

        Args:
            live: For a live state, not for a checkpoint.
        """
        size = LIVE_SIZE if live else self.slots.checkpoint_size
        if size == self.slots.checkpoint_size and self.slots.is_full:
            next_state = self._next_unpinned if self.pins.kept else self.blocks.next_state
            guess = self.blocks.next_guess() if self.blocks.guesses else None
            return self._slot_of(guess or next_state())
        return self.reserve_slot(size)

    def take_guess_slot(self, path: Sequence[Node]) -> int | None:
        """Reserves a slot for a guess: a free slot, or that of another guess. None: there is none.

        Args:
            path: Nodes of the request. Guesses on this path are not evicted; otherwise a prompt computed in chunks would evict its
                own.
        """
        slot = None if self.slots.is_full else self.reserve_free_slot(self.slots.checkpoint_size)
        if slot is not None:
            return slot
        return self._slot_of(
            self.blocks.next_guess(lambda node: node not in path[node.depth_blocks - 1 : node.depth_blocks])
        )

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
        node = self.blocks.eviction.victim(lambda node: node.slot in waiting and self.slots.pins(node.slot) == 1)
        if node is not None:
            self.unbind(node)
        return node is not None

    def publish(self, node: Node, slot: int, reason: CheckpointReason, session: Session | None) -> None:
        """Makes the state in the reserved ``slot``, of a request of this session, matchable. The node must have no state on the device."""
        if node.reason is None:  # nor on any other tier
            node.sessions = None if session is None else set()
        self.bind(node, slot, reason)
        if session is not None or self.tree.sessions.seen:
            self.note_session([node], session)
        self.stats.checkpoints_published += 1
        self.stats.checkpoints_by_reason[reason.name.lower()] += 1
        self.host.state_published(node, reason)

    def restore(self, node: Node, slot: int) -> None:
        """The node's state was loaded into the reserved ``slot``, and a request resumed from it."""
        assert node.reason is not None, node
        self.bind(node, slot, node.reason)
        self.use(node)

    def confirm(self, node: Node, reason: CheckpointReason) -> None:
        """A guess, or a decode state that nobody has used, is an ordinary state now, kept for this reason. Else nothing changes."""
        if is_guess(node):
            self.blocks.drop_state(node)
            node.reason = reason
            self.blocks.add_state(node)
            self.host.state_published(node, reason)
        elif node.reason == CheckpointReason.DECODE and not node.used:
            node.reason = reason
            self.blocks.use_state(node)

    def use(self, node: Node) -> None:
        """A request resumes from this node's state. A guess becomes an ordinary state: two prompts share it."""
        node.used = True
        ended = [index.ended.pop(node) for index in (self.blocks, self.host) if node in index.ended]
        self.stats.uses_of_ended += bool(ended)
        if is_guess(node):
            self.confirm(node, CheckpointReason.JUNCTION)
        else:
            self.blocks.use_state(node)
        self.host.use_state(node)

    def evict(self, node: Node) -> None:
        """Evicts the node's state, to the host if it has room."""
        self.slots.retire(self._evicted(node))

    def drop_decoded(self, node: Node, number: int) -> None:
        """Drops an older decode state of a request, unless it is gone already or another request used it. ``number``: see `bound`."""
        if self.bound.get(node) == number and node.reason == CheckpointReason.DECODE and not node.used:
            self.unbind(node)

    def end_decoded(self, node: Node, number: int) -> None:
        """A request ended, and this is its latest decode state, unless it is gone already."""
        if self.bound.get(node) == number:
            self.host.store_answer(node)

    def _slot_of(self, victim: Node | None) -> int | None:
        return None if victim is None else self.slots.reserve_again(self._evicted(victim))

    def _evicted(self, node: Node) -> int:
        """Evicts the node's state. Returns its slot, which no node has now."""
        if node in self.blocks.ended:
            self.stats.evictions_ended += 1
        else:
            self.host.store_state(node)
        self.stats.evictions += 1
        return self._take_state(node)

    def _take_state(self, node: Node) -> int:
        self.blocks.drop_state(node)
        del self.bound[node]
        slot, node.slot = node.slot, NO_SLOT
        if node in self.host.of_states:
            self.host.on_both.pop(node, None)
            self.tree.version += 1
        else:
            self.tree.state_left(node)
        return slot

    # -- who gets the next bytes ---------------------------------------------------------------------------------------

    def reserve_slot(self, size: int) -> int | None:
        """Reserves a slot of a size, if need be after moves and evictions. None: none can be made free."""
        pages, for_slot = self.pages, size == self.slots.checkpoint_size
        while True:
            slot = self.reserve_free_slot(size)
            if slot is not None:
                return slot
            if not for_slot and self._gather_states():
                continue
            # No KV page can be emptied: only a state's own page helps.
            blocked = pages.unheld_pages == 0
            self._blocked_slots += blocked and pages.free_blocks >= pages.page_blocks
            if not self.evict_next(for_slot=for_slot, states_only=blocked):
                return None

    def reserve_free_slot(self, size: int) -> int | None:
        """Reserves a slot of a size for a guess: if need be after moves, but without eviction. None: there is none."""
        slot = self.slots.reserve(size)
        if slot is None and self.pages.can_be_emptied():
            _, moves = self.pages.empty()
            self.blocks.move(moves)
            self.copies += [BlockMove(source_block=source, target_block=target) for source, target in moves]
            self._moved_blocks += len(moves)
            self.tree.version += 1
            slot = self.slots.reserve(size)
        return slot

    def _gather_states(self) -> bool:
        """Moves the checkpoints of a page to free slots of others. Returns whether the page is empty now; False: too few are free."""
        moves = self.slots.empty()
        nodes = {node.slot: node for node in self.bound} if moves else {}
        for source, target in moves:
            nodes[source].slot = target
        self.copies += [StateMove(source_slot=source, target_slot=target) for source, target in moves]
        self.tree.version += bool(moves)
        return bool(moves)

    def evict_next(self, *, for_slot: bool = False, states_only: bool = False) -> bool:
        """Evicts what goes first. False: nothing can be evicted.

        Args:
            for_slot: A checkpoint's slot is needed, and no page: one state is enough.
            states_only: No KV page can be emptied.
        """
        index = self.blocks
        may_go = (lambda node: True) if for_slot else partial(self._frees_bytes, page=states_only)
        state = index.next_guess(may_go) if index.guesses else None
        node = None if states_only or state is not None else index.next_kv()
        if node is not None:
            self._drop_kv(node)
            return True
        state = state or (self._next_unpinned(may_go) if self.pins.kept else index.next_state(may_go))
        if state is not None:
            self.evict(state)
            return True
        # All that is left is KV that states need which wait for their copy. Without those states it is unneeded.
        return not states_only and self.drop_protected()

    def _next_unpinned(self, may_go: Callable[[Node], bool] = lambda node: True) -> Node | None:
        """The state that goes next, of those that may. A pinned one only if no other may."""
        kept, passed = self.pins.kept, list[Node]()

        def others(node: Node) -> bool:
            if not may_go(node):
                return False
            if node.key in kept:
                passed.append(node)
            return node.key not in kept

        found = self.blocks.next_state(others)
        if found is None and passed:
            self.stats.pins["evicted"] += 1
            return self.blocks.next_state(may_go)
        for node in passed:
            self.stats.pins["spared"] += not kept[node.key].spared
            kept[node.key].spared = True
        return found

    def _frees_bytes(self, node: Node, *, page: bool = False) -> bool:
        """Whether there are more bytes when the node's state goes: its page, or, unless it has to be a page, KV that only it needs."""
        if page or self.slots.is_loose(node.slot):
            return self.slots.is_loose(node.slot)
        index = self.blocks
        return node in index.states and index.users[node] == 1 and index.has_kv(node)

    def _drop_kv(self, node: Node) -> None:
        if node.slot != NO_SLOT:
            self.evict(node)  # a guess: it cannot be reached without its KV
        self.host.store_kv(node)
        self.ghosts.add(node.key)
        self.blocks.unbind(node)
        self.tree.prune(node)
        self.stats.kv_evictions += 1

    def memory_use(self) -> MemoryUse:
        """Who uses the memory now."""
        return MemoryUse(
            total_blocks=self.pages.total_blocks,
            free_blocks=self.pages.free_blocks,
            held_blocks=self.pages.held_blocks,
            keyed_blocks=self.blocks.keyed_blocks,
            cached_blocks=self.blocks.cached_blocks,
            unneeded_blocks=len(self.blocks.unneeded),
            state_pages=self.pages.state_pages,
            live_slots=self.slots.live_slots,
            moved_blocks=self._moved_blocks,
            pages_to_states=self.pages.pages_to_states,
            pages_to_kv=self.pages.pages_to_kv,
            blocked_slots=self._blocked_slots,
        )

    def check(self) -> None:
        """Checks which KV is needed. Raises CacheCorruptionError if a count is wrong."""
        index = self.blocks
        index.check_needs(self.tree)
        if any(map(is_guess, index.states)) or not all(map(is_guess, index.guesses)):
            raise CacheCorruptionError("a guess counts as an ordinary state, or the other way round")
        if not index.ended.keys() <= index.states or not self.host.ended.keys() <= self.host.states:
            raise CacheCorruptionError("a state that is not there would go next")
        if any(node.sessions is None for node in (*index.ended, *self.host.ended)):
            raise CacheCorruptionError("a state that requests without a session used would go first")
        if any(node.block_id == NO_BLOCK for node in index.users):
            raise CacheCorruptionError("a state on the device needs KV that is not there")
