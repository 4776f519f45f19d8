"""The prefix cache of a hybrid model. START HERE: the methods follow one request from top to bottom::

    1. chain     hash the prompt's blocks
    2. match     find the deepest cached state, and the KV blocks before it (read-only)
    3. admit     share those blocks, pin that state, or load a deeper one from the host, and allocate new blocks
    4. plan      for one forward: where to read the state, which checkpoints to write
    5.           the engine launches the forward
    6. publish   it is launched: its blocks and checkpoints become matchable (`abandon`: it failed)
    7. append    decode: sampled tokens fill more blocks, and `checkpoint_decoded` keeps their states
    8. release   the request ends: its blocks stay cached until they are evicted

The cache handles only numbers: token counts, KV block ids, slot ids. It holds no tensors and does not import torch. The
engine does the work, and a trace replay runs this same file without an engine. The cache owns all KV blocks and all
checkpoint slots.

KV blocks, checkpoints and the states of running requests share one memory. The value per byte decides across all of them
(``tiers/device.py``), and blocks that no request holds may move (``pool/pages.py``).

Two helpers belong to it. `cache.loads` loads from the host tier and swaps out preempted requests. `cache.blocks`
serves megatron's block allocator. Eviction is in ``tiers/device.py``, the choice of
checkpoints in ``requests/planner.py``.

Memory pressure never raises. `admit`, `grow` and `blocks.allocate` return None when eviction cannot free enough blocks.
A checkpoint that gets no slot is skipped and counted. ValueError means a caller's mistake, CacheCorruptionError means a
broken invariant.

This file is longer than 400 lines because it has every step of the pipeline, in order. Half of it is docstrings.
"""

from __future__ import annotations

from collections.abc import Buffer, Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace

from megatron_hybrid_prefix.index.hints import NO_HINTS, Hints, Pin
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker, Tokens
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason, with_boundary
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.blocks_by_id import BlocksById
from megatron_hybrid_prefix.requests.book import Admission, Grown, LiveRequest, RequestBook, StepPlan
from megatron_hybrid_prefix.requests.explain import Explanation, Question, explain
from megatron_hybrid_prefix.requests.integrity import check_integrity
from megatron_hybrid_prefix.requests.loads import Loads, room_for
from megatron_hybrid_prefix.requests.matcher import Match, Matcher
from megatron_hybrid_prefix.requests.planner import StepPlanner
from megatron_hybrid_prefix.tiers.device import DeviceTier, MemoryUse
from megatron_hybrid_prefix.tiers.units import HOST, BlockTransfer, Copy, LoadOver, LoadState


class HybridPrefixCache:
    """Matches prompts, admits requests, plans checkpoints, and evicts blocks and states.

    Methods of a live request raise ValueError if there is none with this id.

    Args:
        settings: Sizes and rules.

    Attributes:
        settings: See Args.
        block_tokens: Tokens per KV block.
        live: Requests by id that are admitted, or hold a load. Not to be changed.
        loads: Loads from the host tier; preempted requests that are swapped out.
        blocks: KV blocks by id.

    Raises:
        ValueError: A number is out of range, or the eviction policy does not exist.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self.block_tokens = settings.block_tokens
        self.settings = settings
        self._keys = KeyMaker(settings.block_tokens, settings.secret)
        self._stats = PrefixStats()
        self._device = device = DeviceTier(settings, self._stats)
        self._requests = RequestBook()
        self._matcher = Matcher(device, (*device.below.values(),))
        self._planner = StepPlanner(device)
        self.loads = Loads(device, self._requests, self._matcher)
        self.blocks = BlocksById(device, self._requests)
        self.live = self._requests.live

    @property
    def epoch(self) -> int:
        """The current weights epoch."""
        return self._device.tree.epoch

    # -- 1. chain, 2. match (read-only) --------------------------------------------------------------------------------

    def chain(
        self, tokens: Tokens = (), *, salt: str | None = None, adapter: str | None = None, remember: bool = True
    ) -> KeyChain:
        """Hashes the prompt's full blocks under the current weights. Call it once, when the request arrives.

        Args:
            tokens: The prompt: a buffer of int64, or ints.
            salt: Requests with different salts share nothing (``cache_salt``).
            adapter: Name of the request's adapter. Requests with different adapters share nothing.
            remember: Whether the blocks' tokens may be kept for a while: later prompts that begin alike are compared with them
                and not hashed, which is faster. `invalidate` and `reset` forget them.

        Returns:
            The chain of block keys.
        """
        return self._keys.chain(tokens, salt=salt, adapter=adapter, epoch=self.epoch, remember=remember)

    def match(
        self,
        chain: KeyChain,
        *,
        read: bool = True,
        max_resume_tokens: int | None = None,
        resume_at: Collection[int] | None = None,
    ) -> Match:
        """Finds the deepest state that the prompt can resume from. Changes nothing.

        A chain of another weights epoch matches nothing.

        Args:
            chain: Keys of the prompt.
            read: False: match nothing, because the request must not reuse the cache.
            max_resume_tokens: Resume at this position or earlier.
            resume_at: Resume at one of these positions only, because the request needs more there than the cache holds.
                Block boundaries. None: resume anywhere.

        Returns:
            An immutable match. It pins nothing, so it may be out of date by the time of `admit`.

        Raises:
            ValueError: The chain was made with another block size.
        """
        if len(chain.keys) != chain.tokens // self.block_tokens:
            raise ValueError(f"{len(chain.keys)} keys for {chain.tokens} tokens in blocks of {self.block_tokens}")
        limit_tokens = chain.tokens - self.settings.min_computed_tokens
        if max_resume_tokens is not None:
            limit_tokens = min(limit_tokens, max_resume_tokens)
        return self._matcher.match(chain, limit_tokens, read, resume_at)

    def reserve_pin(self, chain: KeyChain, hints: Hints) -> None:
        """Takes the room of the first pin of a request that arrives; on all ranks between the same steps.

        Raises:
            ValueError: There is none. Nothing is pinned.
        """
        pins, blocks = self._device.pins, self._pinned_blocks(chain, hints.pins[0])
        pins.came(hints.now_s)
        if blocks and not pins.put(chain.keys[:blocks], hints.tenant, hints.pins[0]):
            raise ValueError(
                f"{blocks} blocks and a state have no room in the tenant's share for pins: nothing is pinned"
            )

    def explain(self, asked: Question) -> Explanation:
        """What this request would reuse now, and why not more. Changes nothing, and asks no other rank or process."""
        return explain(self._device, self._planner, asked)

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same result."""
        return self._matcher.is_current(match)

    # -- 3. admit ------------------------------------------------------------------------------------------------------

    def can_admit(self, match: Match, *, length_tokens: int | None = None, load_of: int | None = None) -> bool:
        """Whether `admit` would succeed now; with ``load_of``, of this request and with its load. Changes nothing."""
        match = self._matcher.fresh(match)
        source = None if load_of is None else self.loads.source(load_of, match)
        return room_for(self._device, match, source, self._blocks_for(match, length_tokens)) is not None

    def admit(
        self,
        request_id: int,
        match: Match,
        *,
        load: bool = False,
        length_tokens: int | None = None,
        write: bool = True,
        verify_at_tokens: int = 0,
        breakpoints: Sequence[int] = (),
        counted_tokens: int = 0,
        hints: Hints = NO_HINTS,
    ) -> Admission | None:
        """Shares the matched blocks, pins the source checkpoint, and allocates new blocks. All or nothing.

        Blocks of an admitted prompt. A hit on the device has no loaded blocks::

            ------------------------------------------------------------------------------------
            | < shared > | < loaded > |          < shared >        |          < new >          |
            ------------------------------------------------------------------------------------
            |       < reused >        |                   < to be computed >                   |
            ------------------------------------------------------------------------------------
            |                   < KV is cached >                   |    < KV is not cached >   |
            ------------------------------------------------------------------------------------
            0                         S                            J          B            T   end

            shared   Blocks on the device that other requests may use, too. The request must not write to them. Between
                     S and J no state is kept, so the request computes these tokens again
                     (`PrefixStats.lost_tokens_no_state`). It reads their KV from the shared blocks, as a hit does, and does
                     not store it a second time (`Admission.stored_tokens`). After loaded blocks all blocks are new.
            loaded   Blocks allocated here, whose KV is on its way from the host.
            new      Blocks allocated here.
            S        The source checkpoint, at `Admission.resume_tokens`. The first forward reads the state from its slot.
                     The slot stays pinned until that forward is published.
            J, B, T  Boundaries that get a checkpoint: the junction (the end of the cached KV), breakpoints of the
                     caller, and the tail (the last full block). ``policy/boundaries.py`` has all rules.

        A match that is out of date is made again with the same limit.

        Args:
            request_id: Not the id of a live request.
            match: From `match`.
            load: Resume from a deeper state below the device, if there is one (`Match.loadable_blocks`), or where the request was
                preempted. The copies are queued. If a tier has no room for them, the request does without.
            length_tokens: Allocate blocks up to this position (the end of the first chunk). None: the whole prompt.
            write: False: cache nothing that this request computes.
            verify_at_tokens: Write the state at this boundary even if it is cached already, so that both can be
                compared. 0: do not verify.
            breakpoints: Token positions up to which other prompts will share this one. Each is rounded down to a block
                boundary. Positions outside the computed part of the prompt are ignored.
            counted_tokens: Tokens of the request that the statistics have already: it was preempted, or starts over.
            hints: What its caller knows of the future. Pins count with its first forward, and not if ``counted_tokens``.

        Returns:
            The admission; None when there are too few KV blocks, even after eviction.

        Raises:
            ValueError: The request is live already.
        """
        if request_id in self._requests.live:
            raise ValueError(f"request {request_id} is live already")
        device, expected = self._device, match
        match = self._matcher.fresh(match)
        source = self.loads.source(request_id, match) if load else None
        room = room_for(device, match, source, self._blocks_for(match, length_tokens))
        if room is None:
            return None
        if match.resume_tokens < expected.resume_tokens:
            self._stats.count_fallback("stale_match")
        path, beyond = room
        # Share and pin before allocating: allocation may evict, and must not evict what this request shares.
        block_ids, loading = device.blocks.share(path), None
        if source is not None:
            loading = self.loads.begin(request_id, source, path)
            if loading is None:
                device.blocks.release(block_ids, path)
                return self.admit(
                    request_id,
                    expected,
                    length_tokens=length_tokens,
                    write=write,
                    verify_at_tokens=verify_at_tokens,
                    breakpoints=breakpoints,
                    counted_tokens=counted_tokens,
                    hints=hints,
                )
            match = source.as_match(match, loading.slot)
            beyond = device.tree.path([node.key for node in beyond])  # some may have gone for the slot
        self.loads.drop_swapped_out(request_id)
        block_ids += device.blocks.share(beyond)
        live = self._requests.live[request_id] = LiveRequest(
            request_id=request_id,
            chain=copy(match.chain),
            prompt_tokens=match.chain.tokens,
            read=match.read,
            write=write and match.chain.epoch == self.epoch,
            block_ids=block_ids,
            path=[*path, *beyond],
            computed_tokens=match.resume_tokens,
            planned_tokens=match.resume_tokens,
            # A request that was preempted inside a block may share the whole block.
            stored_tokens=max(match.resume_tokens, len(block_ids) * self.block_tokens),
            pinned_slot=match.source_slot if loading is None else None,
            load=loading,
            uncounted=match,
            counted_tokens=counted_tokens,
            session=None if hints.session is None else (match.chain.seed, hints.session),
            hints=hints,
        )
        if live.pinned_slot is not None:
            device.slots.pin(live.pinned_slot)
        if path and loading is None:
            device.use(path[-1])
        if live.session is not None or device.tree.sessions.seen:
            device.note_session(live.path, live.session)
        # Slots first: blocks could take the last page that can be emptied.
        live.live_slot = device.take_live_slot()
        live.block_ids += device.take_blocks(max(0, -(-match.resume_tokens // self.block_tokens) - len(live.block_ids)))
        if loading is not None:
            self.loads.copy(loading, len(path), live.block_ids[len(path) :])
        shared_blocks = len(live.block_ids)
        live.block_ids += device.take_blocks(max(0, self._blocks_for(match, length_tokens) - shared_blocks))
        if live.write:
            live.boundaries = self._planner.boundaries(match, breakpoints)
            if live.boundaries and verify_at_tokens:
                live.boundaries = with_boundary(live.boundaries, Boundary(verify_at_tokens, CheckpointReason.VERIFY))
        return Admission(
            block_ids=tuple(live.block_ids),
            shared_blocks=shared_blocks,
            stored_tokens=live.stored_tokens,
            resume_tokens=match.resume_tokens,
            source_slot=match.source_slot,
            reuse=match.reuse,
            boundaries=live.boundaries,
            load=loading,
            live_slot=live.live_slot,
        )

    def take_copies(self, *, published: bool = False) -> list[Copy]:
        """Takes the copies queued since the last call: to and from other tiers, of blocks that moved, and zeros (`PageClear`).

        Carry them out in this order, before anything is written to a block or slot that the cache gave out since: before
        the next forward, and before the states of `checkpoint_decoded` are copied to their slots.

        Args:
            published: Take only what publication queued for a tier behind the host that gets entries early. Carry it out after the
                forward that writes these entries, which is launched. If other copies are queued, too, all stay: they must come
                before the next forward, and not after this one.
        """
        device = self._device
        if published:
            takes = device.host.behind.takes
            alone = takes and all(isinstance(copy, BlockTransfer | LoadOver) for copy in device.copies)
            return device.take_copies() if alone else []
        device.end_protection()
        return device.take_copies()

    def grow(self, request_id: int, length_tokens: int) -> Grown | None:
        """Gives the request the blocks that its KV needs up to position ``length_tokens``.

        As in `admit`, what is cached of its prompt is shared.

        Returns:
            The blocks, possibly none. None when there are too few blocks; then the request keeps those it had.
        """
        live, blocks = self._requests[request_id], self._device.blocks
        needed, prompt_blocks = -(-length_tokens // self.block_tokens), live.prompt_tokens // self.block_tokens
        count, beyond = needed - len(live.block_ids), list[Node]()
        # A path has no gaps: after a block of its own that has no key, the request shares nothing.
        if live.read and len(live.path) == len(live.block_ids):
            beyond = self._device.tree.path(live.chain.keys[len(live.path) : min(needed, prompt_blocks)])
        shared = blocks.share(beyond)  # before allocating, as in `admit`
        if count - len(shared) > blocks.available_blocks:
            blocks.release(shared, beyond)
            return None
        own = self._device.take_blocks(max(0, count - len(shared)))
        live.block_ids += shared + own
        live.path += beyond
        if beyond:
            live.stored_tokens = len(live.path) * self.block_tokens
        return Grown(shared=shared, own=own, stored_tokens=live.stored_tokens)

    # -- 4. plan, 5. (the engine launches), 6. publish -----------------------------------------------------------------

    def plan(self, request_id: int, start_tokens: int, end_tokens: int) -> StepPlan:
        """Plans one forward of the request over positions [start, end).

        The plan says where the forward reads its state, and which slots it writes checkpoints to. Each boundary in
        (start, end] gets a reserved slot; this may evict. Pass every plan to `publish`, `abandon` or `fail_load`.

        Args:
            request_id: A live request.
            start_tokens: Must be where the request's last plan ended.
            end_tokens: Greater than ``start_tokens``.

        Raises:
            ValueError: The span is empty, or does not start where the last one ended.
        """
        return self._planner.plan(self._requests[request_id], start_tokens, end_tokens)

    def publish(self, plan: StepPlan) -> bool:
        """The forward is launched, or over. Its full blocks and checkpoints become matchable, and its source is unpinned.

        The device may still run it: whatever reads or overwrites these entries is launched later, and runs after it. Two plans
        must wait until the forward is over: one with a load, because only then it is known whether the load was right
        (`fail_load`), and one of a request that is released already, because its blocks are let go with its last plan.

        Nothing becomes matchable if the weights changed since admission, or if an earlier plan of the request was
        abandoned.

        Returns:
            Whether what the forward computed became matchable.
        """
        live = self._requests.owner(plan)
        if live is None:
            return False  # `reset` dropped the request
        if live.computed_tokens != plan.start_tokens:
            self._settle(live, plan, kept=False)
            return False
        live.computed_tokens = plan.end_tokens
        self._unpin_source(live)
        self._count(live, plan)
        if live.write:
            self._planner.register(live)
        elif plan.checkpoints:
            self._stats.count_fallback("epoch_changed")
        if live.load is not None:
            self.loads.end(live, LoadState.ARRIVED, kept=live.write)
        live.written.clear()
        self._settle(live, plan, kept=live.write)
        return live.write

    def abandon(self, plan: StepPlan, reason: str = "forward_failed") -> None:
        """The forward failed or was not launched. Its reserved slots become free, and nothing becomes matchable.

        The request keeps its position. A first forward can be planned again from the same source checkpoint. If a later
        forward may have overwritten the live slot before it failed, the engine must release the request and admit it
        again.

        Args:
            plan: From `plan`.
            reason: Counted under this name in `PrefixStats.fallbacks`.
        """
        live = self._requests.owner(plan)
        if live is not None:
            self._stats.count_fallback(reason)
            self._settle(live, plan, kept=False)

    def fail_load(self, plan: StepPlan) -> None:
        """The forward succeeded, but the KV or state loaded for it was wrong. Call this instead of `publish`.

        The failed host entries are dropped. Nothing that the request computed is cached. The caller must release it.
        """
        live = self._requests.owner(plan)
        if live is None:
            return
        self.loads.fail(live)
        self._settle(live, plan, kept=False)
        self._planner.stop_writing(live)

    def withdraw(self, request_id: int, start_tokens: int) -> set[int]:
        """What the request computed from this position on is wrong, though it was published. No tier has it any more, nor what builds on it.

        The request, and those that hold such blocks, cache nothing more.

        Args:
            request_id: The request.
            start_tokens: Where its latest forward began, or a position before it.

        Returns:
            These requests. The caller must release them.
        """
        live = self._requests.live.get(request_id)
        if live is None:
            return set()
        self._stats.count_fallback("not_finite")
        path, first = live.path, start_tokens // self.block_tokens
        stored = max(first, min(live.stored_tokens // self.block_tokens, len(path)))
        # Blocks that others computed are right: its own are duplicates of them. Its first own one is the first that is wrong.
        others = (at for at in range(stored, len(path)) if path[at].block_id == live.block_ids[at])
        own = next(others, len(path))
        wrong, root = path[own:], path[own : own + 1]
        states = [node for node in path[first:own] if node in (*live.written, *(kept for kept, _ in live.decoded))]
        users = [each for each in self._requests.everyone() if root and each.path[own : own + 1] == root]
        for each in (live, *users):
            self._planner.stop_writing(each)
        for plan in list(live.plans):
            self._settle(live, plan, kept=False)
        for node, block_id in zip(path[stored:own], live.block_ids[stored:own], strict=True):
            self._device.blocks.forget_duplicate(node, block_id)
        for each in users:
            del each.path[own:]
        del path[stored:]
        self._device.withdraw(states, wrong)
        return {each.request_id for each in users}

    def request_checkpoint(self, request_id: int, position_tokens: int) -> bool:
        """Adds a boundary to the request's prompt, because another request waits for the state there.

        Returns:
            False when the request no longer computes that position, or caches nothing.
        """
        return self._planner.request_checkpoint(self._requests[request_id], position_tokens)

    # -- 7. decode -----------------------------------------------------------------------------------------------------

    def append(self, request_id: int, tokens: Tokens, *, computed_tokens: int | None = None) -> Buffer:
        """Appends sampled (and accepted) tokens to the request. Blocks that are now full become matchable.

        Call it once per token, or once for many tokens: only a filled block makes a difference.

        Args:
            request_id: A live request whose prompt is computed.
            tokens: The new tokens: a buffer of int64, or ints.
            computed_tokens: Tokens of the sequence whose KV is written. None: all but the last token.

        Returns:
            The tokens of the blocks that became matchable, int64.
        """
        live = self._requests[request_id]
        if not live.write:
            return b""
        filled = live.chain.extend(tokens)
        computed = live.chain.tokens - 1 if computed_tokens is None else computed_tokens
        if not live.plans and live.computed_tokens < computed <= live.chain.tokens:
            live.computed_tokens = live.planned_tokens = computed
            self._planner.register(live)
            return filled
        return b""

    def checkpoint_decoded(self, request_id: int, position_tokens: int) -> int | None:
        """Publishes the state that a decode step reached at a block boundary, and returns a slot for it.

        Each request keeps the two latest of these states, and those that another request has resumed from.

        Args:
            request_id: A live request. Its live slot holds the state at ``position_tokens``.
            position_tokens: A block boundary. All tokens before it are appended.

        Returns:
            The slot to copy the state to, before the request's next forward. The state is matchable at once. None: the
            state is kept already, the request caches nothing, or there is no slot. Call `take_copies` between this call and the
            copy, and make the copy before the next call that may evict.
        """
        return self._planner.checkpoint_decoded(self._requests[request_id], position_tokens)

    # -- 8. release, invalidate ----------------------------------------------------------------------------------------

    def release(self, request_id: int, *, comes_back: bool = False) -> bool:
        """The request finished, was aborted or was preempted. Drops its references; its keyed blocks stay cached.

        The id can be used again at once. If the request has plans in flight, its blocks are dropped when the last plan
        is settled.

        Args:
            request_id: The request.
            comes_back: It was preempted, or starts over: its session is not over. Else that is, if its hints say so: states that only
                sessions used which are over go before others. A later request of it finds what is left.

        Returns:
            False when there is no such request.
        """
        live = self._requests.live.pop(request_id, None)
        if live is None:
            return False
        if comes_back:
            live.hints = replace(live.hints, ends_session=False)
        if live.plans:
            self._requests.ending.append(live)
        else:
            self._let_go(live)
        return True

    def release_all(self) -> None:
        """Releases all live requests, drops all swapped-out ones, and frees the blocks of `blocks.allocate`."""
        for request_id in list(self._requests.live):
            self.release(request_id, comes_back=True)
        for request_id in list(self._requests.swapped_out):
            self.loads.drop_swapped_out(request_id)
        self.blocks.free(list(self.blocks.unattached))

    def invalidate(self, epoch: int | None = None) -> None:
        """The weights changed. Empties the cache; live requests run on with the KV that they hold, but cache nothing more.

        Args:
            epoch: Epoch of the new weights. None: the next number. The current epoch: do nothing.
        """
        if epoch == self.epoch:
            return
        self._stats.invalidations += 1
        for live in self._requests.everyone():
            live.write = False
            live.path.clear()  # it keeps its blocks, which have no keys any more
            if live.load is not None:  # the host is about to be emptied
                live.load.pinned = live.load.private = live.load.coming = ()
        self._requests.swapped_out.clear()
        self._device.copies += [LoadOver(fetch.load_id) for fetch in self._requests.fetches.values()]
        self._requests.fetches.clear()
        self._planner.writing.clear()
        self._keys.forget()
        self._device.forget(self.epoch + 1 if epoch is None else epoch)

    def reset(self) -> None:
        """Drops all requests, plans, blocks and states. Keeps the counters."""
        over = [LoadOver(load.load_id) for load in self._requests.loads()]
        self._requests.clear()
        self._keys.forget()
        self._planner.writing.clear()
        self.blocks.unattached.clear()
        self._device.reset()
        self._device.copies += over

    # -- queries, statistics, integrity --------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes of the prefix tree, in any order."""
        return iter(self._device.tree)

    def node(self, key: bytes) -> Node | None:
        """The node with this key, on any tier; None if there is none."""
        return self._device.tree.get(key)

    def memory_use(self) -> MemoryUse:
        """Who uses the memory now."""
        return self._device.memory_use()

    def stats(self) -> PrefixStats:
        """A snapshot of the counters."""
        stats = self._stats.copy()
        stats.slots_total = self._device.slots.most_cached
        stats.slots_used = self._device.slots.cached_slots
        host = self._device.host
        stats.tiers[HOST].kv_blocks, stats.tiers[HOST].states = len(host.kv), len(host.of_states)
        return stats

    @property
    def counters(self) -> PrefixStats:
        """The counters themselves: they may be kept longer than the cache. `stats` also has what is in use now."""
        return self._stats

    def check_integrity(self) -> None:
        """Checks every invariant. Slow, O(blocks + states + requests): for tests and debugging.

        Raises:
            CacheCorruptionError: An invariant does not hold.
        """
        check_integrity(self._device, self._requests, unattached=self.blocks.unattached, writing=self._planner.writing)

    # -- internal ------------------------------------------------------------------------------------------------------

    def _pin(self, live: LiveRequest, resume_blocks: int) -> None:
        """A request has begun: it counts for the pins that are there, and brings its own."""
        device, keys, hints = self._device, live.chain.keys, live.hints
        source = device.pins.kept.get(keys[resume_blocks - 1]) if resume_blocks else None
        if source is not None and source.spared:
            self._stats.pins["reused_tokens"] += resume_blocks * self.block_tokens
        device.pins.came(hints.now_s, keys, hints.tenant)
        for pin in hints.pins if live.write else ():
            blocks = self._pinned_blocks(live.chain, pin)
            node = device.tree.get(keys[blocks - 1]) if blocks else None
            if blocks and blocks <= resume_blocks and (node is None or node.slot == NO_SLOT):
                blocks = resume_blocks  # no state comes there: that below it keeps this KV, too
            elif node is not None and node.slot != NO_SLOT:
                device.confirm(node, CheckpointReason.BREAKPOINT)
            if blocks:
                self._stats.pins["pinned" if device.pins.put(keys[:blocks], hints.tenant, pin) else "no_room"] += 1

    def _pinned_blocks(self, chain: KeyChain, pin: Pin) -> int:
        """Blocks of a prompt that a pin keeps. The same prompt can resume there: its last token is always computed."""
        most = chain.tokens - self.settings.min_computed_tokens
        return max(0, min(most, most if pin.tokens is None else pin.tokens)) // self.block_tokens

    def _settle(self, live: LiveRequest, plan: StepPlan, *, kept: bool) -> None:
        self._planner.settle(live, plan, kept=kept)
        if not live.plans and live in self._requests.ending:
            self._requests.ending.remove(live)
            self._let_go(live)

    def _let_go(self, live: LiveRequest) -> None:
        if live.load is not None:
            self.loads.end(live)
        if live.decoded:
            self._device.end_decoded(*live.decoded[-1])
        if live.session is not None or self._device.tree.sessions.seen:
            self._device.note_session(live.path, live.session)
            if live.session is not None and live.hints.ends_session:
                self._device.end_session(live.session)
        self._unpin_source(live)
        self._device.blocks.release(live.block_ids, live.path)
        if live.live_slot is not None:
            self._device.slots.end_live(live.live_slot)

    def _unpin_source(self, live: LiveRequest) -> None:
        if live.pinned_slot is not None:
            self._device.slots.unpin(live.pinned_slot)
            live.pinned_slot = None

    def _count(self, live: LiveRequest, plan: StepPlan) -> None:
        """Counts what a forward computed; the first one also counts the prompt, and what it reused."""
        stats, end = self._stats, min(plan.end_tokens, live.prompt_tokens)
        new_tokens = max(0, end - max(plan.start_tokens, live.counted_tokens))
        stats.computed_prompt_tokens += new_tokens
        stats.recomputed_tokens += max(0, end - plan.start_tokens) - new_tokens
        match, live.uncounted = live.uncounted, None
        if match is None:
            return
        if live.counted_tokens:
            stats.resumed_tokens += match.resume_tokens
            return
        stats.prompt_tokens += match.chain.tokens
        stats.reused_tokens += match.resume_tokens
        if live.load is None:
            stats.reused_tokens_device += match.resume_tokens
        else:
            stats.reused_tokens_host += match.resume_tokens
        reuse = match.reuse
        stats.lost_tokens_no_state += max(0, reuse.kv_tokens - reuse.state_tokens)
        if reuse.reason is not None:
            stats.not_reused[reuse.reason] += 1
        if live.hints.pins or self._device.pins.kept:
            self._pin(live, match.resume_tokens // self.block_tokens)
        hit = match.resume_tokens > 0
        self._device.starts.note(live.request_id, live.chain, reuse.reason, hit=hit, write=live.write)

    def _blocks_for(self, match: Match, length_tokens: int | None) -> int:
        return -(-(match.chain.tokens if length_tokens is None else length_tokens) // self.block_tokens)
