"""`HybridPrefixMambaMetadata`: where each prefilled sequence's state comes from, and where its states go.

Subclasses megatron's per-step Mamba metadata. Two things differ:

- Chunks lie on the absolute token grid: they end at every multiple of the SSM chunk size and of the KV block size, counted
  from position 0 of the request, not from where this step's span starts. So a boundary that may be kept is always the
  end of a chunk, and a request that resumes splits the scan exactly as one that does not.
- A sequence starts from a *source* slot (a checkpoint, or its own live slot); its final state goes to its live slot, and
  the states after some of its chunks to checkpoint slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaMetadata

from megatron_hybrid_prefix.pool.slots import NO_SLOT

if TYPE_CHECKING:
    from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions

    from megatron_hybrid_prefix.index.requests import StepPlan


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

    @property
    def source_slot(self) -> int:
        """Slot of the state that the span starts from."""
        return self.live_slot if self.plan is None or self.plan.source_slot is None else self.plan.source_slot


class HybridPrefixMambaMetadata(MambaMetadata):
    """Megatron's Mamba metadata of a step, with sources and targets of the states.

    All tensors are int64 (``chunk_ids`` int32) on the device, and None before the first prefill. Sequences and chunks that
    only pad the step to the size of a CUDA graph are empty and have no targets.

    Attributes:
        prefill_spans: Asked for the spans of so many sequences, in their order; set by the context.
        first_chunks: (sequences + 1,), the chunks of sequence i are [first_chunks[i], first_chunks[i + 1]).
        source_slots: (sequences,), the slot that each sequence starts from.
        live_slots: (sequences,), the slot of its final state, or NO_SLOT.
        chunk_slots: (chunks,), the slot where the state after a chunk goes too, or NO_SLOT.
        chunk_ids: (chunks,), 0, 1, ...
    """

    _FIELDS = ("first_chunks", "source_slots", "live_slots", "chunk_slots")

    def __init__(self, *, block_tokens: int, **fields: Any) -> None:
        super().__init__(max_intermediate_count=0, **fields)
        self.grid = ChunkGrid(chunk_tokens=self.mamba_chunk_size, block_tokens=block_tokens)
        self.max_chunks = self.grid.max_chunks(self.max_tokens, self.max_requests)
        # Fixed addresses, for CUDA graphs; pinned, so that the copy needs no synchronisation. One row a field.
        shape = (len(self._FIELDS), max(self.max_chunks, self.max_requests + 1))
        self._host_indices = torch.zeros(shape, dtype=torch.int64).pin_memory()
        self._indices = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._all_chunks = torch.arange(self.max_chunks, dtype=torch.int32, device=self.device)
        self.prefill_spans: Callable[[int], list[PrefillSpan]] = lambda sequences: []
        self.chunk_ids = None
        for field in self._FIELDS:
            setattr(self, field, None)

    def compute_cpu_metadata(
        self,
        *args: Any,
        batch_dimensions: InferenceBatchDimensions,
        padded_batch_dimensions: InferenceBatchDimensions,
        **kwargs: Any,
    ) -> dict:
        """See upstream; chunks are cut again on the absolute grid, and sources and targets are added."""
        result = super().compute_cpu_metadata(
            *args, batch_dimensions=batch_dimensions, padded_batch_dimensions=padded_batch_dimensions, **kwargs
        )
        sequences = padded_batch_dimensions.prefill_req_count
        if sequences:
            chunks = self.grid.max_chunks(padded_batch_dimensions.token_count, sequences)
            result["padded_max_chunks"] = chunks
            self._cut_chunks(self.prefill_spans(batch_dimensions.prefill_req_count), chunks, sequences)
        return result

    def copy_indices(self) -> None:
        """Sources and targets to the device; megatron's own copy, which follows, guards the pinned source."""
        self._indices.copy_(self._host_indices, non_blocking=True)

    def load_from_cpu(self, d: dict) -> None:
        """See upstream."""
        super().load_from_cpu(d)
        sequences = d["padded_prefill_count"]
        if sequences:
            counts = (sequences + 1, sequences, sequences, d["padded_max_chunks"])
            self.chunk_ids = self._all_chunks[: d["padded_max_chunks"]]
            for field, row, count in zip(self._FIELDS, self._indices, counts, strict=True):
                setattr(self, field, row[:count])

    def slots(self) -> dict[str, torch.Tensor]:
        """Sources and targets of this step by name, as the operations by slot take them."""
        return {field: getattr(self, field) for field in self._FIELDS}

    @property
    def intermediate_chunk_indices(self) -> None:
        """Read by megatron's own prefill, which knows neither sources nor targets: an error rather than wrong tokens.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the model's Mamba mixers do not read states by slot: call use_slot_mixers(model)")

    @intermediate_chunk_indices.setter
    def intermediate_chunk_indices(self, value: Any) -> None:
        """Megatron resets it every step."""

    def _update_intermediate_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: megatron's extraction of intermediate states is not used."""

    def _cut_chunks(self, spans: list[PrefillSpan], padded_chunks: int, sequences: int) -> None:
        """Fills the pinned buffers; sequences beyond the spans are padding, with one empty chunk each."""
        bounds, of_sequence, first_chunks, last_chunks = [0], [], [0], []
        chunk_slots: list[int] = []
        for sequence, span in enumerate(spans):
            kept = {} if span.plan is None else {c.position_tokens: c.slot for c in span.plan.checkpoints}
            row = bounds[-1] - span.start_tokens
            for position in self.grid.ends(span.start_tokens, span.start_tokens + span.tokens):
                bounds.append(row + position)
                of_sequence.append(sequence)
                chunk_slots.append(kept.pop(position, NO_SLOT))
            assert not kept, "a boundary to be kept is not the end of a chunk"
            first_chunks.append(len(of_sequence))
            last_chunks.append(len(of_sequence) - 1)
        for sequence in range(len(spans), sequences):
            bounds.append(bounds[-1])
            of_sequence.append(sequence)
            first_chunks.append(len(of_sequence))
            last_chunks.append(len(of_sequence) - 1)
        assert len(of_sequence) <= padded_chunks, "metadata sized too small"
        sources = [span.source_slot for span in spans]
        buffers = self._cpu_bufs
        _fill(buffers["cu_chunk_seqlens"], bounds, padded_chunks + 1, bounds[-1])
        _fill(buffers["seq_idx_for_varlen"], of_sequence, padded_chunks, 0)
        _fill(buffers["last_chunk_indices"], last_chunks, sequences, 0)
        # Megatron's convolution looks up the window before a token's sequence by this; here it is a slot.
        tokens = torch.tensor([span.tokens for span in spans], dtype=torch.int64)
        by_token = torch.repeat_interleave(torch.tensor(sources, dtype=torch.int64), tokens)
        buffers["conv_seq_idx"][: len(by_token)] = by_token
        rows = zip(
            self._host_indices,
            (first_chunks, sources, [span.live_slot for span in spans], chunk_slots),
            (sequences + 1, sequences, sequences, padded_chunks),
            (0, 0, NO_SLOT, NO_SLOT),
            strict=True,
        )
        for buffer, values, count, padding in rows:
            _fill(buffer, values, count, padding)


def _fill(buffer: torch.Tensor, values: Any, count: int, padding: int) -> None:
    """``buffer[:count]`` gets the values, then padding."""
    buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)
    buffer[len(values) : count] = padding
