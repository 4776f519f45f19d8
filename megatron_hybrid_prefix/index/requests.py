"""What the cache remembers of a live request, and what it tells the engine about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.matcher import Match
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason
from megatron_hybrid_prefix.tiers.units import Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request was admitted.

    Attributes:
        request_id: Whose.
        block_ids: Its KV blocks, front first: shared ones, then its own. Own blocks start at ``resume_tokens``.
        shared_blocks: How many of them are shared; they must not be written.
        resume_tokens: Prompt tokens skipped; computing starts at this position.
        source_slot: Slot of the state to start from, pinned until the first forward is published; None: from zero.
        lost_tokens_no_state: See Match.
        payloads: Of each KV block that was loaded, what belongs to it beside the KV, or None.
        boundaries: Positions of the prompt that shall be kept.
    """

    request_id: int
    block_ids: tuple[int, ...]
    shared_blocks: int
    resume_tokens: int
    source_slot: int | None
    lost_tokens_no_state: int
    boundaries: tuple[Boundary, ...]
    payloads: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """What a preempted request left on the host, to go on from.

    Attributes:
        depth_tokens: Tokens that it had computed.
        path: Nodes of its first blocks.
        pinned: Their entries.
        kv_entries: Its further blocks, the last one filled in part.
        state_entry: Its state.
    """

    depth_tokens: int
    path: tuple[Node, ...]
    pinned: tuple[int, ...]
    kv_entries: tuple[int, ...]
    state_entry: int

    @property
    def private(self) -> tuple[int, ...]:
        """Entries that are nobody else's."""
        return (*self.kv_entries, self.state_entry)


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """What a request gets from the host before it starts.

    Attributes:
        load_id: Unique.
        pinned: Entries on the host that stay until the load is settled.
        slot: Reserved, for the state to start from.
        left: What a preempted request goes on from; None where it is a state of the prefix tree, to be published there.
        pages: Size of all moves.
        match: What the request has been promised.
        payloads: Of each block, what belongs to it beside the KV, or None.
        fetched: What came from the tier behind the host.
        admitted: Whether the request was admitted since.
    """

    load_id: int
    pinned: tuple[int, ...]
    slot: int
    left: SwappedOut | None
    pages: int
    match: Match
    payloads: dict[int, Any]
    fetched: tuple[Tag, ...] = ()
    admitted: bool = False

    @property
    def private(self) -> tuple[int, ...]:
        """Entries that go with it."""
        return () if self.left is None else self.left.private


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheckpoint:
    """The state after ``position_tokens`` tokens shall be written to ``slot`` by the coming forward."""

    position_tokens: int
    slot: int
    reason: CheckpointReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One request's part in a step; ends with ``publish`` or ``abandon``.

    Attributes:
        plan_id: Unique.
        request_id: Whose.
        start_tokens: The step computes positions [start, end).
        end_tokens: As above.
        source_slot: Checkpoint to read the state at ``start_tokens`` from. None: from the request's live slot, or
            from zero where ``start_tokens`` is 0.
        checkpoints: States to write, ascending by position, each in (start, end].
        load_id: Of the load from the host that the forward starts from; None for all others.
    """

    plan_id: int
    request_id: int
    start_tokens: int
    end_tokens: int
    source_slot: int | None
    checkpoints: tuple[PlannedCheckpoint, ...]
    load_id: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """A request between admission and release.

    Attributes:
        request_id: Given by the engine; free for another request once this one is released.
        chain: Keys of its tokens so far, a copy of its own.
        prompt_tokens: Length of its prompt.
        write: Whether what it computes may be cached; False for good once the weights changed.
        block_ids: KV blocks it holds, front first.
        path: Nodes of its first blocks; for shared and for registered blocks alike.
        boundaries: Positions of the prompt to keep.
        computed_tokens: Tokens whose KV and state exist, reused ones included.
        planned_tokens: The same, once the forwards in flight succeed.
        pinned_slot: Checkpoint its first forward reads; None once that is done.
        decoded: Nodes whose state it reached while it generated, with the slot of each, oldest first; the latest ones.
        plans: Its plans in flight.
        released: Given up by the engine while a plan was in flight; goes when the last plan is settled.
        load: What it gets from the host, until its first forward is settled.
    """

    request_id: int
    chain: KeyChain
    prompt_tokens: int
    write: bool
    block_ids: list[int]
    path: list[Node]
    boundaries: tuple[Boundary, ...]
    computed_tokens: int
    planned_tokens: int
    pinned_slot: int | None
    decoded: list[tuple[Node, int]] = field(default_factory=list)
    plans: dict[int, StepPlan] = field(default_factory=dict)
    released: bool = False
    load: Load | None = None

    @property
    def is_loading(self) -> bool:
        """Whether it holds a load and is not admitted yet."""
        return self.load is not None and not self.load.admitted

    @property
    def source_slot(self) -> int | None:
        """Slot of the state that its first forward starts from: pinned, or loaded for it; None: from zero."""
        return self.pinned_slot if self.load is None else self.load.slot


class RequestBook:
    """Every request that the cache knows. What belongs to one is in its `LiveRequest`, or in what it swapped out.

    Attributes:
        live: By id, from admission, or from the beginning of its load, to release; in the order in which they came.
        ending: Released ones with a plan in flight; their ids may be others' by now.
        loads: The request of each load that is not settled, by load id.
        swapped_out: What preempted requests left on the host, by id.
    """

    def __init__(self) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.ending: list[LiveRequest] = []
        self.loads: dict[int, LiveRequest] = {}
        self.swapped_out: dict[int, SwappedOut] = {}

    def __getitem__(self, request_id: int) -> LiveRequest:
        """The live request.

        Raises:
            ValueError: There is none with this id.
        """
        live = self.live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not live")
        return live

    def owner(self, plan: StepPlan) -> LiveRequest | None:
        """The request whose plan this is; None when the cache was reset since."""
        live = self.live.get(plan.request_id)
        if live is not None and plan.plan_id in live.plans:
            return live
        return next((ended for ended in self.ending if plan.plan_id in ended.plans), None)

    def everyone(self) -> list[LiveRequest]:
        """Live requests, and released ones with a plan in flight."""
        return [*self.live.values(), *self.ending]

    def is_admitted(self, request_id: int) -> bool:
        """Whether the request is live and does not wait for a load."""
        live = self.live.get(request_id)
        return live is not None and not live.is_loading

    def clear(self) -> None:
        """Forgets all requests, and their plans."""
        for live in self.everyone():
            live.plans.clear()
        self.live.clear()
        self.ending.clear()
        self.loads.clear()
        self.swapped_out.clear()
