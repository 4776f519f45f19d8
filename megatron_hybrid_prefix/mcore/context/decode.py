"""How far running requests have generated and with which tokens (`DecodeProgress`), and what is kept of it (`DecodedStates`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hybrid_prefix.cache import HybridPrefixCache

if TYPE_CHECKING:
    from megatron_hybrid_prefix.upstream.context import ContextSeam


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


class _Rows:
    """Megatron's bookkeeping of the rows, in the same memory: a step that fills no block shall not cost a call of torch.

    Attributes:
        of: The tensor that this was made of. All tensors of a context are made at once, so where the context has another
            one this has to be made again.
        tokens: Of the forward, int64.
        live_slots: Of each row, int32.
        request_ids: Of each row.
        begun_tokens: Of each row, where the last forward began.
        forward_tokens: Of each row, how many tokens that forward had.
    """

    def __init__(self, context: ContextSeam) -> None:
        self.of = context.token_to_input_ids
        self.tokens = memoryview(self.of.numpy())
        self.live_slots = memoryview(context.mamba_metadata.request_to_mamba_state_idx.numpy())
        self.request_ids = context.request_ids.numpy()
        self.begun_tokens = context.request_kv_length_offsets.numpy()
        self.forward_tokens = context.request_query_lengths.numpy()

    def processed(self, first: int, last: int) -> NDArray[np.integer]:
        """Tokens of each row that have been computed, (last - first,)."""
        tokens: NDArray[np.integer] = self.begun_tokens[first:last] + self.forward_tokens[first:last]
        return tokens


class DecodeProgress:
    """Tokens of the running requests, by live slot, as far back as a block may begin.

    Megatron's context keeps the tokens of the next forward only, and rows of requests move; live slots do not. Most steps
    fill no block: they are only noted, and taken in together when rows moved, or when the next block may be full.

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
        self._rows: _Rows | None = None
        self._slots = b""  # live slots of the rows that the notes are about, int32
        # A forward's tokens as bytes, and how far rows got with it where drafts were accepted or not.
        self._notes: list[tuple[bytes, NDArray[np.integer] | None]] = []
        self._quiet_steps = 0  # forwards to come in which these rows fill no block

    def advance(self, context: ContextSeam) -> list[FilledBlock]:
        """Notes what the last forward processed; returns the blocks that were filled, in the order of the rows."""
        first, last = context.paused_request_count, context.total_request_count
        if first == last:
            return []
        rows = self._rows
        if rows is None or rows.of is not context.token_to_input_ids:
            rows = self._rows = _Rows(context)
        slots = rows.live_slots[first:last].tobytes()
        # A slot that went to another request was in a prefill since.
        if not context.num_prefill_requests and slots == self._slots:
            self._note(rows, first, last)
            if self._quiet_steps:
                self._quiet_steps -= 1
                return []
        else:
            self._take_in()
            decodes = last - first - context.num_prefill_requests  # they come first
            self._slots = rows.live_slots[first : first + decodes].tobytes()
            if decodes:
                self._note(rows, first, first + decodes)
        before = self._take_in()
        own = np.frombuffer(slots, dtype=np.int32)
        found = []
        now = self._processed[own[: len(before)]]
        for row in np.flatnonzero(now // self._block_tokens > before // self._block_tokens).tolist():
            end_tokens = int(now[row]) // self._block_tokens * self._block_tokens
            found.append(
                FilledBlock(
                    request_id=int(rows.request_ids[first + row]),
                    live_slot=int(own[row]),
                    end_tokens=end_tokens,
                    forward_token=end_tokens - int(before[row]) - 1,
                )
            )
        processed = self._processed[own] = rows.processed(first, last)
        self._slots = slots
        room = self._block_tokens - processed % self._block_tokens
        self._quiet_steps = int((room.min() - 1) // self._width)
        return found

    def processed(self, live_slot: int) -> int:
        """Tokens of the request in ``live_slot`` that have been computed, as of the last forward that was noted."""
        self._take_in()
        return int(self._processed[live_slot])

    def tokens(self, live_slot: int, start: int, end: int) -> NDArray[np.int64]:
        """Tokens of the request in ``live_slot`` at positions [start, end): generated ones, at most a block of them."""
        tokens: NDArray[np.int64] = self._recent[live_slot, np.arange(start, end) % self._ring_tokens]
        return tokens

    def _note(self, rows: _Rows, first: int, last: int) -> None:
        tokens = rows.tokens[: (last - first) * self._width].tobytes()
        # Without drafts each row gets one token further.
        self._notes.append((tokens, rows.processed(first, last) if self._width > 1 else None))

    def _take_in(self) -> NDArray[np.int64]:
        """Writes what was noted to the rings; returns where each row's last forward began, (rows,)."""
        own = np.frombuffer(self._slots, dtype=np.int32)
        before: NDArray[np.int64] = self._processed[own]
        if not self._notes:
            return before
        noted, processed = zip(*self._notes, strict=True)
        self._notes.clear()
        ends = (
            np.stack(processed) if self._width > 1 else before + np.arange(1, len(noted) + 1)[:, None]
        )  # (steps, rows)
        starts = np.concatenate([before[None], ends[:-1]])
        positions = starts[:, :, None] + np.arange(self._width)
        rows = np.broadcast_to(own[None, :, None], positions.shape)
        tokens = np.frombuffer(b"".join(noted), dtype=np.int64).reshape(positions.shape)
        if self._width > 1:
            kept = positions < ends[:, :, None]  # the others are drafts that were not accepted
            rows, positions, tokens = rows[kept], positions[kept], tokens[kept]
        self._recent[rows, positions % self._ring_tokens] = tokens
        self._processed[own] = ends[-1]
        last_starts: NDArray[np.int64] = starts[-1]
        return last_starts


class DecodedStates:
    """Where a decode fills a block, the block gets its key, and the state at its end is kept.

    Args:
        context: A `HybridPrefixContext` with a cache.
        cache: Its cache.
        note: Takes a decision that all ranks have to take alike, as a function that says it in words.
        keep: Whether states are kept; else only the tokens are followed.
    """

    def __init__(
        self, context: Any, cache: HybridPrefixCache, note: Callable[[Callable[[], str]], None], *, keep: bool
    ) -> None:
        self._context, self._cache, self._note, self._keep = context, cache, note, keep
        self._progress = DecodeProgress(
            rows=context.max_requests, block_tokens=context.block_size_tokens, drafts=context.num_speculative_tokens
        )

    def computed_tokens(self, live_slot: int) -> int:
        """Tokens of the request in ``live_slot`` that have been computed, as of the last forward."""
        return self._progress.processed(live_slot)

    def follow(self) -> None:
        """To be called when drafts are rewound, and before the next forward is launched.

        Live states are then, in the order of the stream, those after the tokens counted here, and the speculative ones still
        those after each token of the last forward.
        """
        blocks = self._progress.advance(self._context)
        if not blocks or not self._keep:
            return
        copies: dict[int, tuple[int, int]] = {}  # by target: with few slots, one request's may go to the next at once
        for block in blocks:
            known = self._cache.inspect.sequence_tokens(block.request_id)
            tokens = self._progress.tokens(block.live_slot, known, block.end_tokens)
            self._cache.append(block.request_id, tokens, computed_tokens=block.end_tokens)
            slot = self._cache.checkpoint_decoded(block.request_id, block.end_tokens)
            if slot is not None:
                copies[slot] = block.live_slot, block.forward_token
            self._note(partial(_in_words, block, slot))
        if not copies:
            return
        if self._context.host_moves is not None:
            self._context.host_moves.launch()  # what was in these slots
        live_slots, forward_tokens = zip(*copies.values(), strict=True)
        self._context.states.copy_decoded(list(copies), list(live_slots), list(forward_tokens))


def _in_words(block: FilledBlock, slot: int | None) -> str:
    return f"request {block.request_id} filled a block at {block.end_tokens}, slot {slot}"
