"""Copies between the device and pinned host memory by the copy engines. See ``page_copies.py`` for the other way, a kernel.

Copies to the host run in the order of their launch, whatever their stream, until a stream does something else. So a number is written
after each 8 MiB: a copy of 4 KiB on another stream waits 0.2 ms at most then. An event is not enough.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any, cast

import torch

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED

TURN_BYTES = 8 * 2**20  # to the host, before others may pass

type _Copy = tuple[int, int, int]
"""(target, source, bytes); the first two are addresses."""


def copy_ranges(
    device_memory: torch.Tensor, memory: torch.Tensor, ranges: Iterable[tuple[int, int, int]], *, to_host: bool
) -> None:
    """Copies ranges of bytes between the device and the host by the copy engines, on the current stream.

    With one call of the driver for all of them, or for `TURN_BYTES` to the host, if the driver is of CUDA 12.8 or later. The engines
    do not pause between the copies of a call, and it takes the CPU less time than a call for each.

    Args:
        device_memory: (bytes,) uint8, contiguous.
        memory: (bytes,) uint8 on the host, contiguous; pinned if ``device_memory`` is on a GPU.
        ranges: First byte on the device, first byte on the host, and bytes of each copy. No byte is written twice.
        to_host: From the device to the host, or back.

    Raises:
        RuntimeError: The driver refuses a copy.
    """
    copies = _addresses(device_memory, memory, ranges, to_host)
    if device_memory.is_cuda:
        _copy_by_engines(copies, torch.cuda.current_stream(device_memory.device.index), to_host=to_host)
    else:
        for each in copies:
            ctypes.memmove(*each)


def _addresses(
    device_memory: torch.Tensor, memory: torch.Tensor, ranges: Iterable[tuple[int, int, int]], to_host: bool
) -> Iterator[_Copy]:
    """The copies of these ranges."""
    first, host_first = device_memory.data_ptr(), memory.data_ptr()
    most, host_most = device_memory.numel(), memory.numel()
    for start, host_start, size in ranges:
        # The driver does not know these bounds.
        assert 0 <= start <= most - size and 0 <= host_start <= host_most - size
        here, there = first + start, host_first + host_start
        yield (there, here, size) if to_host else (here, there, size)


def _copy_by_engines(copies: Iterable[_Copy], stream: torch.cuda.Stream, *, to_host: bool) -> None:
    if not to_host:  # they do not wait for each other
        _copy_together(copies, stream.cuda_stream)
        return
    for turn in _turns(copies):
        _copy_together(turn, stream.cuda_stream)
        _let_others_pass(stream)


def _turns(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """The same bytes in turns of `TURN_BYTES`; the last one may have fewer."""
    turn: list[_Copy] = []
    room = TURN_BYTES
    for target, source, size in copies:
        while size >= room:
            yield [*turn, (target, source, room)]
            target, source, size = target + room, source + room, size - room
            turn, room = [], TURN_BYTES
        if size:
            turn.append((target, source, size))
            room -= size
    if turn:
        yield turn


def _let_others_pass(stream: torch.cuda.Stream) -> None:
    """Copies to the host that other streams launch run before this stream's next ones."""
    error = _driver_write()(stream.cuda_stream, _word(stream.device_index).data_ptr(), 0, 0)
    if error not in (0, _NOT_SUPPORTED):
        raise RuntimeError(f"cuStreamWriteValue32 returned error {error}")


@cache
def _word(device: int) -> torch.Tensor:
    """Where `_let_others_pass` writes on a device; nothing reads it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _copy_together(copies: Iterable[_Copy], stream: int) -> None:
    """With one call of the driver, if it can. It cannot on the default stream, which is 0."""
    numbers = array("Q", chain.from_iterable(copies))
    targets, sources, sizes = numbers[::3], numbers[1::3], numbers[2::3]
    batch_copy = _driver_batch_copy()
    if batch_copy is not None and stream and sizes:
        error = batch_copy(targets, sources, sizes, stream)
        if not error:
            return
        if error != _NOT_SUPPORTED:
            raise RuntimeError(f"cuMemcpyBatchAsync returned error {error}")
    copy = _driver_copy()  # PyTorch's ``copy_`` takes the CPU several times as long
    for each in zip(targets, sources, sizes, strict=True):
        if error := copy(*each, stream):
            raise RuntimeError(f"cuMemcpyAsync returned error {error}")


class _CopyAttributes(ctypes.Structure):
    """The driver's ``CUmemcpyAttributes``."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("source_order", "source_kind", "source_id", "target_kind", "target_id", "flags")
    ]


@cache
def _driver_copy() -> Callable[[int, int, int, int], int]:
    """The CUDA driver's ``cuMemcpyAsync(target, source, bytes, stream)``."""
    return _driver_function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


@cache
def _driver_batch_copy() -> Callable[[array[int], array[int], array[int], int], int] | None:
    """The CUDA driver's ``cuMemcpyBatchAsync(targets, sources, sizes, stream)``; None if the driver is older than CUDA 12.8."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    try:
        run = _driver_function("cuMemcpyBatchAsync", *types)
    except AttributeError:
        return None
    attributes, first, failed = _CopyAttributes(source_order=_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t()
    of_all = ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed)

    def copy(targets: array[int], sources: array[int], sizes: array[int], stream: int) -> int:
        addresses = (each.buffer_info()[0] for each in (targets, sources, sizes))
        return run(*addresses, len(sizes), *of_all, stream)  # reads all of them before it returns

    return copy


@cache
def _driver_write() -> Callable[[int, int, int, int], int]:
    """The CUDA driver's ``cuStreamWriteValue32(stream, address, value, flags)``."""
    return _driver_function("cuStreamWriteValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


def _driver_function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A function of the CUDA driver, which returns 0 or its error."""
    # Keeps the interpreter's lock: other threads would take it after each call, and the call takes a microsecond or two.
    function: Any = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = argument_types, ctypes.c_int
    return cast(Callable[..., int], function)
