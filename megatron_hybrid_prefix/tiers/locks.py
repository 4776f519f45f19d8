"""`Lock`: a lock on a file, which the kernel releases when a process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Lock:
    """A lock on a file, held until `release` or the end of the process.

    Args:
        path: The file; made if need be.
        shared: Whether others may hold it, too.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The file cannot be made, or the file system has no locks.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.fstat(self._file).st_nlink:
                    return
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)  # deleted by the process that held it before

    def release(self) -> None:
        """Release it. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
