"""`FileTier`: KV blocks and states as files in a folder that outlives the process and may be shared (``shared="file:///..."``).

A file has the header of ``base.py``, then the bytes of the entry. A file that does not fit its header is a counted miss, and is
deleted.

Two processes that write one key write the same content, but maybe other bytes, because sums depend on the batch. The file that
is renamed last stays; a reader has all of one or all of the other.

The engine's thread only asks the index (``space.py``) and never waits for the disk. Threads read, write and look at what
other processes have done.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.support.private_folder import Directory
from megatron_hybrid_prefix.tiers.base import HEADER_BYTES, Entry, Tier, checksum_in, make_header
from megatron_hybrid_prefix.tiers.folder import FolderSettings, SharedFolder
from megatron_hybrid_prefix.tiers.space import FileName, Space
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)

# A file that cannot be read today cannot be read tomorrow. While it is in the index, it hides shorter prefixes, and is not replaced.
# The last four: a folder, a link, a pipe, a socket.
_LASTING = (errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO)


class FileTier(Tier):
    """Entries as files in a folder.

    Attributes:
        folder: The files.
    """

    settings_class = FolderSettings

    def __init__(
        self, settings: FolderSettings, *, block_tokens: int, make_ranking: Callable[[], EvictionPolicy[Any]]
    ) -> None:
        super().__init__(settings, block_tokens=block_tokens, make_ranking=make_ranking)
        self._block_tokens = block_tokens
        self.folder = SharedFolder(settings, make_ranking)
        self._about = "shared folder"
        self._wake = threading.Event()
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._wake, settings.refresh_s), name="shared-folder", daemon=True
        )
        weakref.finalize(self, self._wake.set)
        watch.start()

    # -- namespace -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at what other processes have done. Opens the namespace of new weights, and deletes wrong files.

        If it fails, the tier has what was seen before, and the next look tries again.
        """
        space = self.folder.space
        try:
            while space.wrong:
                self._drop(space, space.wrong.pop())
            self.folder.look()
        except OSError as error:
            self.count("look_" + _reason(error), error)
        except Exception:  # without the thread that looks, new weights would never get their namespace
            self.count("look_error")
            logger.exception("shared folder: the look at it failed")

    def use_namespace(self, namespace: bytes) -> None:
        """The thread that looks opens it, because that reads the disk; the first one is opened here."""
        is_first, self.folder.wanted = not self.folder.wanted, namespace
        if is_first:
            self.look()
        else:
            self._wake.set()

    def _space(self, namespace: bytes) -> Space:
        """The index of a namespace; one without a name if it is not in use, or not open yet."""
        space = self.folder.space
        return space if namespace == space.namespace == self.folder.wanted else self.folder.nothing

    # -- queries: the index only ---------------------------------------------------------------------------------------

    def contains(self, namespace: bytes, kind: EntryKind, key: bytes) -> bool:
        return self._space(namespace).get(kind, key) is not None

    def state_depth(self, namespace: bytes, keys: Sequence[bytes], after: int, limit: int) -> int:
        return self._unless_stuck(super().state_depth(namespace, keys, after, limit), after)

    # -- put, read: on other threads -----------------------------------------------------------------------------------

    def put(self, namespace: bytes, entry: Entry) -> bool:
        tag, space = entry.tag, self._space(namespace)
        name = FileName(tag.kind, tag.depth_tokens // self._block_tokens, tag.key, tag.parent)
        if not space.namespace:
            self.count("old_weights")
            return False
        if space.get(tag.kind, tag.key) is not None:
            return True
        if name in space.blocked:
            return False
        space.wrong.discard(name)  # its file is about to be replaced
        header = make_header(namespace, tag, len(entry.data), entry.checksum)
        try:
            written = self.folder.write(space, name, [header, entry.data])
        except OSError as error:
            if isinstance(error, IsADirectoryError):
                space.blocked.add(name)
            self.count("write_" + _reason(error), error)
            return False
        if not written:
            self.count("no_room")
        return written

    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        space, header = self._space(namespace), memoryview(bytearray(HEADER_BYTES))
        file = space.get(tag.kind, tag.key)
        if file is None:
            self.count("gone")
            return None
        try:
            with self._reading():
                is_whole = read_file(*space.place(file), [header, *buffers])
        except FileNotFoundError:
            self.count("gone")
            space.remove(file)
            return None
        except OSError as error:
            self.count("read_" + _reason(error), error)
            if error.errno in _LASTING:
                self._drop(space, file)
            return None
        checksum = checksum_in(bytes(header), namespace, tag, sum(map(len, buffers))) if is_whole else None
        if checksum is None:
            self.count("not_valid")
            self._drop(space, file)
        elif tag.kind == EntryKind.STATE:  # a request resumes from it: it goes later
            now_ns, (folder, text) = time.time_ns(), space.place(file)
            space.use(file, now_ns)
            with suppress(OSError):
                os.utime(text, ns=(now_ns, now_ns), dir_fd=folder.fd, follow_symlinks=False)
        return checksum

    # -- remove --------------------------------------------------------------------------------------------------------

    def remove(self, namespace: bytes, tags: Iterable[Tag]) -> None:
        """The entries were wrong when they arrived on the device. The thread that looks deletes their files."""
        space = self._space(namespace)
        for tag in tags:
            if (file := space.get(tag.kind, tag.key)) is not None:
                self.count("wrong")
                space.wrong.add(file)
                space.remove(file)
        self._wake.set()

    def describe(self, stats: TierStats) -> None:
        super().describe(stats)
        counts = self.folder.space.counts
        stats.kv_blocks, stats.states = counts[EntryKind.KV], counts[EntryKind.STATE]
        stats.evictions = self.folder.evictions
        stats.bytes_used, stats.bytes_budget = self.folder.bytes_used, self.folder.settings.budget_bytes

    def close(self) -> None:
        """Stop the thread, and release the locks."""
        self.folder.close()
        self._wake.set()

    def _drop(self, space: Space, file: FileName) -> None:
        """Delete a file that is no good."""
        folder, text = space.place(file)
        try:
            folder.delete(text)
        except OSError as error:
            self.count("delete_" + _reason(error), error)
        space.remove(file)


def read_file(folder: Directory, name: str, buffers: Sequence[memoryview]) -> bool:
    """Read a file into buffers, one after the other. Returns whether it has exactly their length.

    Few calls, because a thread waits for the interpreter's lock after each.
    """
    left, at = [*filter(len, buffers), memoryview(bytearray(1))], 0  # the last byte is not there if the length is right
    file = folder.open(name, os.O_RDONLY)
    try:
        while left and (count := os.preadv(file, left, at)):
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    finally:
        os.close(file)
    return at == sum(map(len, buffers))


def _watch(tier_of: Callable[[], FileTier | None], wake: threading.Event, refresh_s: float) -> None:
    """Look at what other processes have done, until the tier is gone or closed."""
    while True:
        wake.wait(refresh_s)
        wake.clear()
        tier = tier_of()
        if tier is None or tier.folder.closed:
            return
        tier.look()
        del tier


def _reason(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error")
