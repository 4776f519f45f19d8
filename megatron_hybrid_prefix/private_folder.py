"""Folders from which a process takes what it trusts: who else could put something there."""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

_ROOT = 0
_UNMAPPED = (
    65534  # the owner of / and /home, root of the host, in a container without root; elsewhere "nobody", an account
)


def who_else_writes(folder: Path) -> str | None:
    """Who besides this user and root can write to a folder, in a few words; None: nobody."""
    return _open_to(folder) or _foreign(folder, _ROOT)


def _open_to(folder: Path) -> str | None:
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
        return f"others can write to {folder}"
    return None


def _foreign(folder: Path, *trusted: int) -> str | None:
    return None if folder.stat().st_uid in (os.geteuid(), *trusted) else f"another user owns {folder}"


def make_private(folder: Path, *, locks: bool) -> Path:
    """Make a folder, with mode 0700, that nobody else can change, nor put another one in its place.

    Args:
        folder: An absolute path. Parents that are missing are made, too.
        locks: Whether the file system must support ``flock``.

    Returns:
        The same folder without symbolic links, which others might be able to change.

    Raises:
        OSError: Others could, or it cannot be made, written or locked. The text names the folder.
    """
    if not folder.is_absolute():
        raise OSError(f"{folder} is not an absolute path")
    folder = Path(os.path.realpath(folder))
    trusted = (_ROOT, *_unmapped())
    for parent in reversed(folder.parents):
        _make(parent)
        # With the sticky bit, as in /tmp, others cannot rename or delete what this user owns.
        is_sticky = parent.stat().st_mode & stat.S_ISVTX
        _check(_foreign(parent, *trusted) or (None if is_sticky else _open_to(parent)))
    _make(folder)
    _check(who_else_writes(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()  # a quota, or a full disk
            if locks:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OSError(f"cannot write{' and lock' if locks else ''} files in {folder}: {error.strerror}") from None
    return folder


def _make(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(mode=0o700, exist_ok=True)  # another process may have made it


def _check(problem: str | None) -> None:
    if problem is not None:
        raise OSError(problem)


def _unmapped() -> tuple[int, ...]:
    """The number that owners from outside this user namespace have; none if it is an account of this one."""
    rows = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return () if any(first <= _UNMAPPED < first + count for first, _, count in rows) else (_UNMAPPED,)


def _is_own_group(group: int) -> bool:
    """Whether nobody else is in a group: many systems give each user one of the same name, and let it write."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    others = set(found.gr_mem) | {other.pw_name for other in pwd.getpwall() if other.pw_gid == group}
    return group != _ROOT and group == user.pw_gid and found.gr_name == user.pw_name and others <= {user.pw_name}
