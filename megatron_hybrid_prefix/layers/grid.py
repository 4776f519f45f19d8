"""Where the chunks of a prefill end: on a grid that is counted from the start of the prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGrid:
    """Where chunks end: at every multiple of ``chunk_tokens`` and of ``block_tokens``."""

    chunk_tokens: int
    block_tokens: int

    def ends(self, start_tokens: int, end_tokens: int) -> list[int]:
        """Positions in (start, end] where chunks of the span end, ascending; the last is ``end_tokens``."""
        ends = []
        position = start_tokens
        while position < end_tokens:
            next_chunk = position - position % self.chunk_tokens + self.chunk_tokens
            next_block = position - position % self.block_tokens + self.block_tokens
            position = min(next_chunk, next_block, end_tokens)
            ends.append(position)
        return ends

    def max_chunks(self, tokens: int, sequences: int) -> int:
        """Chunks that spans of ``tokens`` in all can have at most; an empty span has one."""
        # A span of n tokens holds at most n // c + 1 inner multiples of c, and one chunk more than inner multiples.
        chunks = tokens // self.chunk_tokens + 2 * sequences
        if self.block_tokens % self.chunk_tokens:
            chunks += tokens // self.block_tokens + sequences
        return chunks
