"""Where the chunks of a prefill end: on a grid counted from the start of the prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGrid:
    """Chunks end at every multiple of ``chunk_tokens`` and of ``block_tokens``."""

    chunk_tokens: int
    block_tokens: int

    def ends(self, start_tokens: int, end_tokens: int) -> list[int]:
        """Chunk ends in (start, end], ascending; the last one is ``end_tokens``."""
        ends = []
        position = start_tokens
        while position < end_tokens:
            next_chunk = position - position % self.chunk_tokens + self.chunk_tokens
            next_block = position - position % self.block_tokens + self.block_tokens
            position = min(next_chunk, next_block, end_tokens)
            ends.append(position)
        return ends

    def max_chunks(self, tokens: int, sequences: int) -> int:
        """Upper bound on the chunks of ``sequences`` spans with ``tokens`` tokens in total; an empty span has one chunk."""
        # A span of n tokens has at most n // c + 1 multiples of c inside, and one chunk more than that.
        chunks = tokens // self.chunk_tokens + 2 * sequences
        if self.block_tokens % self.chunk_tokens:
            chunks += tokens // self.block_tokens + sequences
        return chunks
