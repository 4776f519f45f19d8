"""Copies between the device and pinned host memory by the copy engines. See ``page_copies.py`` for the other way, a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import count
from typing import Any, NamedTuple, cast

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.entry_geometry import EntryGeometry, geometry_of

_HOST_MEMORY, _DEVICE_MEMORY = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
_MOST_PITCH = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH


def copy_ranges(
    device_memory: torch.Tensor, memory: torch.Tensor, ranges: Iterable[tuple[int, int, int]], *, to_host: bool
) -> None:
    """Copies ranges of bytes between the device and the host by the copy engines, on the current stream.

    Args:
        device_memory: (bytes,) uint8, contiguous.
        memory: (bytes,) uint8 on the host, contiguous; pinned if ``device_memory`` is on a GPU.
        ranges: First byte on the device, first byte on the host, and bytes of each copy.
        to_host: From the device to the host, or back.

    Raises:
        RuntimeError: The driver refuses a copy.
    """
    first, host_first = device_memory.data_ptr(), memory.data_ptr()
    most, host_most = device_memory.numel(), memory.numel()
    if device_memory.is_cuda:  # PyTorch's ``copy_`` takes the CPU several times as long as the driver's call
        driver_copy, stream = _driver_copy(), torch.cuda.current_stream(device_memory.device).cuda_stream
    for start, host_start, size in ranges:
        # The driver does not know these bounds.
        assert 0 <= start <= most - size and 0 <= host_start <= host_most - size
        here, there = first + start, host_first + host_start
        target, source = (there, here) if to_host else (here, there)
        if not device_memory.is_cuda:
            ctypes.memmove(target, source, size)
        elif error := driver_copy(target, source, size, stream):
            raise RuntimeError(f"cuMemcpyAsync returned error {error}")


def copy_to_host(
    entries: torch.Tensor, memory: torch.Tensor, moves: Iterable[tuple[int, Sequence[int]]], *, start_bytes: int = 0
) -> None:
    """Copies entries to their pages on the host by the copy engines, on the current stream.

    Without sums, and with one call of the driver for all layers that are in one page.

    Args:
        entries: (layers, all entries, *shape) on the device, strided over layers and entries, contiguous inside an entry.
        memory: (all pages, page bytes) uint8 on the host, contiguous; pinned if ``entries`` are on a GPU.
        moves: Entries, and the pages of each in order; all pages differ.
        start_bytes: Bytes in the pages of an entry before this tensor's.

    Raises:
        ValueError: The pages of an entry are too few.
        RuntimeError: The driver refuses a copy.
    """
    page_bytes = memory.shape[1]
    of = geometry_of(entries, start_bytes, page_bytes)
    assert of.is_contiguous and memory.is_contiguous()
    if not of.row_bytes:
        return
    boxes, own_pages = _boxes(of, start_bytes, page_bytes), ceil_div(start_bytes + of.row_bytes, page_bytes)
    if entries.is_cuda:
        copy = _by_engine(of.layer_step_bytes, torch.cuda.current_stream(entries.device).cuda_stream)
    else:
        copy = _by_host(of.layer_step_bytes)
    first, host_first = entries.data_ptr(), memory.data_ptr()
    for entry, pages in moves:
        # The driver does not know these bounds.
        assert 0 <= entry < entries.shape[1] and min(pages) >= 0 and max(pages) < len(memory)
        if len(pages) < own_pages:
            raise ValueError(f"{start_bytes} + {of.row_bytes} bytes do not fit in {len(pages)} pages of {page_bytes}")
        source = first + entry * of.entry_step_bytes
        for box in boxes:
            target = host_first + pages[box.page] * page_bytes + box.start_in_page
            copy(target, source + box.start, box.rows, box.row_bytes)


class _Box(NamedTuple):
    """A part of an entry that one copy takes: bytes of one layer, or whole layers.

    Attributes:
        page: Number of its page, in the entry.
        start_in_page: Its first byte there.
        start: Its first byte on the device, from the entry's.
        rows: Layers.
        row_bytes: Bytes of each.
    """

    page: int
    start_in_page: int
    start: int
    rows: int
    row_bytes: int


@lru_cache(maxsize=256)
def _boxes(of: EntryGeometry, start_bytes: int, page_bytes: int) -> tuple[_Box, ...]:
    """The boxes of an entry, in the order of its bytes."""
    boxes, at = [], 0
    while at < of.row_bytes:
        (page, start_in_page), (layer, in_layer) = divmod(start_bytes + at, page_bytes), divmod(at, of.layer_bytes)
        room = page_bytes - start_in_page
        rows, row_bytes = 1, min(of.layer_bytes - in_layer, room)
        if row_bytes == of.layer_bytes:
            rows = min(room, of.row_bytes - at) // row_bytes
        boxes.append(_Box(page, start_in_page, layer * of.layer_step_bytes + in_layer, rows, row_bytes))
        at += rows * row_bytes
    return tuple(boxes)


class _CopyArguments(ctypes.Structure):
    """The driver's ``CUDA_MEMCPY3D``."""

    _fields_ = [
        *((f"source_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("source_type", ctypes.c_int),
        *((f"source_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "reserved", "pitch", "height")),
        *((f"target_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("target_type", ctypes.c_int),
        *((f"target_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "reserved", "pitch", "height")),
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
    ]


type _CopyBox = Callable[[int, int, int, int], None]
"""Copies a box: (target, source, rows, bytes of a row). Rows are a fixed step apart at the source, adjacent at the target."""


def _by_host(step_bytes: int) -> _CopyBox:
    def copy(target: int, source: int, rows: int, row_bytes: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * row_bytes, source + row * step_bytes, row_bytes)

    return copy


def _by_engine(step_bytes: int, stream: int) -> _CopyBox:
    """With one call of the driver for a box."""
    # Layers of a pool of many GB are further apart than a pitch may be: each is a plane of several lines then.
    lines = next(lines for lines in count(1) if step_bytes % lines == 0 and step_bytes // lines <= _MOST_PITCH)
    arguments = _CopyArguments(
        source_type=_DEVICE_MEMORY,
        source_height=lines,
        target_type=_HOST_MEMORY,
        target_height=1,
        height=1,
        depth=1,
    )
    reference, run, are_planes = ctypes.byref(arguments), _driver_box_copy(), lines > 1

    def copy(target: int, source: int, rows: int, row_bytes: int) -> None:
        arguments.source_device, arguments.target_host = source, target
        arguments.width = arguments.target_pitch = row_bytes
        arguments.source_pitch = step_bytes // lines if rows > 1 else row_bytes  # a single layer may have any step
        if are_planes:
            arguments.depth = rows
        else:
            arguments.height = arguments.source_height = arguments.target_height = rows
        if error := run(reference, stream):
            raise RuntimeError(f"cuMemcpy3DAsync returned error {error}")

    return copy


@cache
def _driver_copy() -> Callable[[int, int, int, int], int]:
    """The CUDA driver's ``cuMemcpyAsync(target, source, bytes, stream)``."""
    return _driver_function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


@cache
def _driver_box_copy() -> Callable[[Any, int], int]:
    """The CUDA driver's ``cuMemcpy3DAsync(arguments, stream)``. It reads the arguments before it returns."""
    return _driver_function("cuMemcpy3DAsync_v2", ctypes.c_void_p, ctypes.c_void_p)


def _driver_function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A function of the CUDA driver, which returns 0 or its error."""
    # Keeps the interpreter's lock: other threads would take it after each call, and the call takes a microsecond or two.
    function: Any = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = argument_types, ctypes.c_int
    return cast(Callable[..., int], function)
