"""What a rule that knows all requests beforehand reuses: a bound for every rule, and an offline rule close to it.

KV is unlimited. Between two requests at most ``slots`` states are kept. A request resumes from one of them, at a full block
of its prompt. It may keep any states that it computes.

*The bound.* Suppose that request t resumes after the first d blocks of its prompt, and that s is the last request before t
with the same d blocks. No request between them computes that state. So the state is in a slot in every gap between two
requests from s to t. This is a *use*: the gaps from s to t, and d blocks of profit. Whatever a rule does, its uses are at
most one for each request, and at most ``slots`` in each gap. The bound is the most profit that uses with these two
properties have. It is found exactly, as a flow of ``slots`` units through time. In each gap a unit waits or holds a state::

    request 0 ------> request 1 ------> request 2 ------> request 3      a slot that waits
        \\                                   \\                ^
         \\-----------------------------------+--> use(3) ----/          it holds the state of a use, of one use per request

Only one condition is left out: at s the state must be kept already, or s must compute it because it resumes before it. So
the best rule may reuse less than the bound, and no rule reuses more.

*The offline rule.* It carries out the flow: after each request it keeps the states whose use goes on, of those that are
kept already or that the request has computed. If s will not compute the state of a use, the state is kept from the
request before s that had it, if a slot is free until s. What it reuses is counted request by request, with the slots
that the cache has: the state that a request resumes from stays in its slot until the request is done. So the best rule
reuses at least as much.

Each slot of the bound costs O(uses + requests), and each different gain of a slot O(uses log requests). A request has few
uses: one for each earlier request at which its prompt parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest

_NEVER = 1 << 60  # more than any capacity or distance


class Use(NamedTuple):
    """A way to resume a request: the state after its first ``blocks`` blocks, kept from request ``since`` on."""

    since: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clairvoyant:
    """Prompt tokens that rules which know all requests reuse.

    Attributes:
        slots: State slots.
        bound_tokens: No rule reuses more.
        rule_tokens: The offline rule reuses so many. So the best rule is between both.
    """

    slots: int
    bound_tokens: int
    rule_tokens: int


def clairvoyant(
    trace: Trace, slots: Iterable[int], on_slot: Callable[[int], None] = lambda done: None
) -> list[Clairvoyant]:
    """The bound and the offline rule for several numbers of slots.

    Args:
        trace: Recorded requests.
        slots: Numbers of state slots.
        on_slot: Called after each slot of the bound. May raise to stop.

    Returns:
        The results, by ascending number of slots.
    """
    flow = _Flow(all_uses(trace))
    found = []
    for count in sorted(slots):
        while flow.slots < count and flow.add_slot():
            on_slot(flow.slots)
        blocks = follow(trace, flow.chosen(), count)
        found.append(
            Clairvoyant(
                slots=count,
                bound_tokens=flow.profit_blocks * trace.block_tokens,
                rule_tokens=blocks * trace.block_tokens,
            )
        )
    return found


def usable_blocks(request: TraceRequest, block_tokens: int) -> int:
    """Blocks that a request can skip at most: it computes its last token."""
    return min(len(request.keys), (request.prompt_tokens - 1) // block_tokens)


def all_uses(trace: Trace) -> list[list[Use]]:
    """The uses of each request that may pay: of uses that begin at the same request, only the deepest one."""
    last: dict[bytes, int] = {}
    found = []
    for number, request in enumerate(trace.requests):
        uses: list[Use] = []
        for blocks, key in enumerate(request.keys[: usable_blocks(request, trace.block_tokens)], 1):
            since = last.get(key)
            if since is None:
                break
            if uses and uses[-1].since == since:
                uses.pop()
            uses.append(Use(since, blocks))
        found.append(uses)
        for key in request.keys:
            last[key] = number
    return found


class _Flow:
    """The most profitable uses, for one slot after the other (successive shortest paths).

    The graph has a node for each request's time, with edges from one to the next, and a node for each request's use. Edges
    come in pairs: ``edge ^ 1`` is the way back. A cost is a profit in blocks, negated.

    Args:
        uses: See `all_uses`.

    Attributes:
        slots: Slots so far.
        profit_blocks: Their profit.
    """

    def __init__(self, uses: Sequence[Sequence[Use]]) -> None:
        self._requests = len(uses)
        self._heads: list[int] = []
        self._room: list[int] = []
        self._costs: list[int] = []
        self._edges: list[list[int]] = [[] for _ in range(2 * self._requests)]
        self._use_of: dict[int, tuple[int, Use]] = {}
        self.slots = self.profit_blocks = 0
        for number in range(1, self._requests):
            self._connect(number - 1, number, _NEVER)
        for number, of_request in enumerate(uses):
            node = self._requests + number
            for use in of_request:
                self._use_of[self._connect(use.since, node, 1, -use.blocks)] = number, use
            self._connect(node, number, 1)
        # The least cost from the first request to each node. All edges lead to later times, so one pass finds it.
        self._distances = [0] + [_NEVER] * (2 * self._requests - 1)
        for number in range(self._requests):
            for node in (self._requests + number, number):
                for edge in self._edges[node]:
                    if self._room[edge] and self._distances[node] < _NEVER:
                        head = self._heads[edge]
                        self._distances[head] = min(self._distances[head], self._distances[node] + self._costs[edge])

    def add_slot(self) -> bool:
        """Uses one slot more. False: one more gains nothing."""
        while self._distances[self._requests - 1] < 0:
            if self._send():
                self.slots += 1
                self.profit_blocks -= self._distances[self._requests - 1]
                return True
            self._update_distances()
        return False

    def chosen(self) -> list[Use | None]:
        """The use of each request; None: it has none."""
        found: list[Use | None] = [None] * self._requests
        for edge, (number, use) in self._use_of.items():
            if not self._room[edge]:
                found[number] = use
        return found

    def _connect(self, tail: int, head: int, room: int, cost: int = 0) -> int:
        edge = len(self._heads)
        for node, target, capacity, price in ((tail, head, room, cost), (head, tail, 0, -cost)):
            self._edges[node].append(len(self._heads))
            self._heads.append(target)
            self._room.append(capacity)
            self._costs.append(price)
        return edge

    def _send(self) -> bool:
        """Sends a unit to the last request along edges of a shortest path. False: there is no such path left."""
        distances, heads, room, costs, last = self._distances, self._heads, self._room, self._costs, self._requests - 1
        came_by: list[int | None] = [None] * (2 * self._requests)
        came_by[0] = _NEVER
        waiting = deque([0])
        while waiting and came_by[last] is None:
            node = waiting.popleft()
            for edge in self._edges[node]:
                head = heads[edge]
                if room[edge] and came_by[head] is None and distances[head] == distances[node] + costs[edge]:
                    came_by[head] = edge
                    waiting.append(head)
        if came_by[last] is None:
            return False
        node = last
        while node:
            way = came_by[node]
            assert way is not None
            room[way] -= 1
            room[way ^ 1] += 1
            node = heads[way ^ 1]
        return True

    def _update_distances(self) -> None:
        """Dijkstra's algorithm. With the old distances as prices, no edge with room has a negative cost."""
        heads, room, costs, prices, last = self._heads, self._room, self._costs, self._distances, self._requests - 1
        longer = [0] + [_NEVER] * (2 * self._requests - 1)
        heap = [(0, 0)]
        most = 0
        while heap:
            most, node = heappop(heap)
            if node == last:
                break
            if most > longer[node]:
                continue
            base = most + prices[node]
            for edge in self._edges[node]:
                if room[edge]:
                    head = heads[edge]
                    more = base + costs[edge] - prices[head]
                    if more < longer[head]:
                        longer[head] = more
                        heappush(heap, (more, head))
        # Beyond the last request all nodes are moved alike, which keeps all costs at 0 or more.
        self._distances = [price + min(more, most) for price, more in zip(prices, longer, strict=True)]


def follow(trace: Trace, chosen: Sequence[Use | None], slots: int) -> int:
    """Carries out chosen uses as an offline rule: see the top of this file. Returns the reused blocks."""
    begins = _kept_from(trace, chosen, slots)
    until: dict[bytes, int] = {}  # kept states, and the request that needs each
    reused = 0
    for number, request in enumerate(trace.requests):
        usable = request.keys[: usable_blocks(request, trace.block_tokens)]
        resume = next((depth for depth in range(len(usable), 0, -1) if usable[depth - 1] in until), 0)
        reused += resume
        source = {request.keys[resume - 1]} if resume else set()
        kept = {key: end for key, end in until.items() if end > number}
        computed = []
        for depth, end in begins[number]:
            key = request.keys[depth - 1]
            if key in until:
                kept[key] = max(end, kept.get(key, 0))
            elif depth > resume:
                computed.append((key, end))
        for key, end in computed:
            if key in kept or len(kept.keys() | source) < slots:
                kept[key] = max(end, kept.get(key, 0))
        assert len(kept.keys() | source) <= slots
        until = kept
    return reused


def _kept_from(trace: Trace, chosen: Sequence[Use | None], slots: int) -> list[list[tuple[int, int]]]:
    """For each request the states to keep after it: (depth in blocks, the request that needs it), deepest first."""
    begins: list[list[tuple[int, int]]] = [[] for _ in chosen]
    load = [0] * len(chosen)  # states kept after each request
    having: dict[bytes, list[int]] = {}  # requests with a prefix
    for number, request in enumerate(trace.requests):
        for key in request.keys:
            having.setdefault(key, []).append(number)

    def keep(depth: int, start: int, end: int) -> None:
        begins[start].append((depth, end))
        for gap in range(start, end):
            load[gap] += 1

    for number, use in enumerate(chosen):
        if use is not None:
            keep(use.blocks, use.since, number)
    for number, use in enumerate(chosen):
        if use is None:
            continue
        start, earlier = use.since, having[trace.requests[number].keys[use.blocks - 1]]
        spans = []
        # Requests that resume behind this state do not compute it. So it must be kept since an earlier one.
        while (there := chosen[start]) is not None and there.blocks > use.blocks:
            before = earlier[bisect_left(earlier, start) - 1]
            spans.append((before, start))
            start = before
        if all(load[gap] < slots for gap in range(start, use.since)):
            for span in spans:
                keep(use.blocks, *span)
    for of_request in begins:
        of_request.sort(reverse=True)
    return begins
