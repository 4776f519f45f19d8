"""The matcher: finds what a prompt can reuse. It only reads, and returns an immutable `Match`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import DepthTier
from megatron_hybrid_prefix.tiers.device import DeviceTier


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt reuses, and why not more. The depths are tokens of those that it may skip, and 0 if it may not read.

    Attributes:
        reason: Why it resumes at 0, or before ``seen_tokens``; None: it does neither.
        seen_tokens: Up to where an earlier prompt began alike: KV that is there, or that is remembered as evicted.
        kv_tokens: Up to where KV is, on any tier.
        state_tokens: The deepest state that this KV reaches, on any tier, with or without log-probs that the request wants.
        resume_tokens: Prompt tokens that it skips.
    """

    reason: NotReused | None
    seen_tokens: int
    kv_tokens: int
    state_tokens: int
    resume_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a prompt is cached, and where the request can resume.

    Attributes:
        chain: The prompt's keys.
        prompt_tokens: The prompt's length at the time of the match.
        limit_tokens: The request must resume here or earlier.
        read: False: the request must not reuse the cache.
        kv_depth_blocks: Number of leading blocks whose KV is on any tier.
        path: Nodes of the blocks up to the state that the request resumes from. The request will share them.
        resume_tokens: Prompt tokens that are skipped. A block boundary, except for a swapped-out request that continues
            where it stopped.
        source_slot: Slot of the state at ``resume_tokens``; None if that is 0.
        version: Version of the tree at the time of the match.
        resume_at: Positions where the request may resume; None: anywhere.
        seen_blocks: Number of leading blocks that an earlier prompt had, even if their KV was evicted since (`Ghosts`). 0:
            nothing was evicted.
        loadable_blocks: Depth, in blocks, of a deeper state on a tier below the device; 0: there is none.
        reuse: What comes of it without a load.
    """

    chain: KeyChain
    prompt_tokens: int
    limit_tokens: int
    read: bool
    kv_depth_blocks: int
    path: tuple[Node, ...]
    resume_tokens: int
    source_slot: int | None
    version: int
    resume_at: Collection[int] | None = None
    seen_blocks: int = 0
    loadable_blocks: int = 0
    reuse: Reuse

    @property
    def block_ids(self) -> tuple[int, ...]:
        """KV blocks on the device up to ``resume_tokens``, front first."""
        return tuple(node.block_id for node in self.path)


class Matcher:
    """Matches prompts, and repeats matches that are out of date.

    Args:
        device: The blocks and states on the device, and what is remembered of others.
        tiers: Tiers below the device, nearest first.
    """

    def __init__(self, device: DeviceTier, tiers: Sequence[DepthTier]) -> None:
        self._device, self._tree, self._tiers = device, device.tree, tiers
        self._block_tokens, self._least_tokens = device.settings.block_tokens, device.settings.min_computed_tokens

    def match(self, chain: KeyChain, limit_tokens: int, read: bool, resume_at: Collection[int] | None = None) -> Match:
        """Matches ``chain`` against the tree and the tiers below. O(blocks matched). The arguments: see `Match`."""
        tree, tiers, ghosts, block_tokens = self._tree, self._tiers, self._device.ghosts, self._block_tokens
        read = read and chain.epoch == tree.epoch
        path = tree.path(chain.keys) if read else []
        cached_blocks = kv_depth(tiers, chain.keys, len(path)) if read else 0
        usable_blocks = min(cached_blocks, max(0, limit_tokens) // block_tokens)
        # The request resumes from the deepest state within the limit.
        resume_blocks = min(len(path), usable_blocks)
        while resume_blocks and path[resume_blocks - 1].slot == NO_SLOT:
            resume_blocks -= 1
        state_blocks, depths = resume_blocks, None
        if resume_at is not None:
            depths = {position // block_tokens for position in resume_at}
            while resume_blocks and (path[resume_blocks - 1].slot == NO_SLOT or resume_blocks not in depths):
                resume_blocks -= 1
        loadable_blocks = resume_blocks
        for tier in tiers:
            loadable_blocks = _state_depth(tier, chain.keys, loadable_blocks, usable_blocks, depths)
            if depths is not None:
                state_blocks = _state_depth(tier, chain.keys, state_blocks, usable_blocks, None)
        seen_blocks = 0
        if ghosts and read:
            seen_blocks = next(
                (depth for depth in range(cached_blocks, len(chain.keys)) if chain.keys[depth] not in ghosts),
                len(chain.keys),
            )
        most_blocks = max(0, chain.tokens - self._least_tokens) // block_tokens
        seen, kv = min(max(cached_blocks, seen_blocks), most_blocks), min(cached_blocks, most_blocks)
        blocks = seen, kv, max(state_blocks, loadable_blocks), resume_blocks
        reuse = Reuse(None, *[each * block_tokens for each in blocks])
        if not resume_blocks or resume_blocks < seen:
            why = self._why_not(chain, reuse, read, loadable_blocks > resume_blocks, resume_at)
            reuse = replace(reuse, reason=why)
        return Match(
            chain=chain,
            prompt_tokens=chain.tokens,
            limit_tokens=limit_tokens,
            read=read,
            kv_depth_blocks=cached_blocks,
            path=tuple(path[:resume_blocks]),
            resume_tokens=resume_blocks * block_tokens,
            source_slot=path[resume_blocks - 1].slot if resume_blocks else None,
            version=tree.version,
            resume_at=resume_at,
            seen_blocks=seen_blocks,
            loadable_blocks=loadable_blocks if loadable_blocks > resume_blocks else 0,
            reuse=reuse,
        )

    def _why_not(self, chain: KeyChain, reuse: Reuse, read: bool, loads: bool, at: Collection[int] | None) -> NotReused:
        """Why not more is reused, unless a load begins; ``at``: `Match.resume_at`. Looks up no key but that of the first block."""
        if chain.tokens - self._least_tokens < self._block_tokens:
            return NotReused.BELOW_ONE_BLOCK
        if not read:
            return NotReused.NOT_READ if chain.epoch == self._tree.epoch else NotReused.EPOCH
        if reuse.kv_tokens > reuse.resume_tokens:
            if at is not None and not any(reuse.resume_tokens < position <= reuse.kv_tokens for position in at):
                return NotReused.NOT_READ
            return NotReused.MEMORY if loads or not self._device.slots.most_cached else NotReused.STATES_GONE
        alike, same = map(self._device.starts.cached.get, chain.starts or (0, 0))
        if reuse.seen_tokens or (same is not None and same[0] == chain.epoch):
            return NotReused.KV_GONE
        if same is not None:
            return NotReused.EPOCH
        return NotReused.OTHER_SALT if alike is not None and self._tree.get(alike[1]) else NotReused.NO_SUCH_PREFIX

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same result."""
        return match.version == self._tree.version and match.prompt_tokens == match.chain.tokens

    def fresh(self, match: Match) -> Match:
        """The match itself, or a new one with the same limit if it is out of date."""
        if match.version == self._tree.version and match.prompt_tokens == match.chain.tokens:  # as in `is_current`
            return match
        return self.match(match.chain, match.limit_tokens, match.read, match.resume_at)


def kv_depth(tiers: Sequence[DepthTier], keys: Sequence[bytes], depth: int) -> int:
    """Number of leading blocks whose KV is on the device (the first ``depth``) or on any other tier."""
    found = -1
    while found < depth:
        found = depth
        for tier in tiers:
            depth = tier.kv_depth(keys, depth)
    return depth


def _state_depth(tier: DepthTier, keys: Sequence[bytes], after: int, limit: int, depths: Collection[int] | None) -> int:
    """Depth in blocks of the tier's deepest state beyond ``after``, and one of ``depths`` if these are given."""
    if depths is None:
        return tier.state_depth(keys, after, limit)
    while (limit := max((depth for depth in depths if depth <= limit), default=0)) > after:
        depth = tier.state_depth(keys, after, limit)
        if depth <= after or depth in depths:
            return depth
        limit = depth - 1
    return after
