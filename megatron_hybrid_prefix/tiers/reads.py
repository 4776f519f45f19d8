"""Reads of parts of files, into memory that may be given to another entry at any time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_hybrid_prefix.tiers.base import copy_bytes

type ReadSome = Callable[[int, list[memoryview], int], int]
"""Reads from a file into views, from a position on; returns the number of bytes, 0 at the end of the file."""

_MOST_VIEWS = 512  # of one call; Linux takes 1,024


class NotMine(Exception):
    """The memory belongs to another entry."""


def read_part(
    path: str, header_bytes: int, start: int, buffers: Sequence[memoryview], entry_bytes: int, read_some: ReadSome
) -> tuple[bytes, bool]:
    """Read a part of an entry, and the file's header before it.

    Args:
        path: The file: a header, and the entry.
        header_bytes: Bytes of the header.
        start: Offset of the part in the entry.
        buffers: Receive the part, one after the other.
        entry_bytes: Bytes of the entry.
        read_some: Reads.

    Returns:
        The header, and whether the file has the right size (as far as the part shows it).

    Raises:
        OSError: The file cannot be read.
    """
    header = bytearray(header_bytes)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One call, if possible: after each, the thread waits for its turn.
        fits = not start or _fill(file, [header], 0, header_bytes, read_some)
        views, at, size = [*buffers], header_bytes + start, sum(map(len, buffers))
        if start + size == entry_bytes:
            views.append(memoryview(bytearray(1)))  # must stay empty
        if not start:
            views.insert(0, memoryview(header))
            at, size = 0, header_bytes + size
        fits = fits and _fill(file, views, at, size, read_some)
        return bytes(header), fits
    finally:
        os.close(file)


def _fill(file: int, views: Sequence[memoryview | bytearray], at: int, size: int, read_some: ReadSome) -> bool:
    """Read from a position until the views are full.

    Args:
        file: The file.
        views: Receive the bytes. They may be longer than ``size``.
        at: The position.
        size: Bytes that must be there.
        read_some: Reads.

    Returns:
        False: the file ends before, or after them.
    """
    left = [memoryview(view) for view in views]
    count = read_some(file, left[:_MOST_VIEWS], at)
    while 0 < count < size:
        size, at = size - count, at + count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        left[0] = left[0][count:]
        count = read_some(file, left[:_MOST_VIEWS], at)
    return count == size


def scatter(source: memoryview, views: Iterable[memoryview]) -> None:
    """Copy bytes to views, in order."""
    for view in views:
        copy_bytes(source[: len(view)], view[: len(source)])
        source = source[len(view) :]


def is_in_memory(folder: Path) -> bool:
    """Whether the folder's file system has no disk, so that no read waits for one (unless the machine swaps)."""
    device = os.stat(folder).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {mount.partition(" - ")[2].split(" ")[0] for mount in mounts if mount.split(" ")[2] == place}
    return bool(kinds) and kinds <= {"tmpfs", "ramfs"}
