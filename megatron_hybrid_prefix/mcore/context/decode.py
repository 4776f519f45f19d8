"""`DecodedStates`: tokens of decoding requests, and checkpoints of their states, which are flushes of their rings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.mcore.context.events import KVEvents
from megatron_hybrid_prefix.upstream.context import ContextSeam


class _DecodeRows:
    """Views of megatron's row bookkeeping, without copies: a step that fills no block makes no torch calls.

    Attributes:
        source: The context's ``token_to_input_ids`` when the views were made. A context makes all its tensors at once: if it
            has another one now, all views are stale.
        tokens: Tokens of the forward, int64.
        live_indices: Live index of each row, int32.
        request_ids: Request of each row.
        begun_tokens: For each row: where the last forward began.
        forward_tokens: For each row: number of tokens in that forward.
    """

    def __init__(self, context: ContextSeam) -> None:
        self.source = context.token_to_input_ids
        self.tokens = memoryview(self.source.numpy())
        self.live_indices = memoryview(context.live_indices.numpy())
        self.request_ids = context.request_ids.numpy()
        self.begun_tokens = context.request_kv_length_offsets.numpy()
        self.forward_tokens = context.request_query_lengths.numpy()

    def processed(self, first: int, last: int) -> NDArray[np.integer]:
        """Computed tokens of each row, (last - first,)."""
        return self.begun_tokens[first:last] + self.forward_tokens[first:last]


class DecodedStates:
    """When a decode fills a block, the block gets its key, and its ring is flushed to its end, into a checkpoint, too.

    Megatron's context keeps only the tokens of the next forward, so those of the running requests are noted here, back to the
    start of the current block. Rows of requests move, live indices do not change. Most steps fill no block: their tokens are
    only noted. Notes are written to rings together, when rows move or the next block may be full.

    Args:
        context: A `HybridPrefixContext`.
        cache: Its cache.
        events: Is told which blocks become matchable.
    """

    def __init__(self, context: Any, cache: HybridPrefixCache, events: KVEvents) -> None:
        self._context, self._cache, self._events = context, cache, events
        self._block_tokens = context.block_size_tokens
        self._width = context.num_speculative_tokens + 1  # most tokens by which a forward advances a request
        # One ring per live index. The start of a block is still there after drafts beyond its end were accepted.
        self._ring_tokens = 2 * (self._block_tokens + self._width)
        self._recent = np.zeros((context.max_requests, self._ring_tokens), dtype=np.int64)
        self._processed = np.zeros(context.max_requests, dtype=np.int64)
        self._rows: _DecodeRows | None = None
        self._indices = b""  # live indices of the noted rows, int32
        # For each noted forward: its tokens as bytes, and with drafts the computed tokens of each row.
        self._notes: list[tuple[bytes, NDArray[np.integer] | None]] = []
        self._quiet_steps = 0  # number of next forwards in which these rows cannot fill a block

    def follow(self) -> None:
        """Track the last forward. Call it after drafts are rewound and before the next forward launches.

        The next forward may overwrite what a ring has before the tokens counted here.
        """
        blocks = self._advance()
        if not blocks:
            return
        # By target slot: with few slots, a request may take the slot that another just got.
        kept: dict[int, tuple[int, int]] = {}
        for request_id, live_index, end_tokens in blocks:
            chain = self._cache.live[request_id].chain
            known = chain.tokens
            tokens = self._recent[live_index, np.arange(known, end_tokens) % self._ring_tokens]
            filled = self._cache.append(request_id, tokens, computed_tokens=end_tokens)
            self._events.stored(chain, known // self._block_tokens, filled)
            slot = self._cache.checkpoint_decoded(request_id, end_tokens)
            if slot is not None:
                kept[slot] = live_index, end_tokens
            words = "request {} filled a block at {}, slot {}"
            self._context.decisions.note(partial(words.format, request_id, end_tokens, slot))
        if kept:
            self._context.moves.launch()  # what was in these slots goes elsewhere first
            self._context.states.flush(*zip(*kept.values(), strict=True), list(kept))

    def _advance(self) -> list[tuple[int, int, int]]:
        """Note the tokens of the last forward.

        Returns:
            The blocks that it filled, in row order: the request, its live index, and the position where the block ends.
        """
        context = self._context
        first, last = context.paused_request_count, context.total_request_count
        if first == last:
            return []
        rows = self._rows
        if rows is None or rows.source is not context.token_to_input_ids:
            rows = self._rows = _DecodeRows(context)
        indices = rows.live_indices[first:last].tobytes()
        # If an index changed its request, a prefill came between.
        prefills = context.num_prefill_requests or len(context.prefilled)
        if not prefills and indices == self._indices:
            self._note(rows, first, last)
            if self._quiet_steps:
                self._quiet_steps -= 1
                return []
        else:
            self._apply_notes()
            decodes = last - first - prefills  # decodes come first
            self._indices = rows.live_indices[first : first + decodes].tobytes()
            if decodes:
                self._note(rows, first, first + decodes)
        before = self._apply_notes()
        own = np.frombuffer(indices, dtype=np.int32)
        found = []
        now = self._processed[own[: len(before)]]
        for row in np.flatnonzero(now // self._block_tokens > before // self._block_tokens).tolist():
            end_tokens = int(now[row]) // self._block_tokens * self._block_tokens
            found.append((int(rows.request_ids[first + row]), int(own[row]), end_tokens))
        processed = self._processed[own] = rows.processed(first, last)
        self._indices = indices
        room = self._block_tokens - processed % self._block_tokens
        self._quiet_steps = int((room.min() - 1) // self._width)
        return found

    def _note(self, rows: _DecodeRows, first: int, last: int) -> None:
        tokens = rows.tokens[: (last - first) * self._width].tobytes()
        # Without drafts each row advances by one token.
        self._notes.append((tokens, rows.processed(first, last) if self._width > 1 else None))

    def _apply_notes(self) -> NDArray[np.int64]:
        """Write the notes to the rings; returns where each row's last forward began, (rows,)."""
        own = np.frombuffer(self._indices, dtype=np.int32)
        before: NDArray[np.int64] = self._processed[own]
        if not self._notes:
            return before
        noted, processed = zip(*self._notes, strict=True)
        self._notes.clear()
        # (steps, rows)
        ends = np.stack(processed) if self._width > 1 else before + np.arange(1, len(noted) + 1)[:, None]
        starts = np.concatenate([before[None], ends[:-1]])
        positions = starts[:, :, None] + np.arange(self._width)
        rows = np.broadcast_to(own[None, :, None], positions.shape)
        tokens = np.frombuffer(b"".join(noted), dtype=np.int64).reshape(positions.shape)
        if self._width > 1:
            kept = positions < ends[:, :, None]  # the others are rejected drafts
            rows, positions, tokens = rows[kept], positions[kept], tokens[kept]
        self._recent[rows, positions % self._ring_tokens] = tokens
        self._processed[own] = ends[-1]
        return starts[-1]
