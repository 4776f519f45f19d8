"""`HybridPrefixMambaMetadata`: where each prefilled sequence's state comes from, and which states go to which slots.

Subclasses megatron's per-step Mamba metadata. Two things differ:

- Chunks lie on the absolute token grid: they end at every multiple of the SSM chunk size and of the KV block size, counted
  from position 0 of the request, not from where this step's span starts. So a boundary that may be kept is always the
  end of a chunk, and a request that resumes splits the scan exactly as one that does not.
- A sequence starts from a *source* slot (a checkpoint, or its own live slot), and a list of *writes* says which states
  go to which slots: the final one to the live slot, planned ones to checkpoint slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaMetadata

if TYPE_CHECKING:
    from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions

    from megatron_hybrid_prefix.index.requests import StepPlan

NO_WRITE = -1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpan:
    """The part of one sequence that this step computes.

    Attributes:
        start_tokens: Position of its first token in the request.
        tokens: How many.
        live_slot: Slot of the request's state, where its final state goes.
        plan: What the cache wants of it; None for requests that the cache does not know.
    """

    start_tokens: int
    tokens: int
    live_slot: int
    plan: StepPlan | None


class HybridPrefixMambaMetadata(MambaMetadata):
    """Megatron's Mamba metadata of a step, with sources and writes.

    Attributes:
        prefill_spans: Asked for the spans of so many sequences, in their order; set by the context.
        source_slots: (sequences,) int64, the slot that each prefilled sequence starts from; None before the first prefill.
        write_slots: (writes,) int64, target slots, NO_WRITE where there is nothing to write (padding).
        write_chunks: (writes,) int64, the chunk whose final state goes there.
        write_ends: (writes,) int64, the row of the packed prefill tokens after the one that the state is of.
        write_starts: (writes,) int64, the row where its sequence starts.
        write_sequences: (writes,) int64, its sequence.
    """

    _FIELDS = ("source_slots", "write_slots", "write_chunks", "write_ends", "write_starts", "write_sequences")

    def __init__(self, *, block_tokens: int, checkpoint_slots: int, **fields: Any) -> None:
        super().__init__(max_intermediate_count=0, **fields)
        self.grid = ChunkGrid(chunk_tokens=self.mamba_chunk_size, block_tokens=block_tokens)
        self.checkpoint_slots = checkpoint_slots
        self.max_chunks = self.grid.max_chunks(self.max_tokens, self.max_requests)
        rows = self._max_writes(self.max_tokens, self.max_requests)
        # Fixed addresses, for CUDA graphs; pinned, so that the copy needs no synchronisation.
        self._host_indices = torch.zeros((len(self._FIELDS), rows), dtype=torch.int64).pin_memory()
        self._indices = torch.zeros((len(self._FIELDS), rows), dtype=torch.int64, device=self.device)
        self.prefill_spans: Callable[[int], list[PrefillSpan]] = lambda sequences: []
        for field in self._FIELDS:
            setattr(self, field, None)

    def compute_cpu_metadata(
        self,
        *,
        batch_dimensions: InferenceBatchDimensions,
        padded_batch_dimensions: InferenceBatchDimensions,
        **fields: Any,
    ) -> dict:
        """See upstream; chunks are cut again on the absolute grid, and sources and writes are added."""
        result = super().compute_cpu_metadata(
            batch_dimensions=batch_dimensions, padded_batch_dimensions=padded_batch_dimensions, **fields
        )
        sequences = padded_batch_dimensions.prefill_req_count
        if sequences:
            tokens = padded_batch_dimensions.token_count
            result["padded_max_chunks"] = self.grid.max_chunks(tokens, sequences)
            result["writes"] = self._max_writes(tokens, sequences)
            spans = self.prefill_spans(batch_dimensions.prefill_req_count)
            self._cut_chunks(spans, result["padded_max_chunks"], sequences, result["writes"])
        return result

    def copy_indices(self, *, non_blocking: bool) -> None:
        """Sources and writes to the device; megatron's own copy, which follows, guards the pinned source."""
        self._indices.copy_(self._host_indices, non_blocking=non_blocking)

    def load_from_cpu(self, d: dict) -> None:
        """See upstream."""
        super().load_from_cpu(d)
        if d["padded_prefill_count"]:
            for row, field in enumerate(self._FIELDS):
                count = d["padded_prefill_count"] if field == "source_slots" else d["writes"]
                setattr(self, field, self._indices[row, :count])

    @property
    def intermediate_chunk_indices(self) -> None:
        """Read by megatron's own prefill, which knows neither sources nor writes: an error rather than wrong tokens.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the model's Mamba mixers do not read states by slot: call use_slot_mixers(model)")

    @intermediate_chunk_indices.setter
    def intermediate_chunk_indices(self, value: Any) -> None:
        """Megatron resets it every step."""

    def _update_intermediate_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: megatron's extraction of intermediate states is not used."""

    def _max_writes(self, tokens: int, sequences: int) -> int:
        # A span of n tokens holds at most n // block + 1 block boundaries.
        boundaries = min(self.checkpoint_slots, tokens // self.grid.block_tokens + sequences)
        return sequences + boundaries

    def _cut_chunks(self, spans: list[PrefillSpan], padded_chunks: int, sequences: int, writes: int) -> None:
        """Fills the pinned buffers; sequences beyond the spans are padding: one empty chunk each, nothing written."""
        bounds, of_sequence, last_chunks = [0], [], []
        sources: list[int] = []
        written: list[tuple[int, int, int, int, int]] = []  # slot, chunk, end, start, sequence
        for sequence, span in enumerate(spans):
            row = bounds[-1]
            ends = self.grid.ends(span.start_tokens, span.start_tokens + span.tokens)
            first_chunk = len(of_sequence)
            chunk_of = {position: first_chunk + index for index, position in enumerate(ends)}
            bounds += [row + position - span.start_tokens for position in ends]
            of_sequence += [sequence] * len(ends)
            last_chunks.append(len(of_sequence) - 1)
            written.append((span.live_slot, last_chunks[-1], row + span.tokens, row, sequence))
            plan = span.plan
            sources.append(span.live_slot if plan is None or plan.source_slot is None else plan.source_slot)
            for checkpoint in plan.checkpoints if plan is not None else ():
                position = checkpoint.position_tokens
                end = row + position - span.start_tokens
                written.append((checkpoint.slot, chunk_of[position], end, row, sequence))
        for sequence in range(len(spans), sequences):
            bounds.append(bounds[-1])
            of_sequence.append(sequence)
            last_chunks.append(len(of_sequence) - 1)
        assert len(of_sequence) <= padded_chunks and len(written) <= writes, "metadata sized too small"
        buffers = self._cpu_bufs
        _fill(buffers["cu_chunk_seqlens"], bounds, padded_chunks + 1, bounds[-1])
        _fill(buffers["seq_idx_for_varlen"], of_sequence, padded_chunks, 0)
        _fill(buffers["last_chunk_indices"], last_chunks, sequences, 0)
        _fill(self._host_indices[0], sources, sequences, 0)
        columns = list(zip(*written, strict=True)) or [()] * 5
        for row, (column, padding) in enumerate(zip(columns, (NO_WRITE, 0, 0, 0, 0), strict=True), start=1):
            _fill(self._host_indices[row], column, writes, padding)


def _fill(buffer: torch.Tensor, values: Any, count: int, padding: int) -> None:
    """``buffer[:count]`` gets the values, then padding."""
    buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)
    buffer[len(values) : count] = padding
