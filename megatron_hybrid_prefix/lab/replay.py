"""Replays recorded requests through the engine's own cache class, without tensors.

Requests run one after another. Each prompt is computed in one step, and nothing is generated, because traces seldom
record answers. Needs neither torch nor megatron.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.console.terminal import no_garbage_collection
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest
from megatron_hybrid_prefix.lab.upstream_rule import UpstreamRule
from megatron_hybrid_prefix.policy.boundaries import Boundary, prompt_boundaries

MOST_ENTRIES = 2**22
"""Most KV blocks, state slots or pages of the host. The index takes some 300 bytes for each."""
ADMISSIONS = ("adaptive", "tail")
_CALLS = 200  # of `on_request` in a replay


class TooLargeError(ValueError):
    """A budget has more entries than a replay can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which states are kept, and which are evicted.

    Attributes:
        name: Name in tables.
        eviction: Name of an eviction policy. "upstream": megatron-core 0.19's rules for everything.
        admission: "adaptive": junctions, tails, repeats, and interval states while there is room. "tail": only the last full
            block of each prompt.
        interval_tokens: Distance of interval states; None: the cache's default; 0: no interval states.
        options: Further fields of `CacheSettings`.
    """

    name: str
    eviction: str
    admission: str = "adaptive"
    interval_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay.

    Attributes:
        policy: The policy.
        state_slots: Number of state slots.
        kv_blocks: Number of KV blocks; None: unlimited.
        prompt_tokens: Prompt tokens of all requests.
        reused_tokens: Reused tokens of each request.
        refused_requests: Requests whose prompt needs more KV blocks than there are. They were skipped.
        counters: Counters of the cache, by name.
        seconds: Duration of the replay.
        memory: The memory that KV and states shared, if it was given in bytes. ``state_slots`` and ``kv_blocks`` are then the
            most of each.
    """

    policy: Policy
    state_slots: int
    kv_blocks: int | None
    prompt_tokens: int
    reused_tokens: array[int]
    refused_requests: int
    counters: Mapping[str, Any]
    seconds: float
    memory: Memory | None = None

    @property
    def reused_token_fraction(self) -> float:
        """Reused tokens as a share of all prompt tokens."""
        return sum(self.reused_tokens) / self.prompt_tokens

    @property
    def requests_per_second(self) -> float:
        """Requests replayed per second."""
        return len(self.reused_tokens) / self.seconds


class CacheServer:
    """`HybridPrefixCache`, called as the engine calls it. `UpstreamRule` has the same methods."""

    def __init__(self, policy: Policy, block_tokens: int, sizes: Mapping[str, Any]) -> None:
        settings = CacheSettings(
            boundary_rule=_tail_only if policy.admission == "tail" else prompt_boundaries,
            block_tokens=block_tokens,
            eviction_policy=policy.eviction,
            retention_interval_tokens=policy.interval_tokens if policy.admission == "adaptive" else 0,
            **sizes,
            **policy.options,
        )
        self._cache = HybridPrefixCache(settings)
        self._next_id = 0

    def serve(self, request: TraceRequest) -> int | None:
        """Runs a request. Returns the reused prompt tokens; None if it needs too many KV blocks."""
        cache = self._cache
        self._next_id += 1
        match = cache.match(KeyChain(request.keys, request.prompt_tokens))
        if match.loadable_blocks:
            match = cache.loads.begin_load_back(self._next_id, match) or match
        admission = cache.admit(self._next_id, match)
        if admission is None:
            cache.take_copies()
            cache.release(self._next_id)
            return None
        plan = cache.plan(self._next_id, admission.resume_tokens, request.prompt_tokens)
        cache.take_copies()  # a replay has no data to copy
        cache.publish(plan)
        cache.release(self._next_id)
        return admission.resume_tokens

    def counters(self) -> Mapping[str, Any]:
        return self._cache.stats().as_dict() | {"memory_use": asdict(self._cache.memory_use())}


def _tail_only(*, prompt_tokens: int, block_tokens: int, **rest: Any) -> tuple[Boundary, ...]:
    """Only the state after the last full block of a prompt, as older versions of vLLM kept it in mode "align"."""
    tail = prompt_tokens // block_tokens * block_tokens
    every = prompt_boundaries(prompt_tokens=prompt_tokens, block_tokens=block_tokens, **rest)
    return tuple(boundary for boundary in every if boundary.position_tokens == tail)


def replay(
    trace: Trace,
    policy: Policy,
    *,
    state_slots: int = 0,
    kv_blocks: int | None = None,
    memory: Memory | None = None,
    on_request: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Replays all requests of a trace through a new cache.

    Args:
        trace: Recorded requests.
        policy: Which states are kept and evicted.
        state_slots: Checkpoint slots.
        kv_blocks: KV blocks; None: as many as the trace can use.
        memory: Bytes, instead of the two counts. Not for "upstream".
        on_request: Called from time to time with the number of finished requests. May raise to stop the replay.

    Raises:
        TooLargeError: A budget is larger than `MOST_ENTRIES`.
    """
    if memory is not None:
        kv_blocks, state_slots = memory.layout.total_blocks, memory.most_states
    blocks = unlimited_kv_blocks(trace) if kv_blocks is None else kv_blocks
    for count, what in (
        (blocks, "KV blocks"),
        (state_slots, "state slots"),
        (policy.options.get("host_pages", 0), "pages of the host"),
    ):
        if count > MOST_ENTRIES:
            raise TooLargeError(f"{count:,} {what}: a replay has at most {MOST_ENTRIES:,}")
    server: UpstreamRule | CacheServer
    if policy.eviction == "upstream":
        server = UpstreamRule(block_tokens=trace.block_tokens, kv_blocks=blocks, state_slots=state_slots)
    else:
        counts = {"kv_blocks": blocks, "state_slots": state_slots}
        server = CacheServer(policy, trace.block_tokens, counts if memory is None else memory.cache_sizes())
    reused = array("q")
    refused, every = 0, ceil_div(len(trace.requests), _CALLS)
    # A long trace makes millions of objects that stay. Scanning them for garbage would take longer than the replay.
    with no_garbage_collection():
        start = perf_counter()
        for number, request in enumerate(trace.requests, 1):
            tokens = server.serve(request)
            refused += tokens is None
            reused.append(tokens or 0)
            if number % every == 0 or number == len(trace.requests):
                on_request(number)
        seconds = perf_counter() - start
    return Replayed(
        policy=policy,
        state_slots=state_slots,
        kv_blocks=kv_blocks,
        prompt_tokens=trace.prompt_tokens,
        reused_tokens=reused,
        refused_requests=refused,
        counters=server.counters(),
        seconds=seconds,
        memory=memory,
    )


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


def unlimited_kv_blocks(trace: Trace) -> int:
    """Enough KV blocks to never evict one: all different blocks, and those of the longest request."""
    different = {key for request in trace.requests for key in request.keys}
    return len(different) + max(len(request.keys) for request in trace.requests) + 2
