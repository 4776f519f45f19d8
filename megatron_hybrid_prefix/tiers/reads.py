"""Reads of parts of files, into memory that may be given to another entry at any time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_hybrid_prefix.tiers.base import copy_bytes

type ReadSome = Callable[[int, list[memoryview], int], int]
"""Reads from a file into views, from a position on; returns the number of bytes, 0 at the end of the file."""


class NotMine(Exception):
    """The memory belongs to another entry."""


_MOST_VIEWS = 512  # of one call; Linux takes 1,024


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
    header, beyond = memoryview(bytearray(header_bytes)), memoryview(bytearray(1))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One call, if possible: after each, the thread waits for its turn.
        views, at = ([header, *buffers], 0) if not start else ([*buffers], header_bytes + start)
        fits = not start or _fill(file, [header], 0, None, read_some)
        is_end = start + sum(map(len, buffers)) == entry_bytes
        fits = fits and _fill(file, views, at, beyond if is_end else None, read_some)
        return bytes(header), fits
    finally:
        os.close(file)


def _fill(file: int, views: list[memoryview], at: int, beyond: memoryview | None, read_some: ReadSome) -> bool:
    """Read from a position until the views are full.

    Args:
        file: The file.
        views: Receive the bytes.
        at: The position.
        beyond: One more byte, which must not be there.
        read_some: Reads.

    Returns:
        False: the file ends before, or after them.
    """
    left = sum(map(len, views))
    views = [*views, beyond] if beyond is not None else views
    while left > 0:
        count = read_some(file, views[:_MOST_VIEWS], at)
        if not count:
            return False
        left, at = left - count, at + count
        if left <= 0:
            break
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return not left


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
