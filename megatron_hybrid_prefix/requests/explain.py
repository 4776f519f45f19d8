"""`Explanation`: what a prompt would reuse now, and what decides that, in numbers. Whoever explains only reads.

It asks the matcher what a request would get, and then each tier what is there. It asks nothing that ranks would have to agree
on, or that waits for another process: of a tier below the host it has what this rank knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.policy.base import RemembersEvicted
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.loads import room_for, source_below
from megatron_hybrid_prefix.requests.matcher import Matcher, kv_depth
from megatron_hybrid_prefix.requests.planner import StepPlanner
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.behind import EndOfChain
from megatron_hybrid_prefix.tiers.device import DeviceTier
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, EntryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a prompt would reuse if its request came now. All numbers are tokens from the start of the prompt.

    Attributes:
        prompt_tokens: Length of the prompt.
        block_tokens: Tokens per block.
        limit_tokens: The request resumes here or earlier: the tokens after it are always computed.
        epoch: Weights epoch. What was computed under others is not reused.
        reason: Why the request reuses nothing, or less than is known to have been there, as its `Reuse` would say.
        resume_tokens: Tokens that the request skips; 0: it reuses nothing.
        tier: Tier of the state that it resumes from; None if it reuses nothing. Below the device it begins a load.
        kv_tokens: By tier: up to where KV is on this tier or on a faster one.
        state_tokens: By tier: where states are that the KV of all tiers reaches, ascending.
        evicted_tokens: Where the eviction policy remembers a state that no tier has now, ascending.
        seen_tokens: Up to where an earlier prompt began alike: KV that is there, or that is remembered as evicted.
        kept_tokens: Where the request would keep a state, guesses left out; ascending.
        writing_tokens: Where a running forward writes a state, ascending.
        scored_tokens: Where a request that wants the log-probs of its prompt may resume, ascending; None: it wants none.
        least_load_tokens: A load from the shared tier that saves fewer tokens does not begin.
        most_states: States that the device has room for.
        refused_by: The field or setting for which the request reuses nothing, whatever is cached; None: it reuses.
        writes: Whether what it computes would be cached.
    """

    prompt_tokens: int
    block_tokens: int
    limit_tokens: int
    epoch: int
    reason: NotReused | None
    resume_tokens: int
    tier: str | None
    kv_tokens: dict[str, int]
    state_tokens: dict[str, tuple[int, ...]]
    evicted_tokens: tuple[int, ...]
    seen_tokens: int
    kept_tokens: tuple[int, ...]
    writing_tokens: tuple[int, ...]
    scored_tokens: tuple[int, ...] | None
    least_load_tokens: int
    most_states: int
    refused_by: str | None
    writes: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request to be explained.

    Attributes:
        chain: Keys of the prompt.
        refused_by: See `Explanation`.
        write: Whether what it computes would be cached.
        resume_at: See `Match`.
        breakpoints: Positions up to which other prompts share this one.
    """

    chain: KeyChain
    refused_by: str | None = None
    write: bool = True
    resume_at: Collection[int] | None = None
    breakpoints: Sequence[int] = ()


class _Behind:
    """The tier below the host for a reader that must change nothing: this rank's answers, without waiting."""

    def __init__(self, behind: EndOfChain) -> None:
        self._behind = behind

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        while first < len(keys) and self._behind.knows(EntryKind.KV, keys[first]):
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """A state that is not worth a load is left out."""
        least = max(1, self._behind.least_blocks)
        for depth in range(limit, after + least - 1, -1):
            if self._behind.knows(EntryKind.STATE, keys[depth - 1]):
                return depth
        return after


def explain(device: DeviceTier, planner: StepPlanner, asked: Question) -> Explanation:
    """Explains one request.

    Args:
        device: What is cached, there and below.
        planner: Knows what a request would keep.
        asked: The request.
    """
    block_tokens, chain, keys = device.settings.block_tokens, asked.chain, asked.chain.keys
    behind, below = device.host.behind, dict(device.below)
    if SHARED in below:
        below[SHARED] = _Behind(behind)
    tiers = tuple(below.values())
    limit_tokens = chain.tokens - device.settings.min_computed_tokens
    matcher = Matcher(device, tiers)
    match = matcher.match(chain, limit_tokens, True, asked.resume_at)
    on_device = len(device.tree.path(keys))
    kv = {tier: kv_depth(tiers[:number], keys, on_device) for number, tier in enumerate((DEVICE, *below))}

    def has_state(tier: str, key: bytes) -> bool:
        node = device.tree.get(key)
        if tier == DEVICE:
            return node is not None and node.slot != NO_SLOT
        return node in device.host.of_states if tier == HOST else behind.knows(EntryKind.STATE, key)

    def ends(blocks: Iterable[bool]) -> tuple[int, ...]:
        """Where the blocks end for which it holds."""
        return tuple(depth * block_tokens for depth, holds in enumerate(blocks, 1) if holds)

    states = {tier: ends(has_state(tier, key) for key in keys[: match.kv_depth_blocks]) for tier in kv}
    used, source = match, source_below(device, match)
    if asked.refused_by:
        used, source = matcher.match(chain, limit_tokens, False), None
    reuse, from_tier = used.reuse, DEVICE if used.resume_tokens else None
    if source is not None and room_for(device, match, source, ceil_div(chain.tokens, block_tokens)) is not None:
        reuse = source.as_match(match, NO_SLOT).reuse
        from_tier = HOST if source.depth_tokens in states[HOST] else SHARED
    kept = tuple(
        position
        for position, reason in (planner.boundaries(used, asked.breakpoints) if asked.write else ())
        if reason != CheckpointReason.INTERVAL and position > reuse.resume_tokens and position not in states[DEVICE]
    )
    eviction = device.blocks.eviction
    evicted = {*eviction.evicted_keys()} if isinstance(eviction, RemembersEvicted) else ()
    return Explanation(
        prompt_tokens=chain.tokens,
        block_tokens=block_tokens,
        limit_tokens=limit_tokens,
        epoch=chain.epoch,
        reason=reuse.reason,
        resume_tokens=reuse.resume_tokens,
        tier=from_tier,
        kv_tokens={tier: depth * block_tokens for tier, depth in kv.items()},
        state_tokens=states,
        evicted_tokens=ends(key in evicted for key in keys),
        seen_tokens=max(match.kv_depth_blocks, match.seen_blocks) * block_tokens,
        kept_tokens=kept,
        writing_tokens=ends(key in planner.writing for key in keys),
        scored_tokens=None if asked.resume_at is None else tuple(sorted(asked.resume_at)),
        least_load_tokens=behind.least_blocks * block_tokens if behind.takes else 0,
        most_states=device.slots.most_cached,
        refused_by=asked.refused_by,
        writes=asked.write,
    )
