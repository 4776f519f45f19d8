"""`Lock`: a lock on a file, which the kernel releases when a process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from megatron_hybrid_prefix.support.private_folder import Directory


class Lock:
    """A lock on the file ``lock`` of a folder, held until `release` or the end of the process.

    Args:
        folder: The folder; the file is made if need be.
        shared: Whether others may hold it, too.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The file cannot be made, or is a link or no file; or the file system has no locks.
    """

    def __init__(self, folder: Directory, *, shared: bool) -> None:
        while True:
            self._file = folder.open("lock", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                status = os.fstat(self._file)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "is no file", str(folder.path / "lock"))
                if status.st_nlink:
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
