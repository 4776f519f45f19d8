"""`PromptScores`: which log-probs a forward adds to the `ScoreTable`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.index.inspect import Inspector
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.scores import Kept, ScoreTable
from megatron_hybrid_prefix.pool.slots import NO_SLOT


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """A value that a step has computed, and fills when it is on the host.

    Attributes:
        position_tokens: End of the block.
        is_logits: Whether it is the next logits at that position; False: the scores of the block.
        key: The block's key.
        kept: What to fill.
    """

    position_tokens: int
    is_logits: bool
    key: bytes
    kept: Kept


class PromptScores:
    """Promises and fills log-probs of cached prompts.

    Args:
        table: Where they are kept.
        inspect: Says what is cached.
        block_tokens: Tokens per KV block.
    """

    def __init__(self, table: ScoreTable, inspect: Inspector, *, block_tokens: int) -> None:
        self._table, self._inspect, self._block_tokens = table, inspect, block_tokens

    def wanted_logits(
        self, chain: KeyChain, start_tokens: int, end_tokens: int, writing: Collection[bytes]
    ) -> list[int]:
        """Boundaries in (start, end] whose next logits a forward over [start, end) should keep, ascending.

        These are the boundaries that have a state, or get one in this step, and no next logits yet.

        Args:
            chain: Keys of the prompt.
            start_tokens: First computed position.
            end_tokens: See above.
            writing: Keys of the blocks at whose end this step writes a state.
        """
        found = []
        for depth in self._depths(chain, start_tokens, end_tokens):
            key = chain.keys[depth - 1]
            node = self._inspect.node(key)
            has_state = node is not None and not node.slot == node.host_slot == NO_SLOT
            if (has_state or key in writing) and self._table.next_logits(key) is None:
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
        promises = []
        for depth in self._depths(chain, start_tokens, end_tokens):
            key = chain.keys[depth - 1]
            if self._inspect.node(key) is None:
                break  # not published, or evicted: nothing after it can be reached
            position = depth * self._block_tokens
            if (kept := self._table.promise_block(key, top_n)) is not None:
                promises.append(Promise(position, False, key, kept))
            if position in captured and (kept := self._table.promise_next_logits(key)) is not None:
                promises.append(Promise(position, True, key, kept))
        return promises

    def fill(self, chain: KeyChain, values: Sequence[tuple[Promise, Any, int]]) -> None:
        """Fills promises of one request.

        Args:
            chain: Keys of its prompt.
            values: Each with its value and the size of that in bytes.
        """
        for promise, value, size_bytes in values:
            self._table.fill(promise.key, promise.kept, value, size_bytes)
        if values:
            deepest = max(promise.position_tokens for promise, _, _ in values) // self._block_tokens
            self._table.use(chain.keys[:deepest])
        self._table.trim()

    def withdraw(self, promises: Iterable[Promise]) -> None:
        """Drops promises that will not be filled."""
        for promise in promises:
            self._table.withdraw(promise.key, promise.kept)

    def _depths(self, chain: KeyChain, start_tokens: int, end_tokens: int) -> range:
        """Blocks, by their depth, that end in (start, end]."""
        last = min(end_tokens // self._block_tokens, len(chain.keys))
        return range(start_tokens // self._block_tokens + 1, last + 1)
