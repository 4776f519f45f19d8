"""`KVEvents`: tells megatron's listeners which KV blocks are cached."""

from __future__ import annotations

from collections.abc import Buffer

import numpy as np

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.requests.scores import ScoreTable
from megatron_hybrid_prefix.upstream.context import ContextSeam


class KVEvents:
    """What a cache keeps with its blocks: their scores. Megatron's listeners learn of each block that comes and goes.

    A block is cached while a tier has it: listeners, such as routers, want to know which prompts are faster here.

    Args:
        context: Passes events on to megatron.
        scores: Log-probs of cached prompts.
    """

    def __init__(self, context: ContextSeam, scores: ScoreTable) -> None:
        self._context, self._scores = context, scores

    def stored(self, chain: KeyChain, first: int, tokens: Buffer) -> None:
        """Blocks of a chain became matchable, from the block with index ``first`` on; ``tokens``, int64, fill them."""
        if not self._context.has_kv_listeners:
            return
        token_ids = np.frombuffer(tokens, np.int64).tolist()
        keys = chain.keys[first : first + len(token_ids) // self._context.block_size_tokens]
        if keys:
            self._context.kv_stored(keys, token_ids, chain.keys[first - 1] if first else None)

    def drop(self, key: bytes) -> None:
        self._scores.drop(key)
        self._context.kv_removed(key)

    def drop_state(self, key: bytes) -> None:
        self._scores.drop_state(key)

    def clear(self) -> None:
        self._scores.clear()
        self._context.kv_cleared()
