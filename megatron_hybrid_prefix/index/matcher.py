"""The matcher: from keys to one immutable value that says what can be reused. It only reads."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import DepthTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What of a prompt is cached, and from where it can be resumed.

    Attributes:
        chain: The prompt's keys.
        prompt_tokens: The prompt's length when it was matched.
        limit_tokens: A request may resume here at the latest.
        read: Whether the cache may be read for this request at all.
        kv_depth_blocks: Blocks from the front whose KV is in any tier. Those beyond ``resume_tokens`` are
            of no use: the request computes them into blocks of its own.
        path: Nodes of the blocks that the request will share, up to the state it resumes from.
        resume_tokens: Prompt tokens that need not be computed; ends on a block boundary (but for a preempted request that
            goes on where it was).
        source_slot: Slot of the state at ``resume_tokens``; None when that is 0.
        lost_tokens_no_state: Tokens whose KV is on the device and that are computed again for want of a state.
        version: The tree's when it was matched.
        loadable_blocks: Where the request could resume deeper, with what is in the tiers below the device; else 0.
        load_id: Of a request whose load has begun.
        loaded_blocks: Then the KV blocks that it holds up to ``resume_tokens``, shared ones and those that are loaded.
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
    loadable_blocks: int = 0
    load_id: int | None = None
    loaded_blocks: tuple[int, ...] = ()

    @property
    def block_ids(self) -> tuple[int, ...]:
        """KV blocks that the request will share or has loaded, front first."""
        return tuple(node.block_id for node in self.path) if self.load_id is None else self.loaded_blocks


def match_prefix(
    tree: PrefixTree,
    chain: KeyChain,
    *,
    tiers: Sequence[DepthTier] = (),
    block_tokens: int,
    limit_tokens: int,
    read: bool,
) -> Match:
    """Matches ``chain``: O(blocks matched).

    Args:
        tree: What is on the device.
        chain: The prompt's keys.
        tiers: Those below the device, the nearest first.
        block_tokens: Tokens of a block.
        limit_tokens: A request may resume here at the latest (so that at least one token is computed).
        read: False matches nothing.
    """
    path = tree.path(chain.keys) if read else []
    kv_depth = _kv_depth(tiers, chain.keys, len(path)) if read else 0
    usable_blocks = min(kv_depth, max(0, limit_tokens) // block_tokens)
    device_blocks = min(len(path), usable_blocks)
    # The deepest state within the limit. Only there can the request resume, and only up to there does it share KV.
    resume_blocks = device_blocks
    while resume_blocks and path[resume_blocks - 1].slot == NO_SLOT:
        resume_blocks -= 1
    loadable_blocks = resume_blocks
    for tier in tiers:
        loadable_blocks = tier.state_depth(chain.keys, loadable_blocks, usable_blocks)
    return Match(
        chain=chain,
        prompt_tokens=chain.tokens,
        limit_tokens=limit_tokens,
        read=read,
        kv_depth_blocks=kv_depth,
        path=tuple(path[:resume_blocks]),
        resume_tokens=resume_blocks * block_tokens,
        source_slot=path[resume_blocks - 1].slot if resume_blocks else None,
        lost_tokens_no_state=(device_blocks - resume_blocks) * block_tokens,
        version=tree.version,
        loadable_blocks=loadable_blocks if loadable_blocks > resume_blocks else 0,
    )


def _kv_depth(tiers: Sequence[DepthTier], keys: Sequence[bytes], depth: int) -> int:
    """Blocks from the front whose KV is on the device, up to ``depth``, or in any tier."""
    found = -1
    while found < depth:
        found = depth
        for tier in tiers:
            depth = tier.kv_depth(keys, depth)
    return depth


class Matcher:
    """Matches prompts against what is cached now, and again where a match is out of date.

    Args:
        tree: What is on the device.
        tiers: Those below it, the nearest first.
        loads: Ids of the loads that are not settled.
        block_tokens: Tokens of a block.
    """

    def __init__(
        self, tree: PrefixTree, tiers: Sequence[DepthTier], loads: Container[int], *, block_tokens: int
    ) -> None:
        self._tree, self._tiers, self._loads, self._block_tokens = tree, tiers, loads, block_tokens

    def match(self, chain: KeyChain, limit_tokens: int, read: bool) -> Match:
        """See `match_prefix`; a chain of another weights epoch matches nothing."""
        tree = self._tree
        read = read and chain.epoch == tree.epoch
        return match_prefix(
            tree, chain, tiers=self._tiers, block_tokens=self._block_tokens, limit_tokens=limit_tokens, read=read
        )

    def is_current(self, match: Match) -> bool:
        """Whether matching again would give the same."""
        if match.load_id is not None:
            return match.load_id in self._loads
        return match.version == self._tree.version and match.prompt_tokens == match.chain.tokens

    def fresh(self, match: Match) -> Match:
        """The match, made again at the same limit if it is out of date."""
        if self.is_current(match):
            return match
        return self.match(match.chain, match.limit_tokens, match.read)
