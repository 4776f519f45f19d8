"""The prefix cache of a hybrid model. START HERE: the methods are the way of a prompt, top to bottom.

    chain -> match -> (cache.loads.begin_load_back) -> admit -> plan -> (the engine runs the forward)
    -> publish or abandon -> append (decode) -> release

It decides on numbers only: token counts, KV block ids, slot ids. The engine does what it says, and a trace replay
runs this same file without one. It owns the KV blocks (which are free, held, cached) and the checkpoint slots.

Beside these verbs: `cache.loads` brings back what is on the host, and swaps out preempted requests; `cache.blocks` is for
megatron's allocator; `cache.inspect` answers questions. What is cached and how room is made is in ``index/store.py``,
which states are kept in ``index/planner.py``.

Pressure never raises: `admit`, `grow` and `blocks.allocate` return None when even eviction does not help, a checkpoint
without a slot is skipped and counted. ValueError is a caller's mistake, CacheCorruptionError a broken invariant.

Longer than 400 lines because every verb is here, in order; half of it is docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.blocks_by_id import BlocksById
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.inspect import Inspector
from megatron_hybrid_prefix.index.integrity import check_integrity
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker, Tokens
from megatron_hybrid_prefix.index.loads import Loads
from megatron_hybrid_prefix.index.matcher import Match, Matcher
from megatron_hybrid_prefix.index.planner import BoundaryRule, StepPlanner
from megatron_hybrid_prefix.index.requests import Admission, LiveRequest, RequestBook, StepPlan
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats, TierStats
from megatron_hybrid_prefix.policy.boundaries import Boundary, prompt_boundaries, with_verification
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, make_eviction_policy
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers.base import DepthTier, TierBehind
from megatron_hybrid_prefix.tiers.units import HOST


class HybridPrefixCache:
    """What is cached, who uses it, what is kept and what goes.

    Args:
        block_tokens: Tokens of a KV block.
        kv_blocks: KV blocks, ids 0 .. kv_blocks - 1 (megatron's dummy block not counted).
        state_slots: Checkpoint slots; 0 keeps nothing.
        first_state_slot: Id of the first one; ids below are the live slots of the engine.
        epoch: Weights epoch at the start.
        secret: Key of the block digests; random by default. Give all ranks one if keys shall be comparable.
        eviction_policy: Which checkpoint goes first, by name (``policy/registry.py``).
        min_computed_tokens: Tokens of a prompt that are computed even if all of it is cached.
        retention_interval_tokens: Also checkpoint every N prompt tokens while slots are free: a multiple of
            ``block_tokens``; 0: none; None: chosen by the prompt's length, 16 states at most.
        bytes_budget: Bytes of all checkpoint slots, for the statistics.
        host_pages: Pages of the host tier; 0: there is none.
        host_kv_pages: Pages that a KV block takes there.
        host_state_pages: Pages that a state takes there.
        host_state_share: Part of them that states may take, the rest is for KV; None: by use.
        host_write_through: Whether what is published goes to the host at once, not only when it is evicted.
        behind: The tier behind the host: what the host evicts is offered to it. Needs a host tier.
        boundary_rule: Which boundaries of a prompt are kept.

    Attributes:
        loads: What requests get from the host, and what preempted ones leave there.
        blocks: KV blocks by id.
        inspect: Questions.

    Raises:
        ValueError: A number is out of range, or there is no such policy.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        kv_blocks: int,
        state_slots: int,
        first_state_slot: int = 0,
        epoch: int = 0,
        secret: bytes | None = None,
        eviction_policy: str = DEFAULT_EVICTION_POLICY,
        min_computed_tokens: int = 1,
        retention_interval_tokens: int | None = None,
        bytes_budget: int = 0,
        host_pages: int = 0,
        host_kv_pages: int = 1,
        host_state_pages: int = 1,
        host_state_share: float | None = None,
        host_write_through: bool = False,
        behind: TierBehind | None = None,
        boundary_rule: BoundaryRule = prompt_boundaries,
    ) -> None:
        if min_computed_tokens < 1:
            raise ValueError(f"min_computed_tokens={min_computed_tokens}: must be 1 or more")
        if retention_interval_tokens is not None and (
            retention_interval_tokens < 0 or retention_interval_tokens % block_tokens
        ):
            raise ValueError(
                f"retention_interval_tokens={retention_interval_tokens}: must be 0, or a multiple of the {block_tokens} "
                "tokens of a block"
            )
        if behind is not None and not host_pages:
            raise ValueError(f"a tier {behind.name!r} behind the host, and no host tier")
        self.block_tokens = block_tokens
        self.min_computed_tokens = min_computed_tokens
        self.retention_interval_tokens = retention_interval_tokens
        self._keys = KeyMaker(block_tokens, secret)
        self._stats = PrefixStats(bytes_budget=bytes_budget)
        tree, host = PrefixTree(epoch), None
        tiers: list[DepthTier] = []
        if host_pages:
            host = HostTier(
                tree,
                pages=host_pages,
                kv_pages=host_kv_pages,
                state_pages=host_state_pages,
                block_tokens=block_tokens,
                eviction=make_eviction_policy(eviction_policy),
                state_share=host_state_share,
                write_through=host_write_through,
                behind=behind,
                stats=self._stats,
            )
            tiers.append(host)
            if behind is not None:
                self._stats.tiers[behind.name] = TierStats()
                tiers.append(behind)
        self._store = PrefixStore(
            tree,
            KVBlocks(kv_blocks),
            SlotPool(state_slots, first_state_slot),
            make_eviction_policy(eviction_policy),
            host,
            self._stats,
        )
        self._requests = RequestBook()
        self._matcher = Matcher(tree, tiers, self._requests.loads, block_tokens=block_tokens)
        self._planner = StepPlanner(
            self._store,
            self._stats,
            block_tokens=block_tokens,
            min_computed_tokens=min_computed_tokens,
            interval_tokens=retention_interval_tokens,
            rule=boundary_rule,
        )
        self.loads = Loads(self._store, self._requests, self._matcher, self._stats, block_tokens=block_tokens)
        self.blocks = BlocksById(self._store, self._requests, self.loads)
        self.inspect = Inspector(self._store, self._requests)

    @property
    def epoch(self) -> int:
        """The present weights epoch."""
        return self._store.tree.epoch

    # -- 1. key, 2. match (read-only) ----------------------------------------------------------------------------------

    def chain(self, tokens: Tokens = (), *, salt: str | None = None, adapter: str | None = None) -> KeyChain:
        """Keys of a prompt under the present weights; make it once, when the request arrives.

        Args:
            tokens: The prompt: int64 in a buffer, or ints.
            salt: Requests with different ones share nothing (``cache_salt``).
            adapter: Name of the adapter it runs with.
        """
        return self._keys.chain(tokens, salt=salt, adapter=adapter, epoch=self.epoch)

    def match(self, chain: KeyChain, *, read: bool = True, max_resume_tokens: int | None = None) -> Match:
        """What of the prompt is cached. Changes nothing; a chain of another weights epoch matches nothing.

        Args:
            chain: Keys of the prompt.
            read: False: the request does not want to reuse anything.
            max_resume_tokens: Computing has to start here at the latest (prompt log-probs are wanted from there on).
        """
        if len(chain.keys) != chain.tokens // self.block_tokens:
            raise ValueError(f"{len(chain.keys)} keys for {chain.tokens} tokens in blocks of {self.block_tokens}")
        limit_tokens = chain.tokens - self.min_computed_tokens
        if max_resume_tokens is not None:
            limit_tokens = min(limit_tokens, max_resume_tokens)
        return self._matcher.match(chain, limit_tokens, read)

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same."""
        return self._matcher.is_current(match)

    # -- 3. admit ------------------------------------------------------------------------------------------------------

    def can_admit(self, match: Match, *, length_tokens: int | None = None) -> bool:
        """Whether `admit` would succeed now. Changes nothing."""
        match = self._matcher.fresh(match)
        own_blocks = self._blocks_for(match, length_tokens)
        own_blocks -= len(match.block_ids)
        unreferenced = self._store.blocks.unreferenced_tail(match.path) if match.load_id is None else 0
        return own_blocks <= self._store.blocks.available_blocks - unreferenced

    def admit(
        self,
        request_id: int,
        match: Match,
        *,
        length_tokens: int | None = None,
        write: bool = True,
        verify_at_tokens: int = 0,
        breakpoints: Sequence[int] = (),
    ) -> Admission | None:
        """Takes all that the request needs, or nothing at all: shared blocks, the source state, own blocks.

        A match that is out of date is made again, at the same limit.

        Args:
            request_id: Of no live request.
            match: From `match`.
            length_tokens: Own blocks are given up to here (the end of the first chunk); by default the whole prompt.
            write: False: nothing that the request computes is cached.
            verify_at_tokens: The state at this boundary is planned even if it is kept already, to be compared.
            breakpoints: Token positions up to which other prompts will share this one, each rounded down to the end of
                a block; out of the prompt's range they mean nothing.

        Returns:
            None when there are not enough KV blocks, evictable ones included.
        """
        waiting = self._requests.live.get(request_id)
        if waiting is not None:
            if not waiting.is_loading:
                raise ValueError(f"request {request_id} is live already")
            if match.load_id is not None:
                return self._admit_loaded(waiting, length_tokens, write, breakpoints)
            self.release(request_id)
        self.loads.drop_swapped_out(request_id)
        store = self._store
        expected, match = match, self._matcher.fresh(match)
        chain, shared = match.chain, len(match.path)
        own_blocks = max(0, self._blocks_for(match, length_tokens) - shared)
        if own_blocks > store.blocks.available_blocks - store.blocks.unreferenced_tail(match.path):
            return None
        if match.resume_tokens < expected.resume_tokens:
            self._stats.count_fallback("stale_match")
        # Held before anything is allocated: allocating may evict, and must not evict what this request shares.
        block_ids = store.blocks.share(match.path)
        if match.source_slot is not None:
            store.slots.pin(match.source_slot)
            store.checkpoints.use(match.path[-1])
        block_ids += store.take_blocks(own_blocks)
        write = write and chain.epoch == self.epoch
        boundaries = self._planner.boundaries(match, breakpoints) if write else ()
        if boundaries and verify_at_tokens:
            boundaries = with_verification(boundaries, verify_at_tokens)
        live = self._requests.live[request_id] = LiveRequest(
            request_id=request_id,
            chain=chain.copy(),
            prompt_tokens=chain.tokens,
            write=write,
            block_ids=block_ids,
            path=list(match.path),
            boundaries=boundaries,
            computed_tokens=match.resume_tokens,
            planned_tokens=match.resume_tokens,
            pinned_slot=match.source_slot,
        )
        self._count_admission(match)
        return Admission(
            request_id=request_id,
            block_ids=tuple(block_ids),
            shared_blocks=shared,
            resume_tokens=match.resume_tokens,
            source_slot=match.source_slot,
            lost_tokens_no_state=match.lost_tokens_no_state,
            boundaries=live.boundaries,
        )

    def grow(self, request_id: int, length_tokens: int) -> list[int] | None:
        """Own blocks so that the request's KV can reach ``length_tokens``.

        Returns:
            The new block ids, maybe none; None (and nothing changed) when there are not enough.
        """
        live = self._requests[request_id]
        count = ceil_div(length_tokens, self.block_tokens) - len(live.block_ids)
        if not self.loads.make_room(count):
            return None
        block_ids = self._store.take_blocks(max(0, count))
        live.block_ids += block_ids
        return block_ids

    # -- 4. plan, 5. (the engine runs), 6. publish ---------------------------------------------------------------------

    def plan(self, request_id: int, start_tokens: int, end_tokens: int) -> StepPlan:
        """The request computes positions [start, end) in this step: where it starts from, what it writes.

        Slots are reserved for the wanted boundaries in (start, end], evicting if need be. Whatever the outcome of the
        forward, the plan has to be handed to `publish` or `abandon`.

        Raises:
            ValueError: The span is empty, or does not go on where the last one ended.
        """
        return self._planner.plan(self._requests[request_id], start_tokens, end_tokens)

    def publish(self, plan: StepPlan) -> None:
        """The plan's forward succeeded: its full blocks and its checkpoints become matchable, its source is unpinned.

        Nothing becomes matchable when the weights changed since admission, or when an earlier step of the request was
        abandoned.
        """
        live = self._requests.owner(plan)
        if live is None:
            return  # the cache was reset meanwhile
        if live.computed_tokens != plan.start_tokens:
            self._settle(live, plan, kept=False)
            return
        live.computed_tokens = plan.end_tokens
        self._store.unpin_source(live)
        self._stats.computed_prompt_tokens += max(0, min(plan.end_tokens, live.prompt_tokens) - plan.start_tokens)
        if live.write:
            self._planner.register(live)
        elif plan.checkpoints:
            self._stats.count_fallback("epoch_changed")
        if live.load is not None:
            self._stats.reused_tokens += live.load.match.resume_tokens
            self._stats.reused_tokens_host += live.load.match.resume_tokens
            self.loads.end(live, kept=live.write)
        self._settle(live, plan, kept=live.write)

    def abandon(self, plan: StepPlan, reason: str = "forward_failed") -> None:
        """The plan's forward failed or did not run: reserved slots are free again, nothing becomes matchable.

        The request stays where it was, and a first forward can be planned again from the same source. A live slot
        that a failed forward may have overwritten is the engine's to judge: release, and admit again.
        """
        live = self._requests.owner(plan)
        if live is not None:
            self._stats.count_fallback(reason)
            self._settle(live, plan, kept=False)

    def fail_load(self, plan: StepPlan) -> None:
        """What the plan's forward started from was not what had been stored: in place of `publish`.

        The entries are not used again. The request has to be released; nothing that it computed is cached.
        """
        live = self._requests.owner(plan)
        if live is None:
            return
        self.loads.fail(live)
        self._settle(live, plan, kept=False)
        self._planner.stop_writing(live)

    def request_checkpoint(self, request_id: int, position_tokens: int) -> bool:
        """Another request waits for the state at this boundary of the request's prompt: keep it when it is reached.

        Returns:
            Whether it can still be had from this request.
        """
        return self._planner.request_checkpoint(self._requests[request_id], position_tokens)

    # -- 7. decode -----------------------------------------------------------------------------------------------------

    def append(self, request_id: int, tokens: Tokens, *, computed_tokens: int | None = None) -> None:
        """The request's sequence goes on with ``tokens`` (sampled and accepted); blocks now full become matchable.

        Call it for every token, or for many at once: it only matters where a block is filled.

        Args:
            request_id: A live request whose prompt is computed.
            tokens: What follows the tokens known so far.
            computed_tokens: Tokens whose KV a finished forward wrote; by default all but the last.
        """
        live = self._requests[request_id]
        if not live.write:
            return
        live.chain.extend(tokens)
        computed = live.chain.tokens - 1 if computed_tokens is None else computed_tokens
        if not live.plans and live.computed_tokens < computed <= live.chain.tokens:
            live.computed_tokens = live.planned_tokens = computed
            self._planner.register(live)

    def checkpoint_decoded(self, request_id: int, position_tokens: int) -> int | None:
        """The request's state is that after ``position_tokens`` tokens, all of them appended: keep it?

        Of the states that a request reaches while it generates, the two latest are kept, and those that another request
        resumed from meanwhile.

        Args:
            request_id: A live request.
            position_tokens: The end of a block.

        Returns:
            The slot that the state has to be copied to before the request's next forward; the state is matchable at
            once. None: it is kept already, or must not or cannot be.
        """
        return self._planner.checkpoint_decoded(self._requests[request_id], position_tokens)

    # -- 8. release, invalidate ---------------------------------------------------------------------------------------------

    def release(self, request_id: int) -> bool:
        """The request is finished, aborted or preempted: all that it holds is let go; what is keyed stays cached.

        With a plan in flight this happens when the last one is settled; the id is free at once.

        Returns:
            Whether there was such a request.
        """
        live = self._requests.live.pop(request_id, None)
        if live is None:
            return False
        live.released = True
        if live.plans:
            self._requests.ending.append(live)
        else:
            self._let_go(live)
        return True

    def release_all(self) -> None:
        """Releases every live request, and the blocks that were given out and not attached."""
        for request_id in list(self._requests.live):
            self.release(request_id)
        for request_id in list(self._requests.swapped_out):
            self.loads.drop_swapped_out(request_id)
        self.blocks.free(self.blocks.unattached)

    def invalidate(self, epoch: int | None = None) -> None:
        """The weights changed: nothing of before is ever matched, and live requests cache nothing more.

        Args:
            epoch: Of the new weights, by default the next number; nothing happens when it is the present one.
        """
        if epoch == self.epoch:
            return
        self.loads.give_up()
        for live in self._requests.everyone():
            live.write = False
            live.path.clear()  # its blocks stay with it, without keys
        self.loads.invalidate()
        self._planner.writing.clear()
        self._store.forget(self.epoch + 1 if epoch is None else epoch)

    def reset(self) -> None:
        """Forgets everything but the counters: requests, plans in flight, blocks, states."""
        self._requests.clear()
        self._planner.writing.clear()
        self.blocks.forget_unattached()
        self._store.reset()

    # -- what is going on ----------------------------------------------------------------------------------------------

    def count_verification(self, mismatch: bool) -> None:
        """A hit was computed and compared."""
        self._stats.verified_hits += 1
        self._stats.verify_mismatches += mismatch

    def stats(self) -> PrefixStats:
        """A snapshot."""
        stats = self._stats.copy()
        stats.slots_total = self._store.slots.total_slots
        stats.slots_used = self._store.slots.used_slots
        host = self._store.host
        if host is not None:
            stats.tiers[HOST].kv_blocks, stats.tiers[HOST].states = host.kv_entries, host.state_entries
        return stats

    def check_integrity(self) -> None:
        """Raises CacheCorruptionError if an invariant does not hold; O(everything), for tests and debugging."""
        check_integrity(
            self._store,
            self._requests,
            unattached=self.blocks.unattached,
            writing=self._planner.writing,
            block_tokens=self.block_tokens,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _settle(self, live: LiveRequest, plan: StepPlan, *, kept: bool) -> None:
        self._planner.settle(live, plan, kept=kept)
        if live.released and not live.plans:
            self._requests.ending.remove(live)
            self._let_go(live)

    def _let_go(self, live: LiveRequest) -> None:
        self.loads.end(live, kept=False)
        self._store.let_go(live)

    def _admit_loaded(
        self, live: LiveRequest, length_tokens: int | None, write: bool, breakpoints: Sequence[int]
    ) -> Admission | None:
        load = live.load
        assert load is not None
        match, held = load.match, len(live.block_ids)
        own_blocks = self._blocks_for(match, length_tokens) - held
        if own_blocks > self._store.blocks.available_blocks:
            return None
        live.block_ids += self._store.take_blocks(max(0, own_blocks))
        live.write = live.write and write
        if live.write:
            wanted = dict(self._planner.boundaries(match, breakpoints))
            wanted |= dict(live.boundaries)  # others asked for them meanwhile
            live.boundaries = tuple(Boundary(position, wanted[position]) for position in sorted(wanted))
        load.admitted = True
        self._count_admission(match)
        return Admission(
            request_id=live.request_id,
            block_ids=tuple(live.block_ids),
            shared_blocks=held,
            resume_tokens=match.resume_tokens,
            source_slot=load.slot,
            lost_tokens_no_state=match.lost_tokens_no_state,
            boundaries=live.boundaries,
            payloads=load.payloads,
        )

    def _count_admission(self, match: Match) -> None:
        self._stats.prompt_tokens += match.chain.tokens
        if match.load_id is None:  # else once it is known that it was right
            self._stats.reused_tokens += match.resume_tokens
            self._stats.reused_tokens_device += match.resume_tokens
        self._stats.lost_tokens_no_state += match.lost_tokens_no_state

    def _blocks_for(self, match: Match, length_tokens: int | None) -> int:
        return ceil_div(match.chain.tokens if length_tokens is None else length_tokens, self.block_tokens)
