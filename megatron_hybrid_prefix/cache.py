"""The prefix cache of a hybrid model. START HERE: the methods are the way of a prompt, top to bottom.

    match -> (load from the host) -> admit -> plan -> (the engine runs the forward) -> publish or abandon
    -> append (decode) -> release

It decides on numbers only: token counts, KV block ids, slot ids. The engine does what it says, and a trace replay
runs this same file without one. It owns the KV blocks (which are free, held, cached) and the checkpoint slots.

Pressure never raises: `admit`, `grow` and `allocate_blocks` return None when even eviction does not help, a checkpoint
without a slot is skipped and counted. ValueError is a caller's mistake, CacheCorruptionError a broken invariant.

Longer than 400 lines because every entry point of the engine is here, in order; half of it is docstrings. What is
cached and how room is made is in `index/store.py`, what is loaded from the host in `index/loads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.integrity import check_integrity
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker, Tokens
from megatron_hybrid_prefix.index.loads import HostLoads
from megatron_hybrid_prefix.index.matcher import Match, match_prefix
from megatron_hybrid_prefix.index.requests import (
    Admission,
    LiveRequest,
    PlannedCheckpoint,
    StepPlan,
)
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import NO_BLOCK, NO_SLOT, Node
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.boundaries import (
    Boundary,
    Reason,
    boundaries_in_span,
    default_interval_tokens,
    prompt_boundaries,
    with_verification,
)
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, make_eviction_policy
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers.units import TransferUnit

# States that a running request keeps of the block ends it reached while it generates. The next turn mostly goes on from the
# latest, and from the one before where the end of an answer comes back changed.
_DECODED_STATES = 2


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
        retention_interval_tokens: Of each prompt the state after every so many tokens is kept, too, where there is room
            for it: a multiple of ``block_tokens``; 0: none; None: chosen by the prompt's length, 16 states at most.
        bytes_budget: Bytes of all checkpoint slots, for the statistics.
        host_pages: Pages of the host tier; 0: there is none.
        host_kv_pages: Pages that a KV block takes there.
        host_state_pages: Pages that a state takes there.
        host_state_share: Part of them that states may take, the rest is for KV; None: by use.
        host_write_through: Whether what is published goes to the host at once, not only when it is evicted.

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
        self.block_tokens = block_tokens
        self.min_computed_tokens = min_computed_tokens
        self.retention_interval_tokens = retention_interval_tokens
        self.epoch = epoch
        self._keys = KeyMaker(block_tokens, secret)
        self._stats = PrefixStats(bytes_budget=bytes_budget)
        self._blocks = KVBlocks(kv_blocks)
        self._slots = SlotPool(state_slots, first_state_slot)
        self._store = PrefixStore(self._blocks, self._slots, make_eviction_policy(eviction_policy), self._stats)
        self._store.epoch = epoch
        self._host: HostTier | None = None
        if host_pages:
            self._host = HostTier(
                self._store.tree,
                pages=host_pages,
                kv_pages=host_kv_pages,
                state_pages=host_state_pages,
                block_tokens=block_tokens,
                eviction=make_eviction_policy(eviction_policy),
                state_share=host_state_share,
                stats=self._stats,
            )
            self._store.host, self._store.write_through = self._host, host_write_through
        self._loads = HostLoads(
            self._host,
            store=self._store,
            blocks=self._blocks,
            slots=self._slots,
            stats=self._stats,
            block_tokens=block_tokens,
        )
        self._live: dict[int, LiveRequest] = {}
        self._in_flight: dict[int, LiveRequest] = {}  # by plan id; outlives a release
        self._writing: set[bytes] = set()  # keys whose state a forward in flight writes
        self._loose: set[int] = set()  # blocks given out to nobody in particular
        self._next_plan_id = 0

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
        return self._match(chain, limit_tokens, read)

    # -- 3. load from the host (optional) ------------------------------------------------------------------------------

    def prepare_load(self, request_id: int, match: Match, *, write: bool = True, leave_blocks: int = 0) -> Match | None:
        """Takes blocks and a slot for what the request could resume from on the host, and queues the moves.

        From now on the request holds them: it has to be handed to `admit`, with the match that is returned, or to
        `release`. What is loaded becomes matchable for others once the request's first forward is published.

        Args:
            request_id: Of no live request.
            match: From `match`.
            write: As for `admit`.
            leave_blocks: So many blocks have to be left for running requests, or they take these back at once.

        Returns:
            The match to go on with; None (and nothing changed) where the host has no more than the device, or where there
            are not enough blocks, or no slot.
        """
        if request_id in self._live:
            return None
        match = self._fresh(match)
        write = write and match.chain.epoch == self.epoch
        return self._hold(self._loads.begin(request_id, match, write=write, leave_blocks=leave_blocks))

    def is_loading(self, request_id: int) -> bool:
        """Whether the request holds a load and is not admitted yet."""
        live = self._live.get(request_id)
        return live is not None and live.is_loading

    def has_retracted(self, request_id: int) -> bool:
        """Whether the request left something with `retract`."""
        return request_id in self._loads.left

    def loads_elsewhere(self, match: Match) -> bool:
        """Whether another request is loading what this one would load."""
        return self._loads.loads_elsewhere(match)

    def has_load(self, load_id: int) -> bool:
        """Whether a request, admitted or not, still needs what this load brings."""
        return load_id in self._loads

    @property
    def has_waiting_loads(self) -> bool:
        """Whether any request holds a load and is not admitted yet."""
        return bool(self._loads.waiting)

    def load_pages(self, request_id: int) -> int:
        """Size of the load that the request holds."""
        load = self._request(request_id).load
        return 0 if load is None else load.pages

    def give_up_loads(self) -> bool:
        """Releases all requests that hold a load and are not admitted; whether there were any."""
        waiting = self._loads.waiting
        for live in waiting:
            self.release(live.request_id)
        return bool(waiting)

    def take_transfers(self) -> list[TransferUnit]:
        """The moves queued since the last call; to be carried out in this order before anything else is written."""
        if self._host is None or not self._host.transfers:
            return []
        units = list(self._host.transfers)
        self._host.transfers.clear()
        return units

    def fail_load(self, plan: StepPlan) -> None:
        """What the plan's forward started from was not what had been stored: in place of `publish`.

        The entries are not used again. The request has to be released; nothing that it computed is cached.
        """
        live = self._in_flight.get(plan.plan_id)
        if live is None:
            return
        self._loads.fail(live)
        self._settle(live, plan, kept=False)
        if live.write:
            for later in live.plans.values():
                self._writing.difference_update(self._planned_keys(live, later))
            live.write = False

    # -- 4. admit ------------------------------------------------------------------------------------------------------

    def can_admit(self, match: Match, *, length_tokens: int | None = None) -> bool:
        """Whether `admit` would succeed now. Changes nothing."""
        match = self._fresh(match)
        own_blocks = self._blocks_for(match.chain.tokens if length_tokens is None else length_tokens)
        own_blocks -= len(match.block_ids)
        unheld = self._blocks.unheld(match.path) if match.load_id is None else 0
        return own_blocks <= self._blocks.available_blocks - unheld

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
        if request_id in self._live:
            if not self.is_loading(request_id):
                raise ValueError(f"request {request_id} is live already")
            if match.load_id is not None:
                return self._admit_loaded(self._live[request_id], length_tokens, write, breakpoints)
            self.release(request_id)
        self._loads.drop(request_id)
        expected, match = match, self._fresh(match)
        chain, shared = match.chain, len(match.path)
        own_blocks = max(0, self._blocks_for(chain.tokens if length_tokens is None else length_tokens) - shared)
        if own_blocks > self._blocks.available_blocks - self._blocks.unheld(match.path):
            return None
        if match.resume_tokens < expected.resume_tokens:
            self._stats.count_fallback("stale_match")
        # Held before anything is allocated: allocating may evict, and must not evict what this request shares.
        block_ids = self._blocks.share(match.path)
        if match.source_slot is not None:
            self._slots.pin(match.source_slot)
            self._store.use_state(match.path[-1])
        block_ids += self._store.take_blocks(own_blocks)
        write = write and chain.epoch == self.epoch
        boundaries = self._boundaries(match, breakpoints) if write and self._slots.total_slots else ()
        if boundaries and verify_at_tokens:
            boundaries = with_verification(boundaries, verify_at_tokens)
        live = self._live[request_id] = LiveRequest(
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
        live = self._request(request_id)
        count = self._blocks_for(length_tokens) - len(live.block_ids)
        if not self._reclaim(count):
            return None
        block_ids = self._store.take_blocks(max(0, count))
        live.block_ids += block_ids
        return block_ids

    # -- 5. plan, 6. (the engine runs), 7. publish ---------------------------------------------------------------------

    def plan(self, request_id: int, start_tokens: int, end_tokens: int) -> StepPlan:
        """The request computes positions [start, end) in this step: where it starts from, what it writes.

        Slots are reserved for the wanted boundaries in (start, end], evicting if need be. Whatever the outcome of the
        forward, the plan has to be handed to `publish` or `abandon`.

        Raises:
            ValueError: The span is empty, or does not go on where the last one ended.
        """
        live = self._request(request_id)
        if start_tokens != live.planned_tokens or end_tokens <= start_tokens:
            raise ValueError(
                f"request {request_id}: span [{start_tokens}, {end_tokens}), next is {live.planned_tokens}"
            )
        plan = StepPlan(
            plan_id=self._next_plan_id,
            request_id=request_id,
            start_tokens=start_tokens,
            end_tokens=end_tokens,
            source_slot=live.source_slot if not live.plans else None,
            checkpoints=self._reserve(live, start_tokens, end_tokens) if live.write else (),
            load_id=live.load.load_id if live.load is not None and not live.plans else None,
        )
        self._next_plan_id += 1
        live.planned_tokens = end_tokens
        live.plans[plan.plan_id] = plan
        self._in_flight[plan.plan_id] = live
        return plan

    def publish(self, plan: StepPlan) -> None:
        """The plan's forward succeeded: its full blocks and its checkpoints become matchable, its source is unpinned.

        Nothing becomes matchable when the weights changed since admission, or when an earlier step of the request was
        abandoned.
        """
        live = self._in_flight.get(plan.plan_id)
        if live is None:
            return  # the cache was reset meanwhile
        if live.computed_tokens != plan.start_tokens:
            self._settle(live, plan, kept=False)
            return
        live.computed_tokens = plan.end_tokens
        self._unpin(live)
        self._stats.computed_prompt_tokens += max(0, min(plan.end_tokens, live.prompt_tokens) - plan.start_tokens)
        if live.write:
            self._register(live)
        elif plan.checkpoints:
            self._stats.count_fallback("epoch_changed")
        if live.load is not None:
            self._stats.reused_tokens += live.load.match.resume_tokens
            self._stats.reused_tokens_host += live.load.match.resume_tokens
            self._loads.end(live, kept=live.write)
        self._settle(live, plan, kept=live.write)

    def abandon(self, plan: StepPlan, reason: str = "forward_failed") -> None:
        """The plan's forward failed or did not run: reserved slots are free again, nothing becomes matchable.

        The request stays where it was, and a first forward can be planned again from the same source. A live slot
        that a failed forward may have overwritten is the engine's to judge: release, and admit again.
        """
        live = self._in_flight.get(plan.plan_id)
        if live is not None:
            self._stats.count_fallback(reason)
            self._settle(live, plan, kept=False)

    def prefilling(self) -> list[int]:
        """Live requests that have prompt tokens left to plan, and cache what they compute, in the order of admission."""
        return [i for i, live in self._live.items() if live.write and live.planned_tokens < live.prompt_tokens]

    def planned_tokens(self, request_id: int) -> int:
        """Up to where a live request's forwards are planned."""
        return self._request(request_id).planned_tokens

    def want(self, request_id: int, position_tokens: int) -> bool:
        """Another request waits for the state at this boundary of the request's prompt: keep it when it is reached.

        Returns:
            Whether it can still be had from this request.
        """
        live = self._request(request_id)
        last_tokens = live.prompt_tokens // self.block_tokens * self.block_tokens
        if not live.write or not self._slots.total_slots or not live.planned_tokens < position_tokens <= last_tokens:
            return False
        others = [boundary for boundary in live.boundaries if boundary.position_tokens != position_tokens]
        live.boundaries = tuple(sorted([*others, Boundary(position_tokens, Reason.JUNCTION)]))
        return True

    # -- 8. decode -----------------------------------------------------------------------------------------------------

    def append(self, request_id: int, tokens: Tokens, *, computed_tokens: int | None = None) -> None:
        """The request's sequence goes on with ``tokens`` (sampled and accepted); blocks now full become matchable.

        Call it for every token, or for many at once: it only matters where a block is filled.

        Args:
            request_id: A live request whose prompt is computed.
            tokens: What follows the tokens known so far.
            computed_tokens: Tokens whose KV a finished forward wrote; by default all but the last.
        """
        live = self._request(request_id)
        if not live.write:
            return
        live.chain.extend(tokens)
        computed = live.chain.tokens - 1 if computed_tokens is None else computed_tokens
        if not live.plans and live.computed_tokens < computed <= live.chain.tokens:
            live.computed_tokens = live.planned_tokens = computed
            self._register(live)

    def reached(self, request_id: int, position_tokens: int) -> int | None:
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
        live = self._request(request_id)
        depth_blocks = position_tokens // self.block_tokens
        if not live.write or not self._slots.total_slots or depth_blocks > len(live.path):
            return None
        node = live.path[depth_blocks - 1]
        if node.slot != NO_SLOT:
            if node.reason == Reason.INTERVAL:
                self._store.confirm_state(node.key, Reason.DECODE)
            return None
        if len(live.decoded) >= _DECODED_STATES:
            self._store.drop_decoded(*live.decoded.pop(0))
        slot = self._store.take_slot()
        if slot is None:
            self._stats.checkpoints_skipped += 1
            return None
        self._store.publish_state(node, slot, Reason.DECODE)
        live.decoded.append((node, slot))
        return slot

    # -- 9. release, evict ---------------------------------------------------------------------------------------------

    def release(self, request_id: int) -> bool:
        """The request is finished, aborted or preempted: all that it holds is let go; what is keyed stays cached.

        With a plan in flight this happens when the last one is settled; the id is free at once.

        Returns:
            Whether there was such a request.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        live.released = True
        if not live.plans:
            self._let_go(live)
        return True

    def release_all(self) -> None:
        """Releases every live request, and the blocks that were given out to nobody in particular."""
        for request_id in list(self._live):
            self.release(request_id)
        for request_id in list(self._loads.left):
            self._loads.drop(request_id)
        self.free_blocks(list(self._loose))

    def retract(self, request_id: int, depth_tokens: int, live_slot: int) -> bool:
        """The request is about to be released, to go on later: what it has computed is kept on the host until then.

        Args:
            request_id: A live request.
            depth_tokens: Tokens that it has computed.
            live_slot: Where the state after them is.

        Returns:
            Whether there was room for all of it; otherwise nothing changed.
        """
        return self._loads.leave(self._request(request_id), depth_tokens, live_slot)

    def prepare_resume(
        self, request_id: int, match: Match, *, write: bool = True, leave_blocks: int = 0
    ) -> Match | None:
        """`prepare_load` for a request that left something with `retract`: it goes on where it was.

        Returns:
            As `prepare_load`. What it left is dropped if it does not belong to the prompt of ``match``.
        """
        if request_id in self._live or request_id not in self._loads.left:
            return None
        match = self._fresh(match)
        write = write and match.chain.epoch == self.epoch
        return self._hold(self._loads.begin_resume(request_id, match, write=write, leave_blocks=leave_blocks))

    def drop_retracted(self, request_id: int) -> None:
        """What the request left with `retract`, if anything, is not needed any more."""
        self._loads.drop(request_id)

    def invalidate(self, epoch: int | None = None) -> None:
        """The weights changed: nothing of before is ever matched, and live requests cache nothing more.

        Args:
            epoch: Of the new weights, by default the next number; nothing happens when it is the present one.
        """
        if epoch == self.epoch:
            return
        self.epoch = self._store.epoch = self.epoch + 1 if epoch is None else epoch
        self.give_up_loads()
        requests = self._all_requests()
        for live in requests:
            live.write = False
            live.path.clear()  # its blocks stay with it, without keys
        self._loads.invalidate(requests)
        self._writing.clear()
        self._store.forget()

    def reset(self) -> None:
        """Forgets everything but the counters: requests, plans in flight, blocks, states."""
        for live in self._all_requests():
            live.plans.clear()
        self._live.clear()
        self._loads.reset()
        self._in_flight.clear()
        self._writing.clear()
        self._loose.clear()
        self._store.reset()

    # -- KV blocks by id, for megatron's allocator, which does not say for whom -----------------------------------------

    def allocate_blocks(self, count: int) -> list[int] | None:
        """Blocks for the caller, to be attached to a request or freed; None when there are not enough."""
        if not self._reclaim(count):
            return None
        block_ids = self._store.take_blocks(count)
        self._loose.update(block_ids)
        return block_ids

    def attach_blocks(self, request_id: int, block_ids: Iterable[int]) -> None:
        """Blocks from `allocate_blocks` become the next blocks of a request."""
        live = self._request(request_id)
        for block_id in block_ids:
            if block_id not in self._loose:
                raise CacheCorruptionError(f"block {block_id} was not given out, or belongs to a request already")
            self._loose.remove(block_id)
            live.block_ids.append(block_id)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Gives back blocks that were not attached, or the last, unkeyed block of a request (a rewind). Free at once."""
        for block_id in block_ids:
            if block_id in self._loose:
                self._loose.remove(block_id)
            else:
                self._cut_last_block(block_id)
            self._blocks.release((block_id,))

    @property
    def available_blocks(self) -> int:
        """KV blocks that running requests can have now: free ones, cached ones that nobody holds, those of loads."""
        return self._blocks.available_blocks + self._loads.waiting_blocks

    @property
    def free_kv_blocks(self) -> int:
        """KV blocks that hold nothing."""
        return self._blocks.free_blocks

    @property
    def cached_blocks(self) -> int:
        """KV blocks that a prompt can match, held or not."""
        return self._blocks.keyed_blocks

    def cached_block(self, key: bytes) -> int | None:
        """Id of the block with this key, if it is cached on the device."""
        node = self._store.tree.get(key)
        return None if node is None or node.block_id == NO_BLOCK else node.block_id

    def cached_slot(self, key: bytes) -> int | None:
        """Slot of the state kept at the end of the block with this key, if there is one."""
        node = self._store.tree.get(key)
        return None if node is None or node.slot == NO_SLOT else node.slot

    def count_verification(self, mismatch: bool) -> None:
        """A hit was computed and compared."""
        self._stats.verified_hits += 1
        self._stats.verify_mismatches += mismatch

    def nodes(self) -> Iterator[Node]:
        """All nodes of the prefix tree, in any order; for tools."""
        return iter(self._store.tree)

    @property
    def host_tier(self) -> HostTier | None:
        """What is on the host; for tools."""
        return self._host

    def cached_keys(self) -> Iterator[bytes]:
        """Keys of all cached blocks, in any order."""
        return (node.key for node in self._store.tree if node.block_id != NO_BLOCK)

    def block_holders(self, block_id: int) -> int:
        """How many live requests hold a KV block."""
        return self._blocks.holders(block_id)

    def holder_counts(self) -> bytes:
        """The same for all blocks, as int32 in native order."""
        return self._blocks.holder_counts()

    def keep_payloads(self, payload_of: Callable[[int], Any]) -> None:
        """What ``payload_of`` says of a KV block moves with it to the host, and back (`Admission.payloads`)."""
        if self._host is not None:
            self._host.payload_of = payload_of

    # -- what is going on ----------------------------------------------------------------------------------------------

    def is_live(self, request_id: int) -> bool:
        """Whether the request is admitted and not released."""
        return request_id in self._live and not self.is_loading(request_id)

    def live_requests(self) -> list[int]:
        """Ids of the requests that are admitted and not released."""
        return [request_id for request_id in self._live if not self.is_loading(request_id)]

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same."""
        if match.load_id is not None:
            return match.load_id in self._loads
        return match.version == self._store.tree.version and match.prompt_tokens == match.chain.tokens

    def block_ids(self, request_id: int) -> tuple[int, ...]:
        """KV blocks of a live request, front first."""
        return tuple(self._request(request_id).block_ids)

    def sequence_tokens(self, request_id: int) -> int:
        """Tokens of a live request that the cache knows: its prompt, and what was appended."""
        return self._request(request_id).chain.tokens

    def request_keys(self, request_id: int) -> tuple[bytes, ...]:
        """Keys of a live request's full blocks, front first."""
        return tuple(self._request(request_id).chain.keys)

    def stats(self) -> PrefixStats:
        """A snapshot."""
        stats = self._stats.copy()
        stats.slots_total = self._slots.total_slots
        stats.slots_used = self._slots.used_slots
        if self._host is not None:
            stats.host_kv_blocks, stats.host_states = self._host.kv_entries, self._host.state_entries
        return stats

    def check_integrity(self) -> None:
        """Raises CacheCorruptionError if an invariant does not hold; O(everything), for tests and debugging."""
        check_integrity(
            tree=self._store.tree,
            blocks=self._blocks,
            slots=self._slots,
            ranked_states=list(self._store.eviction),
            requests=self._all_requests(),
            loose_blocks=self._loose,
            writing=self._writing,
            block_tokens=self.block_tokens,
            epoch=self.epoch,
            host=self._host,
            retracted=list(self._loads.left.values()),
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _match(self, chain: KeyChain, limit_tokens: int, read: bool) -> Match:
        read = read and chain.epoch == self.epoch
        return match_prefix(
            self._store.tree, chain, block_tokens=self.block_tokens, limit_tokens=limit_tokens, read=read
        )

    def _fresh(self, match: Match) -> Match:
        if self.is_current(match):
            return match
        return self._match(match.chain, match.limit_tokens, match.read)

    def _reclaim(self, count: int) -> bool:
        """Whether running requests can have so many blocks; waiting ones give up loads for them, the latest first."""
        if count > self._blocks.available_blocks:
            waiting = self._loads.waiting
            if not waiting or count > self.available_blocks:
                return False
            while waiting and count > self._blocks.available_blocks:
                self.release(waiting.pop().request_id)
        return True

    def _hold(self, live: LiveRequest | None) -> Match | None:
        if live is None:
            return None
        assert live.load is not None
        self._live[live.request_id] = live
        return live.load.match

    def _admit_loaded(
        self, live: LiveRequest, length_tokens: int | None, write: bool, breakpoints: Sequence[int]
    ) -> Admission | None:
        load = live.load
        assert load is not None
        match, held = load.match, len(live.block_ids)
        own_blocks = self._blocks_for(live.prompt_tokens if length_tokens is None else length_tokens) - held
        if own_blocks > self._blocks.available_blocks:
            return None
        live.block_ids += self._store.take_blocks(max(0, own_blocks))
        live.write = live.write and write
        if live.write and self._slots.total_slots:
            wanted = {position: reason for position, reason in self._boundaries(match, breakpoints)}
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

    def _boundaries(self, match: Match, breakpoints: Sequence[int]) -> tuple[Boundary, ...]:
        interval_tokens = self.retention_interval_tokens
        if interval_tokens is None:
            interval_tokens = default_interval_tokens(match.chain.tokens, self.block_tokens)
        return prompt_boundaries(
            prompt_tokens=match.chain.tokens,
            block_tokens=self.block_tokens,
            resume_tokens=match.resume_tokens,
            kv_depth_blocks=match.kv_depth_blocks,
            min_computed_tokens=self.min_computed_tokens,
            breakpoints=breakpoints,
            interval_tokens=interval_tokens,
        )

    def _reserve(self, live: LiveRequest, start_tokens: int, end_tokens: int) -> tuple[PlannedCheckpoint, ...]:
        """Slots for the boundaries that the span reaches, the most wanted first while there are any."""
        planned: list[PlannedCheckpoint] = []
        keys = live.chain.keys
        wanted = sorted(
            boundaries_in_span(live.boundaries, start_tokens, end_tokens), key=lambda boundary: boundary.reason
        )
        for position_tokens, reason in wanted:
            if reason != Reason.INTERVAL:
                self._store.confirm_state(keys[position_tokens // self.block_tokens - 1], reason)
        room_for_guesses = True
        for position_tokens, reason in wanted:
            key = keys[position_tokens // self.block_tokens - 1]
            if key in self._writing or (reason != Reason.VERIFY and self._store.has_state(key)):
                continue  # another forward of this step is writing it, or it is kept already
            if reason == Reason.INTERVAL:
                slot = self._store.take_spare_slot(live.path) if room_for_guesses else None
                room_for_guesses = slot is not None
            else:
                slot = self._store.take_slot()
                self._stats.checkpoints_skipped += slot is None
            if slot is None:
                continue
            self._writing.add(key)
            planned.append(PlannedCheckpoint(position_tokens=position_tokens, slot=slot, reason=reason))
        planned.sort(key=lambda checkpoint: checkpoint.position_tokens)
        return tuple(planned)

    def _register(self, live: LiveRequest) -> None:
        full_blocks = min(live.computed_tokens // self.block_tokens, len(live.chain.keys), len(live.block_ids))
        self._store.register(live, full_blocks)

    def _settle(self, live: LiveRequest, plan: StepPlan, *, kept: bool) -> None:
        """The plan is over: its states are published if they shall be ``kept``, else their slots are free."""
        if live.write:  # else the weights changed, and the key may mean another forward
            self._writing.difference_update(self._planned_keys(live, plan))
        for checkpoint in plan.checkpoints:
            depth_blocks = checkpoint.position_tokens // self.block_tokens
            node = live.path[depth_blocks - 1] if kept and depth_blocks <= len(live.path) else None
            if node is not None and node.slot == NO_SLOT:
                self._store.publish_state(node, checkpoint.slot, checkpoint.reason)
            else:
                self._slots.abandon(checkpoint.slot)
        del live.plans[plan.plan_id]
        del self._in_flight[plan.plan_id]
        if not live.plans:
            live.planned_tokens = live.computed_tokens
            if live.released:
                self._let_go(live)

    def _planned_keys(self, live: LiveRequest, plan: StepPlan) -> list[bytes]:
        return [live.chain.keys[checkpoint.position_tokens // self.block_tokens - 1] for checkpoint in plan.checkpoints]

    def _let_go(self, live: LiveRequest) -> None:
        self._unpin(live)
        self._loads.end(live, kept=False)
        self._blocks.release(live.block_ids, live.path)

    def _unpin(self, live: LiveRequest) -> None:
        if live.pinned_slot is not None:
            self._slots.unpin(live.pinned_slot)
            live.pinned_slot = None

    def _cut_last_block(self, block_id: int) -> None:
        # Only a rewind of speculative tokens over a block's edge, so a walk over the live requests will do.
        for live in self._live.values():
            if len(live.block_ids) > len(live.path) and live.block_ids[-1] == block_id:
                live.block_ids.pop()
                return
        raise CacheCorruptionError(f"block {block_id} is neither unattached nor the last block of a request")

    def _request(self, request_id: int) -> LiveRequest:
        live = self._live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not live")
        return live

    def _all_requests(self) -> list[LiveRequest]:
        """Live ones, and released ones with a plan in flight."""
        released = {id(live): live for live in self._in_flight.values() if live.released}
        return [*self._live.values(), *released.values()]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
