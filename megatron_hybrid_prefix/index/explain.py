"""`Explanation`: what a prompt would reuse now, and why not more, in sentences. Whoever explains only reads.

It asks the matcher what a request would get, and then each tier what is there. It asks nothing that ranks would have to agree
on, or that waits for another process: of a tier below the host it has what this rank knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.matcher import Matcher, kv_depth
from megatron_hybrid_prefix.index.planner import StepPlanner
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.policy.base import RemembersEvicted
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import DepthTier, TierBehind
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, EntryKind

_NAMES = {DEVICE: "the device", HOST: "the host", SHARED: "the shared tier"}


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
        sentences: The same in words, and why it is not more.
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
    sentences: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request to be explained.

    Attributes:
        chain: Keys of the prompt.
        refuses: Why the request reuses nothing, whatever is cached, as a sentence; None: it reuses.
        write: Whether what it computes would be cached.
        resume_at: See `Match`.
        breakpoints: Positions up to which other prompts share this one.
        plain: Keys of the same tokens without salt and adapter; None: the request has neither.
    """

    chain: KeyChain
    refuses: str | None = None
    write: bool = True
    resume_at: Collection[int] | None = None
    breakpoints: Sequence[int] = ()
    plain: KeyChain | None = None


class _Behind:
    """The tier below the host for a reader that must change nothing: this rank's answers, without waiting."""

    def __init__(self, behind: TierBehind) -> None:
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
        store: What is cached.
        planner: Knows what a request would keep.
        asked: The request.
    """

    def __init__(self, store: PrefixStore, planner: StepPlanner, asked: Question) -> None:
        self._store, self._planner, self._asked = store, planner, asked
        self._step, self._keys = store.settings.block_tokens, asked.chain.keys
        self._limit_tokens = asked.chain.tokens - store.settings.min_computed_tokens
        behind = None if store.host is None else store.host.behind
        below: dict[str, DepthTier] = {} if store.host is None else {HOST: store.host}
        if behind is not None:
            below[SHARED] = _Behind(behind)
        self._least_blocks = 0 if behind is None else behind.least_blocks
        tiers = tuple(below.values())
        matcher = Matcher(store.tree, tiers, store.ghosts, block_tokens=self._step)
        self._match = matcher.match(asked.chain, self._limit_tokens, True, asked.resume_at)
        on_device = len(store.tree.path(self._keys))
        self._kv = {DEVICE: on_device}  # depth by tier
        for number, tier in enumerate(below, 1):
            self._kv[tier] = kv_depth(tiers[:number], self._keys, on_device)
        self._states: dict[str, list[int]] = {tier: [] for tier in self._kv}  # depths by tier
        eviction = store.blocks.eviction
        self._remembers = isinstance(eviction, RemembersEvicted)
        evicted = list(eviction.evicted_keys()) if isinstance(eviction, RemembersEvicted) else []
        since = {key: len(evicted) - number for number, key in enumerate(evicted, 1)}
        # Depths of states that are remembered as evicted, and how many were evicted since.
        self._evicted = {depth: since[key] for depth, key in enumerate(self._keys, 1) if key in since}
        for depth, key in enumerate(self._keys[: self._match.kv_depth_blocks], 1):
            node = store.tree.get(key)
            has = {
                DEVICE: node is not None and node.slot != NO_SLOT,
                HOST: node is not None and node.host_slot != NO_SLOT,
            }
            has[SHARED] = behind is not None and behind.knows(EntryKind.STATE, key)
            for tier, depths in self._states.items():
                if has[tier]:
                    depths.append(depth)

    def explain(self) -> Explanation:
        """The explanation."""
        match, step = self._match, self._step
        tier, depth = (None, 0) if self._asked.refuses else self._source()
        kept = self._kept(depth)
        return Explanation(
            prompt_tokens=self._asked.chain.tokens,
            block_tokens=step,
            limit_tokens=self._limit_tokens,
            epoch=self._asked.chain.epoch,
            resume_tokens=depth * step,
            tier=tier,
            kv_tokens={tier: depth * step for tier, depth in self._kv.items()},
            state_tokens={tier: tuple(depth * step for depth in depths) for tier, depths in self._states.items()},
            evicted_tokens=tuple(depth * step for depth in self._evicted),
            seen_tokens=max(match.kv_depth_blocks, match.seen_blocks) * step,
            kept_tokens=tuple(depth * step for depth in kept),
            sentences=(self._verdict(tier, depth), *self._reasons(depth), *self._next(depth, kept)),
        )

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _source(self) -> tuple[str | None, int]:
        """Tier and depth of the state that the request resumes from."""
        on_device, deeper = self._match.resume_tokens // self._step, self._match.loadable_blocks
        if deeper and self._has_room(deeper):
            return (HOST if deeper in self._states[HOST] else SHARED), deeper
        return (DEVICE if on_device else None), on_device

    def _has_room(self, depth: int) -> bool:
        """Whether the device has room for a load up to there."""
        shared = self._store.tree.path(self._keys[:depth])
        return self._store.has_room(depth - len(shared), shared, slots=1)

    def _kept(self, depth: int) -> list[int]:
        """Depths of the states that the request would keep, guesses left out, if it resumes at ``depth``."""
        if not self._asked.write:
            return []
        match = self._match
        if self._asked.refuses:
            match = replace(match, resume_tokens=0, kv_depth_blocks=0, seen_blocks=0)
        asked_source = None if self._asked.refuses else self._store.checkpoints.asked_source(match)
        boundaries = self._planner.boundaries(match, self._asked.breakpoints, asked_source)
        wanted = (
            boundary.position_tokens // self._step
            for boundary in boundaries
            if boundary.reason != CheckpointReason.INTERVAL
        )
        return [each for each in wanted if each > depth and each not in self._states[DEVICE]]

    # -- sentences -----------------------------------------------------------------------------------------------------

    def _verdict(self, tier: str | None, depth: int) -> str:
        prompt = f"{self._asked.chain.tokens:,} prompt tokens"
        if tier is None:
            return f"None of the {prompt} would be reused."
        how = "" if tier == DEVICE else ", and the request would load it"
        return f"{self._at(depth)} of the {prompt} would be reused: {_NAMES[tier]} has the state there{how}."

    def _reasons(self, depth: int) -> Iterator[str]:
        """Why it is not more."""
        asked, match, most = self._asked, self._match, self._limit_tokens // self._step
        if asked.refuses:
            yield asked.refuses
            _, without = self._source()
            if without:
                yield f"Without that it would resume at token {self._at(without)}."
        elif not self._store.slots.most_cached:
            yield "There is no room for a cached state: raise mamba_gb, or the memory."
        elif not self._keys:
            yield f"The prompt is shorter than a block of {self._step} tokens, and only whole blocks are cached."
        else:
            if match.kv_depth_blocks > most:
                always = asked.chain.tokens - self._limit_tokens
                last = "the last token" if always == 1 else f"the last {always} tokens"
                yield f"The request computes at least {last}, so it resumes at token {self._at(most)} or before."
            if depth < most:
                yield from self._about_kv(most)
                yield from self._about_states(depth, min(match.kv_depth_blocks, most))
                if SHARED in self._kv:
                    yield "What the shared tier has is what this rank knows without asking; a load needs it on all ranks."

    def _about_kv(self, most: int) -> Iterator[str]:
        match, asked = self._match, self._asked
        if match.kv_depth_blocks:
            places, before = [], 0
            for tier, depth in self._kv.items():
                if depth > before:
                    places.append(f"token {self._at(depth)} on {_NAMES[tier]}")
                before = depth
            yield f"KV goes to {', and to '.join(places)}."
        if match.seen_blocks > match.kv_depth_blocks:
            after = "from there to token" if match.kv_depth_blocks else "up to token"
            yield f"KV {after} {self._at(match.seen_blocks)} was evicted."
        elif match.kv_depth_blocks < most:
            yield f"Block {match.kv_depth_blocks + 1} is on no tier: no earlier prompt had it{self._or_evicted('')}."
        if match.kv_depth_blocks < most and asked.chain.epoch:
            yield f"The weights epoch is {asked.chain.epoch}: what was cached before it is gone."
        if asked.plain is not None:
            others = len(self._store.tree.path(asked.plain.keys))
            without = f"; without them KV goes to token {self._at(others)}" if others else ""
            yield f"Only requests with the same salt and adapter share with it{without}."

    def _about_states(self, depth: int, usable: int) -> Iterator[str]:
        """Why the request does not resume deeper, where KV is: up to ``usable``."""
        resume_at, seen = self._asked.resume_at, depth
        for tier, depths in self._states.items():
            deepest = max((each for each in depths if seen < each <= usable), default=0)
            if not deepest:
                continue
            seen, has = deepest, f"{_NAMES[tier].capitalize()} has the state at {self._at(deepest)}, but"
            if resume_at is not None and deepest * self._step not in resume_at:
                yield f"{has} the log-probs of the prompt before it are not kept, and the request asks for them."
            elif tier == SHARED and deepest - depth < self._least_blocks:
                yield f"{has} a load that saves fewer than {self._at(self._least_blocks)} tokens does not begin."
            else:
                yield f"{has} the device has no room to load it now."
        written = [each for each in range(depth + 1, usable + 1) if self._keys[each - 1] in self._planner.writing]
        evicted = [each for each in self._evicted if each > depth]
        if evicted:
            since = self._evicted[evicted[-1]]
            others = f", and {since:,} other{'s' * (since > 1)} since" if since else ""
            yield f"Evicted: {self._list(evicted)}{others}."
        if written:
            yield f"A running forward writes {self._list(written)}."
        if seen == depth < usable and not written and not (evicted and evicted[0] <= usable):
            yield f"Between {self._at(depth)} and {self._at(usable)} no state was kept{self._or_evicted('as a guess or ')}."

    def _next(self, depth: int, kept: Sequence[int]) -> Iterator[str]:
        """What later prompts find."""
        if not self._asked.write:
            yield "This request would keep nothing: cache_write is false."
        elif kept:
            yield f"This request would keep {self._list(kept)}: prompts that begin alike resume there."

    def _or_evicted(self, also: str) -> str:
        """What else is possible for something that is neither here nor remembered. ``also``: what is not remembered, either."""
        return f", or it was evicted{f', {also}too long ago to be remembered' if self._remembers else ''}"

    def _at(self, depth: int) -> str:
        return f"{depth * self._step:,}"

    def _list(self, depths: Iterable[int]) -> str:
        """States, at most the last four."""
        places = [self._at(depth) for depth in sorted(depths)[-4:]]
        return f"the state at {places[0]}" if len(places) == 1 else f"the states at {', '.join(places)}"
