"""The matcher: finds what a prompt can reuse. It only reads, and returns an immutable `Match`."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import DepthTier


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
        lost_tokens_no_state: Tokens whose KV is on the device, but that are recomputed because no state was kept that
            deep.
        version: Version of the tree at the time of the match.
        resume_at: Positions where the request may resume; None: anywhere.
        lost_tokens_elsewhere: Tokens that could be skipped without ``resume_at``, but are computed: their state is elsewhere.
        seen_blocks: Number of leading blocks that an earlier prompt had, even if their KV was evicted since (`Ghosts`). 0:
            nothing was evicted.
        loadable_blocks: Depth, in blocks, of a deeper state on a tier below the device; 0: there is none.
    """

    chain: KeyChain
    prompt_tokens: int
    limit_tokens: int
    read: bool
    kv_depth_blocks: int
    path: tuple[Node, ...]
    resume_tokens: int
    source_slot: int | None
    lost_tokens_no_state: int
    version: int
    resume_at: Collection[int] | None = None
    lost_tokens_elsewhere: int = 0
    seen_blocks: int = 0
    loadable_blocks: int = 0

    @property
    def block_ids(self) -> tuple[int, ...]:
        """KV blocks on the device up to ``resume_tokens``, front first."""
        return tuple(node.block_id for node in self.path)


class Matcher:
    """Matches prompts, and repeats matches that are out of date.

    Args:
        tree: The blocks and states on the device.
        tiers: Tiers below the device, nearest first.
        ghosts: Keys of evicted blocks that are remembered.
        block_tokens: Tokens per block.
    """

    def __init__(
        self, tree: PrefixTree, tiers: Sequence[DepthTier], ghosts: Container[bytes], *, block_tokens: int
    ) -> None:
        self._tree, self._tiers, self._ghosts, self._block_tokens = tree, tiers, ghosts, block_tokens

    def match(self, chain: KeyChain, limit_tokens: int, read: bool, resume_at: Collection[int] | None = None) -> Match:
        """Matches ``chain`` against the tree and the tiers below. O(blocks matched). The arguments: see `Match`."""
        tree, tiers, ghosts, block_tokens = self._tree, self._tiers, self._ghosts, self._block_tokens
        read = read and chain.epoch == tree.epoch
        path = tree.path(chain.keys) if read else []
        cached_blocks = kv_depth(tiers, chain.keys, len(path)) if read else 0
        usable_blocks = min(cached_blocks, max(0, limit_tokens) // block_tokens)
        device_blocks = min(len(path), usable_blocks)
        # The request resumes from the deepest state within the limit.
        resume_blocks = device_blocks
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
        seen_blocks = 0
        if ghosts and read:
            seen_blocks = next(
                (depth for depth in range(cached_blocks, len(chain.keys)) if chain.keys[depth] not in ghosts),
                len(chain.keys),
            )
        return Match(
            chain=chain,
            prompt_tokens=chain.tokens,
            limit_tokens=limit_tokens,
            read=read,
            kv_depth_blocks=cached_blocks,
            path=tuple(path[:resume_blocks]),
            resume_tokens=resume_blocks * block_tokens,
            source_slot=path[resume_blocks - 1].slot if resume_blocks else None,
            lost_tokens_no_state=(device_blocks - state_blocks) * block_tokens,
            version=tree.version,
            resume_at=resume_at,
            lost_tokens_elsewhere=(state_blocks - resume_blocks) * block_tokens,
            seen_blocks=seen_blocks,
            loadable_blocks=loadable_blocks if loadable_blocks > resume_blocks else 0,
        )

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same result."""
        return match.version == self._tree.version and match.prompt_tokens == match.chain.tokens

    def fresh(self, match: Match) -> Match:
        """The match itself, or a new one with the same limit if it is out of date."""
        if self.is_current(match):
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
