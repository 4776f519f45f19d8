"""Folders and files that a process trusts: who else could put something there, or read it."""

from __future__ import annotations

import errno
import fcntl
import grp
import logging
import os
import pwd
import stat
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)

_ROOT = 0
# The owner of / and /home, root of the host, in a container without root; elsewhere "nobody", an account.
_UNMAPPED = 65534


class Directory:
    """An open folder that nobody but this user and root can write to. Its descriptor is closed with the object.

    Args:
        path: The folder, which must not be a symbolic link. Without ``above``, links before it are followed.
        above: The folder that it is in, in which it is looked up.
        make: Whether to make it, with mode 0700, if it is missing.

    Raises:
        OSError: It is missing, a link or no folder, or others own it or can write to it. The text says which.
    """

    def __init__(self, path: Path, above: Directory | None = None, *, make: bool = False) -> None:
        self.path, self._above = path, above
        self._name = str(path) if above is None else path.name
        self._at = None if above is None else above.fd
        if make:
            with suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=self._at)
        try:
            self.fd: int = os.open(self._name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._at)
        except NotADirectoryError as error:
            raise OSError(error.errno, f"{path} is no folder, or a link, which is not followed") from None
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._status = os.fstat(self.fd)
        if problem := _open_to(path, self._status) or _foreign(path, self._status, _ROOT):
            raise OSError(errno.EPERM, f"{problem}: chmod -R go-w or chown it, or name a new folder in it")

    def below(self, name: str, *, make: bool = False) -> Directory:
        """A folder in it."""
        return Directory(self.path / name, self, make=make)

    def is_in_place(self) -> bool:
        """Whether its name still leads to it from the folder above."""
        try:
            return os.path.samestat(self._status, os.stat(self._name, dir_fd=self._at, follow_symlinks=False))
        except OSError:
            return False

    def status(self, name: str) -> os.stat_result:
        """Of a file in it, or of a link. Raises OSError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def open(self, name: str, how: int) -> int:
        """A file in it; a new one has mode 0600. No link is followed, no pipe is waited for. Raises OSError."""
        try:
            return os.open(name, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            error.filename = str(self.path / name)
            raise

    def delete(self, name: str) -> bool:
        """Delete a file. Returns whether it was there; a folder in its place is left."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def lock(self, *, shared: bool) -> FileIO:
        """Lock the file ``lock`` in it, which is made if need be. The lock is held until the result is closed, or the process ends.

        Args:
            shared: Whether others may hold it, too.

        Raises:
            BlockingIOError: Another process holds it.
            OSError: The file cannot be made or opened; it is a link, a folder or a socket; or the file system has no locks.
        """
        while True:
            file = FileIO(self.open("lock", os.O_RDWR | os.O_CREAT))
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_nlink:
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # deleted by the process that held it before


def others_read(file: Path) -> bool:
    """Whether others can read a file; False if it cannot be found, of which whoever reads it says so."""
    with suppress(OSError):
        status = file.stat()
        by_group = status.st_mode & stat.S_IRGRP and not _is_own_group(status.st_gid)
        return bool(by_group or status.st_mode & stat.S_IROTH)
    return False


@cache  # one line for a file
def warn_if_others_read(file: Path) -> None:
    """Log a warning, on the first rank of a host, if others can read a file with keys."""
    if others_read(file) and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("others can read the keys in %s: chmod 600 it", file)


def _open_to(folder: Path, status: os.stat_result) -> str | None:
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
        return f"others can write to {folder}"
    return None


def _foreign(folder: Path, status: os.stat_result, *trusted: int) -> str | None:
    return None if status.st_uid in (os.geteuid(), *trusted) else f"another user owns {folder}"


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
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)  # another process may have made it
        status, is_parent = each.stat(), each != folder
        # With the sticky bit, as in /tmp, others cannot rename or delete what this user owns.
        is_sticky = is_parent and status.st_mode & stat.S_ISVTX
        problem = _foreign(each, status, _ROOT, *(_unmapped() if is_parent else ()))
        if problem := problem or (None if is_sticky else _open_to(each, status)):
            raise OSError(problem)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()  # a quota, or a full disk
            if locks:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OSError(f"cannot write{' and lock' if locks else ''} files in {folder}: {error.strerror}") from None
    return folder


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
