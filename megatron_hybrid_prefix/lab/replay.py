"""Replays recorded requests through the engine's own cache class, without tensors.

Requests run one after another. Each prompt is computed in one step, and nothing is generated, because traces seldom
record answers. Needs neither torch nor megatron.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.console.terminal import no_garbage_collection
from megatron_hybrid_prefix.index.hints import Hints
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest, TraceSessions, sessions_of
from megatron_hybrid_prefix.requests.matcher import Match
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.behind import EndOfChain

MOST_ENTRIES = 2**23
"""Most KV blocks, state slots or pages of the host. The index takes some 300 bytes for each that is in use."""
PROMPT_TOKENS_A_SECOND, ANSWER_TOKENS_A_SECOND = 10_000, 50
"""Speeds of a request while sessions run side by side."""
_CALLS = 200  # of `on_request` in a replay


class TooLargeError(ValueError):
    """A budget has more entries than a replay can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay.

    Attributes:
        settings: Fields of `CacheSettings`.
        prompt_tokens: Prompt tokens of all requests.
        reused_tokens: Reused tokens of each request.
        refused_requests: Requests whose prompt needs more KV blocks than there are. They were skipped.
        counters: Counters of the cache, by name.
        seconds: Duration of the replay.
    """

    settings: Mapping[str, Any]
    prompt_tokens: int
    reused_tokens: array[int]
    refused_requests: int
    counters: Mapping[str, Any]
    seconds: float

    @property
    def reused_token_fraction(self) -> float:
        """Reused tokens as a share of all prompt tokens."""
        return sum(self.reused_tokens) / self.prompt_tokens


class CacheServer:
    """`HybridPrefixCache`, called as the engine calls it.

    Args:
        **settings: Fields of `CacheSettings`.
    """

    def __init__(self, **settings: Any) -> None:
        self._cache = HybridPrefixCache(CacheSettings(**settings))
        self._next_id = 0
        self._refused: Match | None = None  # of the prompt that found too few KV blocks last: it may be tried again

    def begin(
        self, request: TraceRequest, session: str | None = None, *, ends_session: bool = False
    ) -> tuple[int, int] | None:
        """Computes a prompt. Returns the number of the request, which `end` ends, and the reused tokens; None if there are too few KV blocks."""
        cache = self._cache
        self._next_id += 1
        match = self._refused
        if match is None or match.chain.keys is not request.keys or not cache.is_current(match):
            match = cache.match(KeyChain(request.keys, request.prompt_tokens))
        hints = Hints(session=session, ends_session=ends_session)
        admission = cache.admit(self._next_id, match, load=True, hints=hints)
        if admission is None and match.loadable_blocks:
            admission = cache.admit(self._next_id, match, hints=hints)
        self._refused = match if admission is None else None
        if admission is None:
            return None
        plan = cache.plan(self._next_id, admission.resume_tokens, request.prompt_tokens)
        cache.take_copies()  # a replay has no data to copy
        cache.publish(plan)
        return self._next_id, admission.resume_tokens

    def end(self, number: int) -> None:
        """The request has its answer."""
        self._cache.release(number)

    def serve(self, request: TraceRequest, session: str | None = None, *, ends_session: bool = False) -> int | None:
        """Computes a prompt, which has no answer. Returns the reused tokens; None if there are too few KV blocks."""
        begun = self.begin(request, session, ends_session=ends_session)
        if begun is None:
            return None
        self.end(begun[0])
        return begun[1]

    def end_session(self, session: str) -> None:
        """No request of it comes any more, but this one, of no tokens."""
        self._next_id += 1
        match = self._cache.match(KeyChain([], 0))
        self._cache.admit(self._next_id, match, hints=Hints(session=session, ends_session=True))
        self._cache.release(self._next_id)

    def counters(self) -> Mapping[str, Any]:
        """Counters of the cache, and who uses its memory, by name."""
        return self._cache.stats().as_dict() | {"memory_use": asdict(self._cache.memory_use())}


def replay(
    trace: Trace,
    *,
    sessions: TraceSessions | None = None,
    ends_after_s: float = 0.0,
    at_once: int | None = None,
    seed: int = 0,
    on_request: Callable[[int], None] = lambda done: None,
    **settings: Any,
) -> Replayed:
    """Replays all requests of a trace through a new cache.

    Args:
        trace: Recorded requests.
        sessions: Requests say to which of these they belong; None: no request does.
        ends_after_s: The cache is told that a session is over so many seconds after its last request; 0: with it.
        at_once: So many sessions run side by side, see `_side_by_side`; None: requests run one after another, by time.
        seed: Of the order of sessions.
        on_request: Called from time to time with the number of finished requests. May raise to stop the replay.
        **settings: Fields of `CacheSettings`: sizes (`unlimited_kv`, `Memory.cache_sizes`) and rules.

    Raises:
        TooLargeError: A budget is larger than `MOST_ENTRIES`.
    """
    whats = {"kv_blocks": "KV blocks", "state_slots": "state slots", "host_pages": "pages of the host"}
    for name, what in whats.items():
        if (count := settings.get(name) or 0) > MOST_ENTRIES:
            raise TooLargeError(f"{count:,} {what}: a replay has at most {MOST_ENTRIES:,}")
    server = CacheServer(block_tokens=trace.block_tokens, **settings)
    reused, over = array("q"), deque[tuple[float, str]]()  # sessions whose end the cache is told later
    refused, every = 0, ceil_div(len(trace.requests), _CALLS)
    # A long trace makes millions of objects that stay. Scanning them for garbage would take longer than the replay.
    with no_garbage_collection():
        start = perf_counter()
        if at_once is not None:

            def progress(done: int) -> None:
                if done % every == 0:
                    on_request(done)

            reused, refused = _side_by_side(server, trace, sessions, at_once, seed, progress)
        for number, request in enumerate(trace.requests if at_once is None else (), 1):
            while over and over[0][0] <= request.timestamp:
                server.end_session(over.popleft()[1])
            session, ends = (None, False) if sessions is None else sessions.hint(number - 1)
            depth = server.serve(request, session, ends_session=ends and not ends_after_s)
            if ends and ends_after_s and session is not None:
                over.append((request.timestamp + ends_after_s * trace.ticks, session))
            refused += depth is None
            reused.append(depth or 0)
            if number % every == 0 or number == len(trace.requests):
                on_request(number)
        seconds = perf_counter() - start
    return Replayed(
        settings={name: value for name, value in settings.items() if name != "behind"},
        prompt_tokens=trace.prompt_tokens,
        reused_tokens=reused,
        refused_requests=refused,
        counters=server.counters(),
        seconds=seconds,
    )


def _side_by_side(
    server: CacheServer,
    trace: Trace,
    hints: TraceSessions | None,
    at_once: int,
    seed: int,
    on_request: Callable[[int], object],
) -> tuple[array[int], int]:
    """Runs sessions side by side; the next one begins when one ends.

    The clock counts tokens: a request takes as long as it computes (`PROMPT_TOKENS_A_SECOND`) and answers, and holds its KV for so long.
    The session's next one is sent as long after it as was recorded, but not before the answer. One that finds too few blocks waits
    until another ends, the longest waiting first.

    Returns:
        Reused tokens of each request, and how many do not fit into an empty memory: they are left out.
    """
    of_session: dict[int, list[int]] = {}
    for number, own_session in enumerate(sessions_of(trace).numbers):
        of_session.setdefault(own_session, []).insert(0, number)
    left = list(of_session.values())  # the requests of each session that are left, the next one last
    random.Random(seed).shuffle(left)
    requests, reused = trace.requests, array("q", bytes(8 * len(trace.requests)))
    waiting, later = deque(left[:at_once]), deque(left[at_once:])
    # When a request is sent, or ends; its number; what is left of its session; if it ends, when it began, and the cache's number.
    events: list[tuple[float, int, list[int], tuple[float, int] | None]] = []
    refused, done, running, clock = 0, 0, 0, 0.0
    while waiting or events:
        while waiting:
            number = waiting[0][-1]
            request, (session, ends) = requests[number], (None, False) if hints is None else hints.hint(number)
            begun = server.begin(request, session, ends_session=ends)
            if begun is None and running:
                break
            own, tokens, begun_id = waiting.popleft(), 0.0, 0
            own.pop()
            if begun is None:
                refused += 1
            else:
                begun_id, reused[number] = begun
                computed = (request.prompt_tokens - reused[number]) / PROMPT_TOKENS_A_SECOND
                tokens = trace.ticks * (computed + request.answer_tokens / ANSWER_TOKENS_A_SECOND)
            running += 1
            heappush(events, (clock + tokens, number, own, (clock, begun_id)))
            done += 1
            on_request(done)
        clock, number, own, ended = heappop(events)
        if ended is None:
            waiting.append(own)
            continue
        running -= 1
        server.end(ended[1])
        if own:
            sent = ended[0] + requests[own[-1]].timestamp - requests[number].timestamp
            heappush(events, (max(clock, sent), own[-1], own, None))
        elif later:
            waiting.append(later.popleft())
    return reused, refused


class _EveryState(EndOfChain):
    """A tier that has the state after every block, and brings it at once."""

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        return limit


def kv_alone(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `CacheSettings` for the same memory with states of no bytes: a prompt resumes wherever its KV ends."""
    host_blocks, kv_pages = sizes.get("host_pages", 0) // sizes.get("host_kv_pages", 1), 16
    page_blocks = 1 + sizes["kv_blocks"] // 2048
    return {
        "kv_blocks": sizes["kv_blocks"] + page_blocks,  # a page more: that of all states
        "page_blocks": page_blocks,
        "page_states": 1024,
        # States come through the host, where there is always room for eight, of half a block.
        "host_pages": kv_pages * host_blocks + kv_pages // 2,
        "host_kv_pages": kv_pages,
        "retention_interval_tokens": 0,
        "behind": _EveryState(),
    }


def running_bytes(trace: Trace, at_once: int, block_bytes: int, state_bytes: int) -> float:
    """Bytes that so many running sessions need: each the KV of its largest prompt, and a state. The mean over all requests."""
    numbers, largest = sessions_of(trace).numbers, dict[int, int]()
    for session, request in zip(numbers, trace.requests, strict=True):
        largest[session] = max(largest.get(session, 0), ceil_div(request.prompt_tokens, trace.block_tokens))
    return at_once * (sum(map(largest.__getitem__, numbers)) / len(numbers) * block_bytes + state_bytes)


def ceiling_tokens(trace: Trace, min_computed_tokens: int = 1) -> array[int]:
    """Tokens of each request that an unlimited cache with a state after every block would reuse."""
    seen: set[bytes] = set()
    ceiling = array("q")
    for request in trace.requests:
        depth_blocks = 0
        for key in request.keys:
            if key not in seen:
                break
            depth_blocks += 1
        usable_blocks = max(0, request.prompt_tokens - min_computed_tokens) // trace.block_tokens
        ceiling.append(min(depth_blocks, usable_blocks) * trace.block_tokens)
        seen.update(request.keys[depth_blocks:])
    return ceiling


def unlimited_kv(trace: Trace, state_slots: int) -> dict[str, Any]:
    """Sizes of a cache with at most so many checkpoints, beside which no KV is ever evicted.

    All KV of the trace fits into a page, and all checkpoints into another.
    """
    different = {key for request in trace.requests for key in request.keys}
    blocks = len(different) + max(len(request.keys) for request in trace.requests) + 2
    pages = {"kv_blocks": 2 * blocks, "page_blocks": blocks, "page_states": max(1, state_slots)}
    return {**pages, "state_slots": state_slots, "live_states": False}
