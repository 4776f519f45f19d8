"""`PrefillStep` and `DecodeStep`: describe what a step prefills and decodes, for recurrent layers of any kind.

- A sequence starts from a *source* slot (a checkpoint, or its own live slot). Its final state goes to its live slot. The
  states after some of its chunks go to checkpoint slots. A slot is named by its row in the tensors of states.
- Chunks lie on the absolute token grid: they end at every multiple of the kind's chunk quantum and of the KV block size,
  counted from position 0 of the request, not from the start of this step's span. So every boundary is the end of a chunk,
  and a request that resumes splits the scan exactly like a request without a hit.
- A quantum may be a fraction. Where its denominator is 3, chunks end at thirds of tokens, and their bounds count thirds.

Each quantum has its own `Chunks`. All arrays share one pinned buffer, which one copy sends to the device. Device addresses
are fixed, as CUDA graphs require. What never changes is sent, too: memory on the device may be lost while an engine is suspended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hybrid_prefix.ops.convolution import convolve_from_slots, write_conv_windows
from megatron_hybrid_prefix.ops.rings import OpenChunks, OpenRows, RingRows
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.ops.state_codes import keep_slots
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.support.arithmetic import round_up


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

    def begin(self, position_tokens: Any) -> Any:
        """Where the chunk begins that is open after so many tokens, integers; the position itself at the end of a chunk."""
        return position_tokens - np.minimum(position_tokens % self.chunk_tokens, position_tokens % self.block_tokens)

    def max_chunks(self, tokens: int, sequences: int) -> int:
        """Upper bound on the chunks of ``sequences`` spans with ``tokens`` tokens in total; an empty span has one chunk."""
        # A span of n tokens has at most n // c + 1 multiples of c inside, and one chunk more than that.
        chunks = tokens // self.chunk_tokens + 2 * sequences
        if self.block_tokens % self.chunk_tokens:
            chunks += tokens // self.block_tokens + sequences
        return chunks


_ALIGNMENT_BYTES = 16
Quantum = int | Fraction
"""Chunk quantum of a kind, in tokens. Its multiples that are whole tokens are those of its numerator."""


def grid_tokens(quanta: Iterable[Quantum]) -> int:
    """At multiples of it, chunks of all these quanta end."""
    return math.lcm(*(quantum.numerator for quantum in quanta))


_Integers = NDArray[np.integer]
type Parts = Mapping[str, torch.Tensor]
"""A layer's states, or rings, by component name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpan:
    """The part of one sequence that a step computes.

    Attributes:
        start_tokens: Position of its first token in the request.
        tokens: Number of tokens.
        source_slot: Slot of the state that it starts from.
        live_slot: Slot of the request's live state, for its final state.
        kept: Checkpoints to write, inside the span or at its end: slots by position, in tokens of the request.
        ring: The request's ring, by its live index.
    """

    start_tokens: int
    tokens: int
    source_slot: int
    live_slot: int
    kept: Mapping[int, int] = field(default_factory=dict)
    ring: int = 0


@dataclass(slots=True)
class Chunks:
    """The chunks of a step for one quantum, on the device. Padding chunks are empty and have no slot.

    Attributes:
        first: (sequences + 1,) int64, the chunks of sequence i are [first[i], first[i + 1]).
        slots: (chunks,) int64, the slot for the state after a chunk in what `PrefillStep.begin` gave, or NO_SLOT.
        bounds: (chunks + 1,) int32, chunk i is rows [bounds[i], bounds[i + 1]) of the prefilled tokens; see `Quantum`.
    """

    first: torch.Tensor
    slots: torch.Tensor
    bounds: torch.Tensor


def _allocate(
    sizes: Sequence[tuple[str, int, type[np.int32 | np.int64]]], device: torch.device | int | str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, _Integers], dict[str, torch.Tensor]]:
    """A pinned and a device buffer with the same layout, and the arrays in each by name (numpy, torch).

    Args:
        sizes: Name, length and type of each array.
        device: The device.
    """
    offsets, total = [], 0
    for _, length, dtype in sizes:
        offsets.append(total)
        total += round_up(length * dtype().itemsize, _ALIGNMENT_BYTES)
    pinned = torch.zeros(total, dtype=torch.uint8).pin_memory()
    on_device = torch.zeros(total, dtype=torch.uint8, device=device)
    arrays: dict[str, _Integers] = {}
    tensors: dict[str, torch.Tensor] = {}
    for (name, length, dtype), offset in zip(sizes, offsets, strict=True):
        part = slice(offset, offset + length * dtype().itemsize)
        arrays[name] = pinned[part].numpy().view(dtype)
        tensors[name] = on_device[part].view(torch.int64 if dtype is np.int64 else torch.int32)
    return pinned, on_device, arrays, tensors


class PrefillStep:
    """See the module. Sequences that pad the step to the size of a CUDA graph are empty and write no states.

    Args:
        quanta: Chunk quanta of the layer kinds, in tokens.
        block_tokens: Tokens per KV block.
        max_tokens: Maximum tokens of a step.
        max_sequences: Maximum sequences of a step.
        device: Device of the layers.
        is_open: Whether the last chunk of a sequence stays open, for a decode with a prefill's bits: where a chunk is open, the live slot
            gets the state before it, and the ring its tokens (`leave_open`).
        encodes: Whether checkpoints are kept in another form than live states. Those of a layer are written in the form of live states,
            numbered from 0 on, and encoded after it (`begin`, `keep`).

    Attributes:
        buffer: uint8, device memory of the attributes below.
        bounds: (sequences + 1,) int32, sequence i is rows [bounds[i], bounds[i + 1]) of the prefilled tokens.
        source_slots: (sequences,) int64, the slot that each sequence starts from.
        live_slots: (sequences,) int64, the slot for its final state, or NO_SLOT.
        token_sources: (tokens,) int32, the source slot of each token's sequence.
        token_starts: (tokens,) int32, the row where each token's sequence starts.
        wrong: (tokens,) int32, zero when the step begins: layers mark tokens whose inputs are not finite (``ops/elementwise.py``).
        slots: By quantum, source and target slots: arguments of the operations in ``ops/``.
        chunks: By quantum. Empty before the first prefill, as ``slots``. The tensors above (not ``buffer``) do not exist before it.
    """

    bounds: torch.Tensor
    source_slots: torch.Tensor
    live_slots: torch.Tensor
    token_sources: torch.Tensor
    token_starts: torch.Tensor

    def __init__(
        self,
        *,
        quanta: Iterable[Quantum],
        block_tokens: int,
        max_tokens: int,
        max_sequences: int,
        device: torch.device | int | str,
        is_open: bool = False,
        encodes: bool = False,
    ) -> None:
        self.is_open, self.encodes, self._block_tokens = is_open, encodes, block_tokens
        self._grids = {
            each: ChunkGrid(chunk_tokens=each.numerator, block_tokens=block_tokens * each.denominator)
            for each in sorted(set(quanta))
        }
        most_chunks = {q: grid.max_chunks(max_tokens * q.denominator, max_sequences) for q, grid in self._grids.items()}
        sizes: list[tuple[str, int, type[np.int32 | np.int64]]]
        sizes = [("source", max_sequences, np.int64), ("live", max_sequences, np.int64)]
        for quantum, chunks in most_chunks.items():
            sizes += [(f"first{quantum}", max_sequences + 1, np.int64), (f"slots{quantum}", chunks, np.int64)]
            sizes += [(f"windows{quantum}", chunks * encodes, np.int64)]
        sizes += [(name, self._most_kept(max_tokens, max_sequences), np.int64) for name in ("kept", "numbers")]
        sizes += [("tokens", max_tokens * is_open, np.int64)]
        sizes += [("bounds", max_sequences + 1, np.int32)]
        sizes += [("token_source", max_tokens, np.int32), ("token_start", max_tokens, np.int32)]
        for quantum, chunks in most_chunks.items():
            sizes += [(f"bounds{quantum}", chunks + 1, np.int32)]
            if is_open:
                sizes += [(f"live{quantum}", max_sequences, np.int64), (f"copied{quantum}", max_sequences, np.int64)]
                sizes += [(f"scanned{quantum}", chunks, np.int64), (f"entries{quantum}", max_tokens, np.int64)]
        self._pinned, self.buffer, self._arrays, self._tensors = _allocate(sizes, device)
        for name in ("numbers", "tokens"):
            self._arrays[name][:] = np.arange(len(self._arrays[name]))
        self.wrong = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._sizes, self._kept = (0, 0), 0
        self._checkpoints: dict[str, Sequence[torch.Tensor]] = {}  # of a layer, those that `keep` writes
        self._shown: tuple[int, int] | None = None
        self.chunks: dict[Quantum, Chunks] = {}
        self.slots: dict[Quantum, dict[str, torch.Tensor]] = {}

    def prepare(self, spans: Sequence[PrefillSpan], *, tokens: int, sequences: int) -> None:
        """Describe the next step; the device has it after `copy`, the attributes show it after `show`.

        Args:
            spans: One span per sequence, in the order of their tokens.
            tokens: Tokens of the step, padding included.
            sequences: Sequences of the step, padding included.
        """
        sources = [span.source_slot for span in spans]
        lengths = [span.tokens for span in spans]
        ends = np.cumsum(lengths, dtype=np.int32) if lengths else np.zeros(0, np.int32)
        starts = ends - np.array(lengths, dtype=np.int32)
        self._fill("source", sources, sequences, 0)
        self._fill("live", [span.live_slot for span in spans], sequences, NO_SLOT)
        total = int(ends[-1]) if lengths else 0
        self._arrays["bounds"][0] = 0
        self._arrays["bounds"][1 : len(spans) + 1] = ends
        self._arrays["bounds"][len(spans) + 1 : sequences + 1] = total
        self._fill("token_source", np.repeat(sources, lengths) if lengths else (), tokens, 0)
        self._fill("token_start", np.repeat(starts, lengths) if lengths else (), tokens, 0)
        for quantum, grid in self._grids.items():
            chunks = grid.max_chunks(tokens * quantum.denominator, sequences)
            self._cut(quantum, grid, spans, chunks=chunks, sequences=sequences)
            if self.encodes:  # what is encoded later is numbered from 0 on
                slots = self._arrays[f"slots{quantum}"][:chunks]
                self._fill(f"windows{quantum}", slots, chunks, NO_SLOT)
                kept = slots[slots >= 0]
                slots[slots >= 0] = np.arange(len(kept))
                self._fill("kept", kept, self._most_kept(tokens, sequences), NO_SLOT)
                self._kept = len(kept)
            if self.is_open:
                self._fill(f"entries{quantum}", (), tokens, NO_SLOT)
                self._leave_open(quantum, grid, spans, chunks=chunks, sequences=sequences)
        self._sizes = (tokens, sequences)

    def copy(self) -> None:
        """Copy the prepared step to the device. Do not call `prepare` again before this copy is done."""
        self.buffer.copy_(self._pinned, non_blocking=True)
        self.wrong.zero_()

    def show(self) -> None:
        """Set the attributes to the step that was prepared last."""
        tokens, sequences = self._sizes
        if self._shown == self._sizes:
            return
        self._shown = self._sizes
        own = self._tensors
        self.bounds = own["bounds"][: sequences + 1]
        self.source_slots, self.live_slots = own["source"][:sequences], own["live"][:sequences]
        self.token_sources, self.token_starts = own["token_source"][:tokens], own["token_start"][:tokens]
        for quantum, grid in self._grids.items():
            count = grid.max_chunks(tokens * quantum.denominator, sequences)
            self.chunks[quantum] = Chunks(
                first=own[f"first{quantum}"][: sequences + 1],
                slots=own[f"slots{quantum}"][:count],
                bounds=own[f"bounds{quantum}"][: count + 1],
            )
            slots = {"first_chunks": self.chunks[quantum].first, "chunk_slots": self.chunks[quantum].slots}
            self.slots[quantum] = slots | {"source_slots": self.source_slots, "live_slots": self.live_slots}

    def begin(self, states: Parts, checkpoints: Mapping[str, Sequence[torch.Tensor]]) -> Parts:
        """Where a layer's prefill writes the states after chunks, if they are encoded; ``checkpoints``: of the layer (`SharedMemory.parts`)."""
        self._checkpoints = dict(checkpoints)
        captures = self.buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        most = self._most_kept(*self._sizes) if captures else max(1, self._kept)
        return {name: each.new_empty(most, *each.shape[1:]) for name, each in states.items()}

    def keep(self, kept: Parts) -> None:
        """After it: encode what it wrote there into the layer's checkpoints."""
        for name, parts in self._checkpoints.items():
            written = kept[name]
            keep_slots(written[None], parts, *(self._tensors[each][: len(written)] for each in ("numbers", "kept")))

    def _most_kept(self, tokens: int, sequences: int) -> int:
        """Upper bound on the checkpoints of a step, which are at ends of blocks; 0 if they need no encoding."""
        return (tokens // self._block_tokens + sequences) * self.encodes

    def convolve(
        self,
        quantum: Quantum,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: Parts,
        kept: Parts,
        name: str,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`convolve_from_slots`, and then `write_conv_windows`, of a layer with this quantum; and the slots of its scan, as arguments.

        Windows are the component ``name`` of ``states``. They are never encoded: those of checkpoints do not go through ``kept``.
        """
        windows, kept_windows = states[name], kept[name]
        where = {"sources": self.token_sources, "starts": self.token_starts, "wrong": self.wrong}
        convolved = convolve_from_slots(x, windows, weight.to(windows.dtype), bias, **where)
        bounds, slots = self.chunks[quantum].bounds, self.slots[quantum]
        whole = bounds if quantum.denominator == 1 else bounds // quantum.denominator
        of_windows = slots
        if self.encodes:
            (windows_of_checkpoints,) = self._checkpoints.pop(name)
            kept_windows = windows_of_checkpoints[0]
            of_windows = slots | {"chunk_slots": self._tensors[f"windows{quantum}"][: len(slots["chunk_slots"])]}
        write_conv_windows(x, windows, chunk_bounds=whole, kept=kept_windows, **of_windows)  # sources are read before
        return convolved, self.slots_of_states(quantum) if self.is_open else slots

    def slots_of_states(self, quantum: Quantum) -> dict[str, torch.Tensor]:
        """`slots` for what is written at ends of chunks alone: where the last is open, the live slot is that of an earlier one."""
        slots = self.slots[quantum]
        live, scanned = self._tensors[f"live{quantum}"], self._tensors[f"scanned{quantum}"]
        return slots | {
            "live_slots": live[: len(self.live_slots)],
            "chunk_slots": scanned[: len(slots["chunk_slots"])],
        }

    def leave_open(self, quantum: int, states: torch.Tensor, *left: tuple[torch.Tensor, torch.Tensor]) -> None:
        """After a scan, what a decode goes on from: the state before each open chunk, and the chunk's tokens.

        Args:
            quantum: Of the layer.
            states: (slots, *shape), the layer's.
            left: Each a ring (rings, chunk, *shape), and the step's tokens (tokens, *shape), contiguous inside a token.
        """
        copied = self._tensors[f"copied{quantum}"][: len(self.live_slots)]
        copy_slots(states[None], states[None], copied, self.live_slots)
        for ring, tokens in left:
            entries = self._tensors[f"entries{quantum}"][: len(tokens)]
            copy_slots(tokens[None], ring.flatten(0, 1)[None], self._tensors["tokens"][: len(tokens)], entries)

    def _leave_open(
        self, quantum: Quantum, grid: ChunkGrid, spans: Sequence[PrefillSpan], *, chunks: int, sequences: int
    ) -> None:
        """The live slot of a sequence with an open chunk is that of the chunk before, or gets a copy of a checkpoint or the source."""
        first, bounds, slots = (self._arrays[f"{name}{quantum}"] for name in ("first", "bounds", "slots"))
        scanned, live, copied = slots[:chunks].copy(), [], []
        for number, span in enumerate(spans):
            end = span.start_tokens + span.tokens
            begin, last = int(grid.begin(end)), int(first[number + 1]) - 1
            if begin == end:
                live.append(span.live_slot)
                copied.append(NO_SLOT)
                continue
            before = span.source_slot if begin <= span.start_tokens else int(slots[last - 1])
            if before == NO_SLOT:
                scanned[last - 1] = span.live_slot
            live.append(NO_SLOT)
            copied.append(NO_SLOT if before == span.live_slot else before)
            entries, row = self._arrays[f"entries{quantum}"], int(bounds[last + 1])
            entries[row - (end - begin) : row] = np.arange(end - begin) + span.ring * quantum.numerator
        self._fill(f"scanned{quantum}", scanned, chunks, NO_SLOT)
        self._fill(f"live{quantum}", live, sequences, NO_SLOT)
        self._fill(f"copied{quantum}", copied, sequences, NO_SLOT)

    def _cut(
        self, quantum: Quantum, grid: ChunkGrid, spans: Sequence[PrefillSpan], *, chunks: int, sequences: int
    ) -> None:
        bounds, first, parts = [0], [0], quantum.denominator
        slots: list[int] = []
        for span in spans:
            kept = {position * parts: slot for position, slot in span.kept.items()}
            start, end = span.start_tokens * parts, (span.start_tokens + span.tokens) * parts
            row = bounds[-1] - start
            for position in grid.ends(start, end):
                bounds.append(row + position)
                slots.append(kept.pop(position, NO_SLOT))
            assert not kept, "a checkpoint is not at the end of a chunk"
            first.append(len(slots))
        for _ in range(len(spans), sequences):  # padding: one empty chunk each
            bounds.append(bounds[-1])
            first.append(len(bounds) - 1)
        assert len(bounds) - 1 <= chunks, "more chunks than there is room for"
        self._fill(f"first{quantum}", first, sequences + 1, 0)
        self._fill(f"slots{quantum}", slots, chunks, NO_SLOT)
        self._fill(f"bounds{quantum}", bounds, chunks + 1, bounds[-1])

    def _fill(self, name: str, values: Sequence[int] | _Integers, count: int, padding: int) -> None:
        """Set the first ``count`` elements to the values, then padding."""
        array = self._arrays[name]
        array[: len(values)] = values
        array[len(values) : count] = padding


class DecodeStep:
    """The rows that a step decodes, and the position of each request's state. A request's ring has the number of its live index.

    States are written at multiples of ``ring_tokens`` of a request's positions, whatever else runs, where the cache keeps one, and before one
    moves to the host.

    Args:
        ring_tokens: See `RingLayout`.
        max_requests: Maximum of running requests.
        device: Device of the layers.
        grids: Where the chunks of each quantum end, for decodes with a prefill's bits; else none.
        step_tokens: Most tokens of a row: one, and its drafts. Used with ``grids``.

    Attributes:
        origins: (max_requests,) int32, by live index: the position of the state in its slot, after the last step.
        most_drafts: (max_requests,) int32, by live index: how many drafts of the prepared step may be accepted, with ``grids``. None fills a
            chunk, nor lies behind its end: the state after a chunk is that of a token that is not rejected.
        rows: Those of the running step, padding included.
    """

    rows: RingRows

    def __init__(
        self,
        ring_tokens: int,
        *,
        max_requests: int,
        device: torch.device | int | str,
        grids: Sequence[ChunkGrid] = (),
        step_tokens: int = 1,
    ) -> None:
        self._ring_tokens, self._grids, self._step_tokens = ring_tokens, grids, step_tokens
        sequences = max_requests * step_tokens
        self.origins, self.most_drafts = np.zeros((2, max_requests), dtype=np.int32)
        sizes: list[tuple[str, int, type[np.int32 | np.int64]]]
        sizes = [("rings", max_requests, np.int64), ("kept", max_requests, np.int64)]
        sizes += [(name, (sequences + 1) * bool(grids), np.int64) for name in ("first", "none")]
        for grid in grids:
            size = grid.chunk_tokens
            sizes += [(f"{name}{size}", sequences, np.int64) for name in ("added", "sources", "filled")]
        sizes += [(name, max_requests, np.int32) for name in ("positions", "origins", "ends")]
        sizes += [(f"bounds{grid.chunk_tokens}", sequences + 1, np.int32) for grid in grids]
        self._pinned, self._buffer, self._arrays, self._tensors = _allocate(sizes, device)
        self._arrays["first"][:] = np.arange(len(self._arrays["first"]))
        for name in ("kept", "none"):
            self._arrays[name][:] = NO_SLOT  # flushes of their own keep states
        self._next: tuple[_Integers, _Integers] = np.zeros(0, np.int64), np.zeros(0, np.int32)

    def prepare(
        self, live_indices: _Integers, begins: _Integers, lengths: _Integers, slots: _Integers, *, decodes: int
    ) -> None:
        """Describe the next step; the device has it after `copy`.

        Args:
            live_indices: Of its requests, those that decode first.
            begins: Where each begins, in tokens of the request.
            lengths: Tokens of each.
            slots: The live slot of each, as a row of the tensors of states.
            decodes: How many decode.
        """
        own, positions = live_indices[:decodes], begins[:decodes]
        origins = np.minimum(self.origins[own], positions)  # rows that warm up CUDA graphs have no state
        ends = np.maximum(origins, positions - positions % self._ring_tokens)
        for name, values in (("rings", own), ("positions", positions), ("origins", origins), ("ends", ends)):
            self._arrays[name][:decodes] = values
        self._next = live_indices.copy(), np.concatenate([ends, begins[decodes:] + lengths[decodes:]])
        if self._grids:
            sizes = {size for grid in self._grids for size in (grid.chunk_tokens, grid.block_tokens)}
            room = np.min([size - positions % size for size in sizes], axis=0)  # of the open chunk
            self.most_drafts[own] = np.maximum(room - 2, 0)
        for grid in self._grids:
            self._open(grid, own, positions, slots[:decodes])

    def _open(self, grid: ChunkGrid, own: _Integers, positions: _Integers, slots: _Integers) -> None:
        """The open chunks of a quantum, see `OpenChunks`: one for each token of a row; none for drafts that are not accepted."""
        size, ahead = grid.chunk_tokens, np.tile(np.arange(self._step_tokens), len(own))
        own, positions, slots = (np.repeat(each, self._step_tokens) for each in (own, positions, slots))
        ends, real = positions + ahead + 1, ahead <= self.most_drafts[own]
        counts = np.where(real, ends - grid.begin(positions), 0)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        fills = real & (grid.begin(ends) == ends)
        values = {
            "bounds": (bounds, bounds[-1]),
            "added": (np.where(real, own * size + counts - 1, NO_SLOT), NO_SLOT),
            "sources": (slots, 0),
            "filled": (np.where(fills, slots, NO_SLOT), NO_SLOT),
        }
        for name, (filled, padding) in values.items():
            array = self._arrays[f"{name}{size}"]
            array[: len(filled)], array[len(filled) :] = filled, padding

    def copy(self) -> None:
        """Copy the prepared step to the device: it runs next. Do not call `prepare` again before this copy is done."""
        self._buffer.copy_(self._pinned, non_blocking=True)
        live_indices, positions = self._next
        self.origins[live_indices] = positions

    def show(self, slots: torch.Tensor) -> None:
        """The prepared step runs now. ``slots``: (rows,) int64 on the device, the live slot of each row; negative: padding."""
        count = len(slots)
        fields = {name: self._tensors[name][:count] for name in ("rings", "positions", "origins", "ends", "kept")}
        if not self._grids:
            self.rows = RingRows(slots, **fields)
            return
        self.rows = rows = OpenRows(slots, **fields)
        rows.chunks = {}
        count *= self._step_tokens
        for size in (grid.chunk_tokens for grid in self._grids):
            lengths = {"bounds": count + 1} | dict.fromkeys(("added", "sources", "filled"), count)
            packed = {name: self._tensors[f"{name}{size}"][:length] for name, length in lengths.items()}
            packed |= {"first": self._tensors["first"][: count + 1], "none": self._tensors["none"][:count]}
            rows.chunks[size] = OpenChunks(**packed, step_tokens=self._step_tokens)

    def advance(self, live_indices: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
        """The states of these live indices will be those at ``ends``, by a launch of its own. Returns where they are."""
        own = np.array(live_indices)
        origins: list[int] = self.origins[own].tolist()
        self.origins[own] = ends
        return origins
