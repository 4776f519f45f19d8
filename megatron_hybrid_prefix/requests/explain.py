"""`Explanation`: what a prompt would reuse now, and what decides that, in numbers. Whoever explains only reads.

It asks the matcher what a request would get, and then each tier what is there. It asks nothing that ranks would have to agree
on, or that waits for another process: of a tier below the host it has what this rank knows.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.policy.base import RemembersEvicted
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.loads import LoadSource, room_for
from megatron_hybrid_prefix.requests.matcher import Matcher, kv_depth
from megatron_hybrid_prefix.requests.planner import StepPlanner
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
        resume_tokens: Tokens that the request skips; 0: it reuses nothing.
        tier: Tier of the state that it resumes from; None if it reuses nothing. Below the device it begins a load.
        kv_tokens: By tier: up to where KV is on this tier or on a faster one.
        state_tokens: By tier: where states are that the KV of all tiers reaches, ascending.
        evicted_tokens: Where the eviction policy remembers a state that no tier has now, ascending.
        seen_tokens: Up to where an earlier prompt began alike: KV that is there, or that is remembered as evicted.
        kept_tokens: Where the request would keep a state, guesses left out; ascending.
        writing_tokens: Where a running forward writes a state, ascending.
        scored_tokens: Where a request that wants the log-probs of its prompt may resume, ascending; None: it wants none.
        plain_kv_tokens: Up to where KV is on the device for the same tokens without salt and adapter; None: it has neither.
        least_load_tokens: A load from the shared tier that saves fewer tokens does not begin.
        most_states: States that the device has room for.
        refused_by: The field or setting for which the request reuses nothing, whatever is cached; None: it reuses.
        writes: Whether what it computes would be cached.
    """

    prompt_tokens: int
    block_tokens: int
    limit_tokens: int
    epoch: int
    resume_tokens: int
    tier: str | None
    kv_tokens: dict[str, int]
    state_tokens: dict[str, tuple[int, ...]]
    evicted_tokens: tuple[int, ...]
    seen_tokens: int
    kept_tokens: tuple[int, ...]
    writing_tokens: tuple[int, ...]
    scored_tokens: tuple[int, ...] | None
    plain_kv_tokens: int | None
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
        plain: Keys of the same tokens without salt and adapter; None: the request has neither.
    """

    chain: KeyChain
    refused_by: str | None = None
    write: bool = True
    resume_at: Collection[int] | None = None
    breakpoints: Sequence[int] = ()
    plain: KeyChain | None = None


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


class Explainer:
    """Explains one request. Depths are in blocks.

    Args:
        device: What is cached, there and below.
        planner: Knows what a request would keep.
        asked: The request.
    """

    def __init__(self, device: DeviceTier, planner: StepPlanner, asked: Question) -> None:
        self._device, self._planner, self._asked = device, planner, asked
        self._step, self._keys = device.settings.block_tokens, asked.chain.keys
        self._limit_tokens = asked.chain.tokens - device.settings.min_computed_tokens
        behind, below = device.host.behind, dict(device.below)
        if SHARED in below:
            below[SHARED] = _Behind(behind)
        self._least_blocks = behind.least_blocks if behind.takes else 0
        tiers = tuple(below.values())
        matcher = Matcher(device.tree, tiers, device.ghosts, block_tokens=self._step)
        self._match = matcher.match(asked.chain, self._limit_tokens, True, asked.resume_at)
        on_device = len(device.tree.path(self._keys))
        self._kv = {DEVICE: on_device}  # depth by tier
        for number, tier in enumerate(below, 1):
            self._kv[tier] = kv_depth(tiers[:number], self._keys, on_device)
        self._states: dict[str, list[int]] = {tier: [] for tier in self._kv}  # depths by tier
        for depth, key in enumerate(self._keys[: self._match.kv_depth_blocks], 1):
            node = device.tree.get(key)
            has = {
                DEVICE: node is not None and node.slot != NO_SLOT,
                HOST: node in device.host.of_states,
                SHARED: behind.knows(EntryKind.STATE, key),
            }
            for tier, depths in self._states.items():
                if has[tier]:
                    depths.append(depth)

    def explain(self) -> Explanation:
        """The explanation."""
        asked, match, step = self._asked, self._match, self._step
        tier, depth = (None, 0) if asked.refused_by else self._source()
        eviction = self._device.blocks.eviction
        evicted = {*eviction.evicted_keys()} if isinstance(eviction, RemembersEvicted) else set()

        def tokens(depths: Iterable[int]) -> tuple[int, ...]:
            return tuple(depth * step for depth in depths)

        def places(keys: Container[bytes]) -> tuple[int, ...]:
            return tokens(depth for depth, key in enumerate(self._keys, 1) if key in keys)

        return Explanation(
            prompt_tokens=asked.chain.tokens,
            block_tokens=step,
            limit_tokens=self._limit_tokens,
            epoch=asked.chain.epoch,
            resume_tokens=depth * step,
            tier=tier,
            kv_tokens={tier: depth * step for tier, depth in self._kv.items()},
            state_tokens={tier: tokens(depths) for tier, depths in self._states.items()},
            evicted_tokens=places(evicted),
            seen_tokens=max(match.kv_depth_blocks, match.seen_blocks) * step,
            kept_tokens=tokens(self._kept(depth)),
            writing_tokens=places(self._planner.writing),
            scored_tokens=None if asked.resume_at is None else tuple(sorted(asked.resume_at)),
            plain_kv_tokens=None if asked.plain is None else len(self._device.tree.path(asked.plain.keys)) * step,
            least_load_tokens=self._least_blocks * step,
            most_states=self._device.slots.most_cached,
            refused_by=asked.refused_by,
            writes=asked.write,
        )

    def _source(self) -> tuple[str | None, int]:
        """Tier and depth of the state that the request resumes from."""
        on_device, source = self._match.resume_tokens // self._step, LoadSource.below(self._device, self._match)
        blocks = -(-self._asked.chain.tokens // self._step)
        if source is not None and room_for(self._device, self._match, source, blocks) is not None:
            deeper = len(source.keys)
            return (HOST if deeper in self._states[HOST] else SHARED), deeper
        return (DEVICE if on_device else None), on_device

    def _kept(self, depth: int) -> list[int]:
        """Depths of the states that the request would keep, guesses left out, if it resumes at ``depth``."""
        if not self._asked.write:
            return []
        match = self._match
        if self._asked.refused_by:
            match = replace(match, resume_tokens=0, kv_depth_blocks=0, seen_blocks=0)
        boundaries = self._planner.boundaries(match, self._asked.breakpoints)
        wanted = (
            boundary.position_tokens // self._step
            for boundary in boundaries
            if boundary.reason != CheckpointReason.INTERVAL
        )
        return [each for each in wanted if each > depth and each not in self._states[DEVICE]]
