"""`load_hf_weights`: a Hugging Face folder's weights into this rank's shard, read by slices.

Values are read with ``pread``, not mapped: from the page cache that is one copy and no page fault, and a file that was
truncated meanwhile is an error and not a signal. On a CPU they are read into the parameters themselves, else into pinned
buffers. A few threads share the work, because one alone copies out of the page cache slower than a disk array delivers.
A slice in fp8 is multiplied by the scales of its blocks in float32, on the model's device, and rounded once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from megatron_hybrid_prefix.models.checkpoint import together
from megatron_hybrid_prefix.models.hf.folder import HfFolder
from megatron_hybrid_prefix.models.hf.mapping import Finish
from megatron_hybrid_prefix.models.hf.stored import StoredWeight
from megatron_hybrid_prefix.models.hf_weights import Copy, plan_copies
from megatron_hybrid_prefix.models.weights import parameters_by_global_name, warn_not_finite
from megatron_hybrid_prefix.support.arithmetic import ceil_div

CHUNK_BYTES = 16 << 20
"""Bytes of one read, and of one pinned buffer."""
THREADS = 4


def load_hf_weights(model: Any, folder: HfFolder, *, on_read: Callable[[int, int], object] | None = None) -> None:
    """Load the weights of ``folder`` into ``model``, whatever its tensor-, pipeline- and expert-parallel layout.

    Every rank reads the slices that it holds. Besides its shard it needs `THREADS` buffers of `CHUNK_BYTES`, and none where
    the model is on the CPU and in the dtype of the files; for fp8 three times as much, on the model's device. A collective: an error on one rank is raised on all.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it; its dimensions are ``model.hybrid_config``.
        folder: The result of `open_folder`.
        on_read: Called after each slice with the values that this rank has read, and those that it will read.

    Raises:
        ValueError: As of `HfFolder.weights` and `plan_copies`, or a file cannot be read, or a scale is not positive and finite.
            In the last two cases some weights are written: the model must not be used.
    """
    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    total = sum(parameter.numel() for _, parameter in parameters_by_global_name(model))

    def load() -> None:
        config, name = model.hybrid_config, str(folder.path)
        weights, copies = plan_copies(model, folder.weights, config, folder.model_type, source=name)
        read_values = 0
        with ExitStack() as stack:
            stored = {each for weight in weights.values() for each in (weight, weight.scale) if each is not None}
            files = {file: stack.enter_context(_open(file)) for file in {weight.file for weight in stored}}
            for values in _read_all([slice_ for copy in copies for slice_ in _slices(copy, weights)], files):
                read_values += values
                if on_read is not None:
                    on_read(read_values, total)
        invalidate_layers(model)
        warn_not_finite(model, name)

    together(load)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slice:
    """Rows of a weight that are read at once.

    Attributes:
        weight: The weight.
        offset_bytes: Where its first row begins in the file.
        piece_bytes: Of one row, what is read; rows without gaps are one piece.
        stride_bytes: From one piece to the next.
        pieces: How many.
        out: (rows, ...), where they go.
        finish: As of `Rule`.
        at: Which matrix of a stack.
        begin: The first row and the first column that are read.
    """

    weight: StoredWeight
    offset_bytes: int
    piece_bytes: int
    stride_bytes: int
    pieces: int
    out: torch.Tensor
    finish: Finish | None
    at: int
    begin: tuple[int, int]

    @property
    def size_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the values of ``out``."""
        out = self.out
        same = self.finish is None and out.dtype == getattr(torch, self.weight.dtype)
        return same and out.device.type == "cpu" and out.is_contiguous()


def _slices(copy: Copy, weights: Mapping[str, StoredWeight]) -> Iterator[_Slice]:
    """The slices of one parameter, none of more than `CHUNK_BYTES`, unless a row is larger."""
    parameter, row = copy.parameter.detach(), 0
    for run in copy.rule.runs(copy.rows):
        weight, shape = weights[run.source.name], run.source.part_shape
        if weight.scale is not None and len(shape) != 2:
            raise ValueError(f"{weight.name} in {weight.file} is in fp8, and no matrix")
        stride, at = math.prod(shape[1:]) * weight.value_bytes, run.source.at or 0
        begin = weight.offset_bytes + at * shape[0] * stride + run.start * stride
        piece, column = stride, 0
        if copy.columns is not None:
            column, column_bytes = copy.columns[0], stride // shape[1]
            begin += column * column_bytes
            piece = (copy.columns[1] - column) * column_bytes
        rows_at_once = max(1, CHUNK_BYTES // (piece if weight.scale is None else 4 * piece))  # float32 on the device
        for start in range(0, run.stop - run.start, rows_at_once):
            rows = min(rows_at_once, run.stop - run.start - start)
            whole = piece == stride
            yield _Slice(
                weight=weight,
                offset_bytes=begin + start * stride,
                piece_bytes=rows * piece if whole else piece,
                stride_bytes=stride,
                pieces=1 if whole else rows,
                out=parameter[row : row + rows],
                finish=copy.rule.finish,
                at=at,
                begin=(run.start + start, column),
            )
            row += rows


def _read_all(slices: list[_Slice], files: Mapping[Path, Any]) -> Iterator[int]:
    """Reads all slices; yields the number of values of each."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    staged = [slice_ for slice_ in slices if not slice_.is_direct]
    buffers: SimpleQueue[_Buffer] = SimpleQueue()
    if staged:
        size, device = max(slice_.size_bytes for slice_ in staged), staged[0].out.device
        for _ in range(threads):
            buffers.put(_Buffer(size, device))

    def read(slice_: _Slice) -> int:
        if slice_.is_direct:
            _read_slice(slice_.out.view(torch.uint8).flatten(), slice_, files)
            return slice_.out.numel()
        buffer = buffers.get()
        try:
            buffer.pass_on(slice_, files)
        finally:
            buffers.put(buffer)
        return slice_.out.numel()

    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(read, slices)
    finally:
        pool.shutdown(cancel_futures=True)


class _Buffer:
    """Memory on the host that values go through on their way to a device or to another dtype.

    Args:
        size_bytes: Of the largest slice.
        device: Where the values go.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(device) if cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # that made the parameters

    def pass_on(self, slice_: _Slice, files: Mapping[Path, Any]) -> None:
        """Reads a slice, and waits until it is where it goes."""
        read = self._bytes[: slice_.size_bytes]
        _read_slice(read, slice_, files)
        values = read.view(getattr(torch, slice_.weight.dtype)).view(slice_.out.shape)
        with torch.cuda.stream(self._stream):  # does nothing for None
            if slice_.finish is not None or values.dtype != slice_.out.dtype:
                values = values.to(slice_.out.device, non_blocking=True)
            if slice_.weight.scale is not None:
                values = _dequantised(values, slice_, slice_.weight.scale, files)
            if slice_.finish is not None:
                values = slice_.finish.apply(values)
            slice_.out.copy_(values, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def _dequantised(values: torch.Tensor, slice_: _Slice, scale: StoredWeight, files: Mapping[Path, Any]) -> torch.Tensor:
    """The float32 that values of a slice in fp8 stand for; both (rows, columns). Of ``scale``, its blocks' rows are read."""
    (height, width), (row, column), (rows, columns) = slice_.weight.block, slice_.begin, values.shape
    above, across = (ceil_div(*pair) for pair in zip(slice_.weight.shape[-2:], slice_.weight.block, strict=True))
    first, stop, row_bytes = row // height, ceil_div(row + rows, height), across * scale.value_bytes
    read = torch.empty((stop - first) * row_bytes, dtype=torch.uint8)
    _read_piece(memoryview(read.numpy()), scale, (slice_.at * above + first) * row_bytes + scale.offset_bytes, files)
    scales = read.view(getattr(torch, scale.dtype)).float().view(-1, across)
    wrong = scales[~(scales.isfinite() & (scales > 0))]
    if len(wrong):
        raise ValueError(f"{scale.name} in {scale.file} has {float(wrong[0])}, a scale must be positive and finite")
    of_rows = torch.arange(row, row + rows, device=values.device) // height - first
    of_columns = torch.arange(column, column + columns, device=values.device) // width
    each = scales.to(values.device)[:, of_columns][of_rows]
    table = torch.arange(256, dtype=torch.uint8).view(values.dtype).float().to(values.device)  # CPUs convert slowly
    return each.mul_(table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape))


def _read_slice(target: torch.Tensor, slice_: _Slice, files: Mapping[Path, Any]) -> None:
    """Reads a slice into (size_bytes,) uint8 on the host."""
    memory = memoryview(target.numpy())
    for number in range(slice_.pieces):
        piece = memory[number * slice_.piece_bytes : (number + 1) * slice_.piece_bytes]
        _read_piece(piece, slice_.weight, slice_.offset_bytes + number * slice_.stride_bytes, files)


def _read_piece(piece: memoryview, weight: StoredWeight, at: int, files: Mapping[Path, Any]) -> None:
    """Reads a piece of a weight, from this byte of its file on."""
    while piece:
        try:
            count = os.preadv(files[weight.file].fileno(), [piece], at)
        except OSError as error:
            raise ValueError(f"cannot read {weight.name} of {weight.file}: {error.strerror}") from error
        if count == 0:
            raise ValueError(f"{weight.file} is truncated: it ends before the end of {weight.name}")
        piece, at = piece[count:], at + count


def _open(file: Path) -> Any:
    try:
        return open(file, "rb", buffering=0)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
