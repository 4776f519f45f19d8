"""`PromptScores`: which log-probs a forward adds to the cache (``cache.scores``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.scores import Kept
from megatron_hybrid_prefix.index.tree import Node, PrefixTree
from megatron_hybrid_prefix.pool.slots import NO_SLOT


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """A value that a step has computed, and fills when it is on the host.

    Attributes:
        position_tokens: End of the block.
        is_logits: Whether it is the next logits at that position; False: the scores of the block.
        node: The block's node.
        kept: What to fill.
    """

    position_tokens: int
    is_logits: bool
    node: Node
    kept: Kept


class PromptScores:
    """Promises and fills log-probs of cached prompts.

    Args:
        tree: The prefix tree.
        writing: Keys whose state a forward in flight writes.
        block_tokens: Tokens per KV block.
    """

    def __init__(self, tree: PrefixTree, writing: Collection[bytes], *, block_tokens: int) -> None:
        self._tree, self._writing, self._block_tokens = tree, writing, block_tokens

    @property
    def is_on(self) -> bool:
        """Whether log-probs are kept."""
        return self._tree.scores.budget_bytes > 0

    def wanted_logits(self, chain: KeyChain, start_tokens: int, end_tokens: int) -> list[int]:
        """Boundaries in (start, end] whose next logits a forward over [start, end) should keep, ascending.

        These are the boundaries that have a state, or get one in this step, and no next logits yet.
        """
        if chain.epoch != self._tree.epoch:
            return []
        found = []
        for depth in self._depths(chain, start_tokens, end_tokens):
            key = chain.keys[depth - 1]
            node = self._tree.get(key)
            has_state = node is not None and not node.slot == node.host_slot == NO_SLOT
            if (has_state or key in self._writing) and self._tree.scores.next_logits(node) is None:
                found.append(depth * self._block_tokens)
        return found

    def promise(
        self, chain: KeyChain, start_tokens: int, end_tokens: int, *, top_n: int, captured: Collection[int]
    ) -> list[Promise]:
        """A forward over [start, end) succeeded and was published: promises its scores, and the next logits at ``captured``.

        Pass each promise to `fill` or to `withdraw` before the next forward is published.

        Args:
            chain: Keys of the prompt.
            start_tokens: First computed position. A block boundary, or where the request's last promises ended.
            end_tokens: See above.
            top_n: Likeliest tokens per position.
            captured: Positions of `wanted_logits` whose logits the caller has.
        """
        if chain.epoch != self._tree.epoch:
            return []
        scores, promises = self._tree.scores, []
        for depth in self._depths(chain, start_tokens, end_tokens):
            node = self._tree.get(chain.keys[depth - 1])
            if node is None:
                break  # not published, or evicted: nothing after it can be reached
            position = depth * self._block_tokens
            if (kept := scores.promise_block(node, top_n)) is not None:
                promises.append(Promise(position, False, node, kept))
            if position in captured and (kept := scores.promise_next_logits(node)) is not None:
                promises.append(Promise(position, True, node, kept))
        return promises

    def fill(self, chain: KeyChain, values: Sequence[tuple[Promise, Any, int]]) -> None:
        """Fills promises of one request.

        Args:
            chain: Keys of its prompt.
            values: Each with its value and the size of that in bytes.
        """
        scores = self._tree.scores
        for promise, value, size_bytes in values:
            scores.fill(promise.node, promise.kept, value, size_bytes)
        if values and chain.epoch == self._tree.epoch:
            deepest = max(promise.position_tokens for promise, _, _ in values) // self._block_tokens
            path = (self._tree.get(key) for key in chain.keys[:deepest])
            scores.use([node for node in path if node is not None])
        scores.trim()

    def withdraw(self, promises: Iterable[Promise]) -> None:
        """Drops promises that will not be filled."""
        for promise in promises:
            self._tree.scores.withdraw(promise.node, promise.kept)

    def _depths(self, chain: KeyChain, start_tokens: int, end_tokens: int) -> range:
        """Blocks, by their depth, that end in (start, end]."""
        last = min(end_tokens // self._block_tokens, len(chain.keys))
        return range(start_tokens // self._block_tokens + 1, last + 1)
