"""Reads of many files at once, by threads of the C library.

A Python thread needs the interpreter's lock before and after each call to the kernel. If eight of them open, read and close 40 files
that are in the page cache, and the engine's thread works beside them, handing the lock over takes longer than the reads. So one thread hands all
reads to POSIX AIO (<aio.h>): glibc's implementation has threads of its own, which know nothing of Python, and read plainly.
Where there is no glibc, the thread reads one after the other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, islice
from typing import Any, NamedTuple

_IDLE_S = 600  # glibc's threads end if they have nothing to do for so long; making them again takes 20 us each
_PART_BYTES = 4 * 2**20  # parts of a file that are read side by side
_SMALL_BYTES = 2**16  # are not worth a descriptor of their own
_LIO_READ, _LIO_NOWAIT, _SIGEV_NONE = 0, 1, 1  # <aio.h>, <signal.h>


class Read(NamedTuple):
    """A read.

    Attributes:
        file: File descriptor. Reads of one descriptor run one after the other, those of others side by side.
        at: Position in the file.
        buffer: Receives the bytes: contiguous, not empty, less than 2 GiB.
    """

    file: int
    at: int
    buffer: memoryview


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_reserved", ctypes.c_char * 48),
    )


class _ControlBlock(ctypes.Structure):
    """``struct aiocb`` of glibc on machines with 64 bits."""

    _fields_ = (
        ("file", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("event", _SignalEvent),
        ("_next", ctypes.c_void_p),
        ("_absolute_priority", ctypes.c_int),
        ("_policy", ctypes.c_int),
        ("error", ctypes.c_int),
        ("result", ctypes.c_ssize_t),
        ("at", ctypes.c_int64),
        ("_reserved", ctypes.c_char * 32),
    )


class _Start(ctypes.Structure):
    """``struct aioinit``."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("threads", "reads", "_a", "_b", "_c", "_d", "idle_s", "_e"))


class _Library(NamedTuple):
    """The functions of <aio.h>."""

    init: Any
    start_list: Any
    wait: Any  # until one of a list is over


class RunningReads:
    """Reads that have begun. Call `wait` before the buffers are freed or used, and the files closed.

    Args:
        reads: The reads, with different buffers.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._reads = reads
        self._found: list[int | OSError] | None = None
        self._library = _library() if reads else None
        if self._library is None:
            return
        self._blocks = (_ControlBlock * len(reads))()
        for block, read in zip(self._blocks, reads, strict=True):
            block.file, block.at, block.size = read.file, read.at, len(read.buffer)
            block.buffer = ctypes.addressof(ctypes.c_char.from_buffer(read.buffer))
            block.operation, block.event.notify, block.result = _LIO_READ, _SIGEV_NONE, -1
        first, size = ctypes.addressof(self._blocks), ctypes.sizeof(_ControlBlock)
        self._places = (ctypes.c_void_p * len(reads))(*range(first, first + size * len(reads), size))
        self._library.start_list(_LIO_NOWAIT, self._places, len(reads), None)

    def wait(self) -> list[int | OSError]:
        """Wait until nothing is written to any buffer any more.

        Returns:
            For each read: the number of bytes, fewer than the buffer has only at the end of the file; or why there are none.
        """
        if self._found is not None:
            return self._found
        if self._library is None:
            self._found = [_read_plainly(read) for read in self._reads]
            return self._found
        for block, place in zip(reversed(self._blocks), reversed(self._places), strict=True):
            while block.error == errno.EINPROGRESS:  # when the last one is over, most others are
                self._library.wait(ctypes.byref(ctypes.c_void_p(place)), 1, None)
        # Takes the library's lock: what its threads have written is seen from here on.
        self._library.wait(ctypes.byref(ctypes.c_void_p(self._places[0])), 1, None)
        # What was not taken up (too many at once), or ended early, is read plainly, which also says why.
        self._found = [
            block.result if not block.error and block.result in (0, block.size) else _read_plainly(read)
            for block, read in zip(self._blocks, self._reads, strict=True)
        ]
        return self._found


class FileReads:
    """Files that are being read: each one's header, and what is behind it straight into buffers. Call `close` at the end.

    Args:
        paths: The files; None for those that are left out.
        header_bytes: Bytes of a header.
        buffers: For each file: receive its other bytes, one after the other.
    """

    def __init__(self, paths: Sequence[str | None], header_bytes: int, buffers: Sequence[Sequence[memoryview]]) -> None:
        headers, ends = memoryview(bytearray(header_bytes * len(paths))), memoryview(bytearray(len(paths)))
        self._headers = [headers[number * header_bytes :][:header_bytes] for number in range(len(paths))]
        self._files: list[int] = []
        self._of_file: list[list[Read] | OSError | None] = []
        for number, (path, views) in enumerate(zip(paths, buffers, strict=True)):
            if path is None:
                self._of_file.append(None)
                continue
            try:
                parts = [self._headers[number], *_parts(views), ends[number : number + 1]]
                self._of_file.append(_reads_of(path, self._files, parts))
            except OSError as error:
                self._of_file.append(error)
        self._running = RunningReads([read for reads in self._of_file if isinstance(reads, list) for read in reads])

    def wait(self) -> list[bytes | OSError | None]:
        """Wait until nothing is written to the buffers any more.

        Returns:
            For each file: its header, empty if the file is shorter or longer than header and buffers; why it could not be read;
            None if it was left out.
        """
        counts = iter(self._running.wait())
        return [
            _header_of(reads, list(islice(counts, len(reads))), header) if isinstance(reads, list) else reads
            for reads, header in zip(self._of_file, self._headers, strict=True)
        ]

    def close(self) -> None:
        """Close the files, once nothing reads them any more. Takes a while, too."""
        self._running.wait()
        _close_all(self._files)
        self._files = []


def _header_of(reads: Sequence[Read], counts: Sequence[int | OSError], header: memoryview) -> bytes | OSError:
    """See `FileReads.wait`."""
    for count in counts:
        if isinstance(count, OSError):
            return count
    *full, end = counts
    return bytes(header) if end == 0 and full == [len(read.buffer) for read in reads[:-1]] else b""


def _close_all(files: Sequence[int]) -> None:
    """Close files with few calls: they mostly have consecutive numbers."""
    for _, run in groupby(enumerate(sorted(files)), key=lambda pair: pair[1] - pair[0]):
        own = [file for _, file in run]
        os.closerange(own[0], own[-1] + 1)


def _reads_of(path: str, files: list[int], views: Sequence[memoryview]) -> list[Read]:
    """Reads of a whole file. Large parts have descriptors of their own, which are added to ``files``."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    files.append(file)
    reads: list[Read] = []
    at = 0
    for view in views:
        if len(view) > _SMALL_BYTES and reads and len(reads[-1].buffer) > _SMALL_BYTES:
            file = os.dup(file)
            files.append(file)
        reads.append(Read(file, at, view))
        at += len(view)
    return reads


def _parts(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), _PART_BYTES):
            yield view[start : start + _PART_BYTES]


def start_threads(count: int) -> None:
    """Have this many threads of the C library at most. The first call of the process counts, and only before any read.

    Args:
        count: Number of reads at a time.
    """
    library = _library()
    if library is not None:
        library.init(ctypes.byref(_Start(threads=count, reads=64, idle_s=_IDLE_S)))


def _read_plainly(read: Read) -> int | OSError:
    left, at = read.buffer, read.at
    try:
        while len(left) and (count := os.preadv(read.file, [left], at)):
            left, at = left[count:], at + count
    except OSError as error:
        return error
    return len(read.buffer) - len(left)


@cache
def _library() -> _Library | None:
    """None: this is not glibc, or it has no AIO."""
    if sys.maxsize < 2**32 or not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return None
    if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
        return None
    name = None if hasattr(ctypes.CDLL(None), "lio_listio") else "librt.so.1"  # of glibc before 2.34
    try:
        library = ctypes.CDLL(name)
        init, start_list, wait = library.aio_init, library.lio_listio, library.aio_suspend
    except (OSError, AttributeError):
        return None
    start_list.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    init.argtypes = [ctypes.c_void_p]
    return _Library(init, start_list, wait)


def _forget_threads() -> None:
    """The child of a fork has none of the threads, but glibc does not know."""
    global _library
    _library = cache(lambda: None)


os.register_at_fork(after_in_child=_forget_threads)
