"""The matcher: from keys to one immutable value that says what can be reused. It only reads."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.pool.slots import NO_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What of a prompt is cached, and from where it can be resumed.

    Attributes:
        chain: The prompt's keys.
        prompt_tokens: The prompt's length when it was matched.
        limit_tokens: A request may resume here at the latest.
        read: Whether the cache may be read for this request at all.
        kv_depth_blocks: Blocks from the front whose KV is on the device or on the host. Those beyond ``resume_tokens`` are
            of no use: the request computes them into blocks of its own.
        path: Nodes of the blocks that the request will share, up to the state it resumes from.
        resume_tokens: Prompt tokens that need not be computed; ends on a block boundary (but for a preempted request that
            goes on where it was).
        source_slot: Slot of the state at ``resume_tokens``; None when that is 0.
        lost_tokens_no_state: Tokens whose KV is on the device and that are computed again for want of a state.
        version: The tree's when it was matched.
        loadable_path: Where the request could resume deeper, with what is on the host: nodes up to there; else empty.
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
    loadable_path: tuple[Node, ...] = ()
    load_id: int | None = None
    loaded_blocks: tuple[int, ...] = ()

    @property
    def block_ids(self) -> tuple[int, ...]:
        """KV blocks that the request will share or has loaded, front first."""
        return tuple(node.block_id for node in self.path) if self.load_id is None else self.loaded_blocks


def match_prefix(tree: PrefixTree, chain: KeyChain, *, block_tokens: int, limit_tokens: int, read: bool) -> Match:
    """Matches ``chain``: O(blocks matched).

    Args:
        tree: What is cached.
        chain: The prompt's keys.
        block_tokens: Tokens of a block.
        limit_tokens: A request may resume here at the latest (so that at least one token is computed).
        read: False matches nothing.
    """
    path = tree.path(chain.keys) if read else []
    usable_blocks = min(len(path), max(0, limit_tokens) // block_tokens)
    # What is on the device is the front of the path.
    device_blocks = usable_blocks
    while device_blocks and path[device_blocks - 1].block_id == NO_BLOCK:
        device_blocks -= 1
    # The deepest state within the limit. Only there can the request resume, and only up to there does it share KV.
    resume_blocks = device_blocks
    while resume_blocks and path[resume_blocks - 1].slot == NO_SLOT:
        resume_blocks -= 1
    loadable_blocks = usable_blocks
    while loadable_blocks > resume_blocks and path[loadable_blocks - 1].host_slot == NO_SLOT:
        loadable_blocks -= 1
    return Match(
        chain=chain,
        prompt_tokens=chain.tokens,
        limit_tokens=limit_tokens,
        read=read,
        kv_depth_blocks=len(path),
        path=tuple(path[:resume_blocks]),
        resume_tokens=resume_blocks * block_tokens,
        source_slot=path[resume_blocks - 1].slot if resume_blocks else None,
        lost_tokens_no_state=(device_blocks - resume_blocks) * block_tokens,
        version=tree.version,
        loadable_path=tuple(path[:loadable_blocks]) if loadable_blocks > resume_blocks else (),
    )


class Matcher:
    """Matches prompts against what is cached now, and again where a match is out of date.

    Args:
        tree: What is cached.
        loads: Ids of the loads that are not settled.
        block_tokens: Tokens of a block.
    """

    def __init__(self, tree: PrefixTree, loads: Container[int], *, block_tokens: int) -> None:
        self._tree, self._loads, self._block_tokens = tree, loads, block_tokens

    def match(self, chain: KeyChain, limit_tokens: int, read: bool) -> Match:
        """See `match_prefix`; a chain of another weights epoch matches nothing."""
        tree = self._tree
        read = read and chain.epoch == tree.epoch
        return match_prefix(tree, chain, block_tokens=self._block_tokens, limit_tokens=limit_tokens, read=read)

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
