"""Records of requests: what the cache keeps of a live request, and what it returns to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_hybrid_prefix.index.hints import NO_HINTS, Hints
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import Node, Session
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason
from megatron_hybrid_prefix.requests.matcher import Match, Reuse
from megatron_hybrid_prefix.tiers.host import HostEntry
from megatron_hybrid_prefix.tiers.units import LoadState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadSource:
    """Where a request can resume from with a load. A preempted one resumes from what it left on the host.

    Attributes:
        keys: Keys of its first blocks that are in the prefix tree, or in a tier.
        depth_tokens: Tokens up to the state.
        pinned: Of a preempted request: the entries of the KV of these blocks, which stay.
        private: Of a preempted request: entries that nobody else has. KV (the last block may be partly filled), then the state.
    """

    keys: Sequence[bytes]
    depth_tokens: int
    pinned: tuple[HostEntry, ...] = ()
    private: tuple[HostEntry, ...] = ()

    def as_match(self, match: Match, slot: int) -> Match:
        """The match of a request that loads the state into ``slot``."""
        reuse, depth = match.reuse, self.depth_tokens
        lost = NotReused.STATES_GONE if depth < reuse.kv_tokens else NotReused.KV_GONE
        return replace(
            match,
            resume_tokens=depth,
            source_slot=slot,
            loadable_blocks=0,
            reuse=replace(reuse, reason=lost if depth < reuse.seen_tokens else None, resume_tokens=depth),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """KV and a state that come back from the host for one request; or that the tier behind brings to it, a *fetch*.

    All of it is the same on all ranks. The `Mover` knows the copies of a load by its number.

    Attributes:
        load_id: Its number.
        request_id: The request.
        state: How far it is, or why it failed.
        depth_tokens: Tokens up to the state.
        pinned: Host entries of the prefix tree that stay until it ends, KV from the front.
        private: See `LoadSource`; dropped when it ends.
        coming: Those of ``pinned`` that are being read from the tier below.
        slot: Slot on the device that the state goes to; below 0: none, it is a fetch.
    """

    load_id: int
    request_id: int
    state: LoadState
    depth_tokens: int
    pinned: tuple[HostEntry, ...]
    private: tuple[HostEntry, ...] = ()
    coming: tuple[HostEntry, ...] = ()
    slot: int = -1

    def __repr__(self) -> str:
        return f"Load({self.load_id} of request {self.request_id}: {self.state})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The result of admitting a request.

    Attributes:
        block_ids: Its KV blocks, front first.
        shared_blocks: Number of leading blocks whose KV is cached; the others are new.
        stored_tokens: KV before this position is cached. The forwards that compute tokens before it must not write
            their KV. At least ``resume_tokens``.
        resume_tokens: Prompt tokens skipped. The first forward starts at this position.
        source_slot: Slot of the state to start from, pinned until the first forward is published. None: start from
            zero.
        reuse: See `Match`.
        load: What is on its way to its blocks and its source slot; None: nothing is loaded.
        boundaries: Positions of the prompt that get a checkpoint.
        live_slot: Slot of the request's own state until it is released. None: the engine has slots of its own for running
            requests.
    """

    block_ids: tuple[int, ...]
    shared_blocks: int
    stored_tokens: int
    resume_tokens: int
    source_slot: int | None
    reuse: Reuse
    boundaries: tuple[Boundary, ...]
    load: Load | None = None
    live_slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Blocks that a live request got.

    Attributes:
        shared: Cached KV blocks, which come first.
        own: New KV blocks.
        stored_tokens: See `Admission`.
    """

    shared: list[int]
    own: list[int]
    stored_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheckpoint:
    """A planned write: the forward writes the state after ``position_tokens`` tokens to ``slot``."""

    position_tokens: int
    slot: int
    reason: CheckpointReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One request's part of a step. It ends with ``publish``, ``abandon`` or ``fail_load``.

    Attributes:
        request_id: The request.
        start_tokens: The step computes positions [start, end).
        end_tokens: See above.
        source_slot: Checkpoint slot to read the state at ``start_tokens`` from. None: read the request's live slot, or
            start from zero if ``start_tokens`` is 0.
        checkpoints: States to write, ascending by position, each in (start, end].
        load: The load that the forward starts from; None if it needs none.
    """

    request_id: int
    start_tokens: int
    end_tokens: int
    source_slot: int | None
    checkpoints: tuple[PlannedCheckpoint, ...]
    load: Load | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """A request between admission and release.

    Attributes:
        request_id: Given by the engine. Another request may use it after this one is released.
        chain: Keys of its tokens so far; a private copy.
        prompt_tokens: Length of its prompt.
        write: Whether what it computes may be cached. Stays False once the weights changed.
        block_ids: KV blocks it holds, front first.
        path: Nodes of its first blocks, shared and registered ones.
        boundaries: Positions of the prompt that get a checkpoint.
        computed_tokens: Tokens whose KV and state exist, including reused ones.
        planned_tokens: ``computed_tokens`` once all planned forwards are published.
        stored_tokens: See `Admission`.
        read: Whether it may reuse the cache.
        pinned_slot: Checkpoint slot that its first forward reads; None after that.
        decoded: Its latest decode states, oldest first: node of each, and the state's number (`DeviceTier.bound`).
        written: Nodes whose states its latest forward published.
        plans: Its plans in flight, oldest first.
        load: Its load from the host, until the first forward is settled.
        live_slot: Slot of its own state once it is admitted; None if the engine has slots of its own.
        uncounted: The match with which it is admitted, until its first forward is published and counted.
        counted_tokens: Tokens that were counted before: it was preempted, or started over.
        session: Its session; None: it has none.
        hints: What its caller knows of the future.
    """

    request_id: int
    chain: KeyChain
    prompt_tokens: int
    write: bool
    block_ids: list[int]
    path: list[Node]
    computed_tokens: int
    planned_tokens: int
    stored_tokens: int
    read: bool
    pinned_slot: int | None
    boundaries: tuple[Boundary, ...] = ()
    decoded: list[tuple[Node, int]] = field(default_factory=list)
    written: list[Node] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    load: Load | None = None
    live_slot: int | None = None
    uncounted: Match | None = None
    counted_tokens: int = 0
    session: Session | None = None
    hints: Hints = NO_HINTS


def is_prefilling(live: LiveRequest) -> bool:
    """Whether the request has prompt tokens left to plan, and caches what it computes."""
    return live.write and live.planned_tokens < live.prompt_tokens


class RequestBook:
    """All requests that the cache knows.

    Attributes:
        live: Live requests by id, in the order of admission.
        ending: Released requests with a plan in flight, until the last one is settled. Their ids may be reused already.
        fetches: What the tier behind the host brings to it for waiting requests, by request id.
        swapped_out: What preempted requests keep on the host, by request id, while they do not load it.
    """

    def __init__(self) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.ending: list[LiveRequest] = []
        self.fetches: dict[int, Load] = {}
        self.swapped_out: dict[int, LoadSource] = {}

    def __getitem__(self, request_id: int) -> LiveRequest:
        """The live request. Raises ValueError if there is none with this id."""
        live = self.live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not live")
        return live

    def owner(self, plan: StepPlan) -> LiveRequest | None:
        """The request that the plan belongs to; None if the cache was reset since."""
        live = self.live.get(plan.request_id)
        if live is not None and plan in live.plans:
            return live
        return next((ended for ended in self.ending if plan in ended.plans), None)

    def everyone(self) -> list[LiveRequest]:
        """Live requests, and released ones with a plan in flight."""
        return [*self.live.values(), *self.ending]

    def loads(self) -> list[Load]:
        """Loads and fetches that have not ended."""
        return [*(live.load for live in self.everyone() if live.load is not None), *self.fetches.values()]

    def clear(self) -> None:
        """Forgets all requests and their plans."""
        for live in self.everyone():
            live.plans.clear()
        for load in self.loads():
            load.state = LoadState.GIVEN_UP
        self.live.clear()
        self.ending.clear()
        self.fetches.clear()
        self.swapped_out.clear()
