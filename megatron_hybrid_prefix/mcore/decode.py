"""`DecodeProgress`: how far running requests have generated, and with which tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.context import HybridPrefixContext


class FilledBlock(NamedTuple):
    """A request in decode filled a block in the last forward.

    Attributes:
        request_id: Whose.
        live_slot: Where its state is.
        end_tokens: Position where the block ends.
        forward_token: Which of the request's tokens in that forward was the block's last, from 0; the last one of the
            forward that was accepted, unless drafts beyond the block's end were accepted too.
    """

    request_id: int
    live_slot: int
    end_tokens: int
    forward_token: int


class DecodeProgress:
    """Tokens of the running requests, by live slot, as far back as a block may begin.

    Megatron's context keeps the tokens of the next forward only, and rows of requests move; live slots do not.

    Args:
        rows: Requests that run at a time; live slots are below it.
        block_tokens: Tokens of a KV block.
        drafts: Tokens drafted for speculative decoding; a forward may take a request so many tokens further, and one.
    """

    def __init__(self, *, rows: int, block_tokens: int, drafts: int) -> None:
        self._block_tokens = block_tokens
        self._width = drafts + 1
        # A ring each: what a block begins with is still there when drafts beyond its end have been accepted.
        self._ring_tokens = 2 * (block_tokens + self._width)
        self._recent = np.zeros((rows, self._ring_tokens), dtype=np.int64)
        self._processed = np.zeros(rows, dtype=np.int64)
        self._steps = np.arange(self._width)

    def advance(self, context: HybridPrefixContext) -> list[FilledBlock]:
        """Notes what the last forward processed; returns the blocks that were filled, in the order of the rows."""
        first, last = context.paused_request_count, context.total_request_count
        if first == last:
            return []
        slots = context.mamba_metadata.request_to_mamba_state_idx[first:last].numpy()
        processed = (context.request_kv_length_offsets[first:last] + context.request_query_lengths[first:last]).numpy()
        decodes = last - first - context.num_prefill_requests  # they come first
        found = []
        if decodes:
            own, now = slots[:decodes], processed[:decodes]
            before = self._processed[own]
            tokens = context.token_to_input_ids[: decodes * self._width].numpy().reshape(decodes, self._width)
            self._recent[own[:, None], (before[:, None] + self._steps) % self._ring_tokens] = tokens
            filled = now // self._block_tokens > before // self._block_tokens
            for row in np.flatnonzero(filled).tolist():
                end_tokens = int(now[row]) // self._block_tokens * self._block_tokens
                found.append(
                    FilledBlock(
                        request_id=int(context.request_ids[first + row]),
                        live_slot=int(own[row]),
                        end_tokens=end_tokens,
                        forward_token=end_tokens - int(before[row]) - 1,
                    )
                )
        self._processed[slots] = processed
        return found

    def tokens(self, live_slot: int, start: int, end: int) -> np.ndarray:
        """Tokens of the request in ``live_slot`` at positions [start, end): generated ones, at most a block of them."""
        return self._recent[live_slot, np.arange(start, end) % self._ring_tokens]
