"""`FileTier`: KV blocks and states as files in a folder that outlives the process and may be shared (``shared="file:///..."``).

A file has a header and the bytes of the entry. The header names the content: format, namespace, kind, key, depth, size,
and the checksum that was made on the device. The header has a digest of its own. What does not fit is not here: a file that
is torn, truncated or of another model is a counted miss, and is deleted. The bytes are checked on the device when they have
arrived there (``tiers/arena.py``).

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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.tiers.base import Entry, SharedTier
from megatron_hybrid_prefix.tiers.folder import SharedFolder
from megatron_hybrid_prefix.tiers.header import HEADER_BYTES, checksum_in, make_header
from megatron_hybrid_prefix.tiers.listing import FileName
from megatron_hybrid_prefix.tiers.reads import FileReads, start_threads
from megatron_hybrid_prefix.tiers.shared import FolderSettings
from megatron_hybrid_prefix.tiers.space import Space
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)

# A file that cannot be read today cannot be read tomorrow. While it is in the index, it hides shorter prefixes, and is not replaced.
_LASTING = (errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP)
_READERS = 4  # hand reads to other threads (reads.py), and wait for them


class FileTier(SharedTier):
    """See the top of this file.

    Args:
        settings: Folder, budget and limits.
        block_tokens: Tokens per block.
        make_ranking: Makes the eviction policy of the states.
        reason: The reason that the policy is told for each state.

    Attributes:
        folder: The files.
        counts: What was given up, by reason.

    Raises:
        OSError: The folder cannot be used.
    """

    fills = True

    def __init__(
        self,
        settings: FolderSettings,
        *,
        block_tokens: int,
        make_ranking: Callable[[], EvictionPolicy[Any]],
        reason: CheckpointReason | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self.wait_s = settings.wait_s
        self.least_blocks = ceil_div(settings.min_tokens, block_tokens)
        self.threads = _READERS
        start_threads(settings.threads)
        self.folder = SharedFolder(
            settings.folder,
            budget_bytes=settings.budget_bytes,
            make_ranking=make_ranking,
            reason=reason,
            wait_s=settings.wait_s,
        )
        status = os.stat(settings.folder)
        if status.st_mode & 0o022:
            logger.warning(
                "shared: others can write to %s, and who writes there can change answers: chmod 700", settings.folder
            )
        elif status.st_uid not in (0, os.geteuid()):
            logger.warning(
                "shared: another user owns %s, and who writes there can change answers: chown it", settings.folder
            )
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._epoch = 0
        self._make_name: Callable[[], bytes] | None = None
        self._name = b""  # of the namespace, 16 bytes; empty if it is not open
        self._wanted = b""  # the namespace that is open, or is being opened
        self._wrong: dict[FileName, None] = {}  # files to be deleted
        self._reads: dict[FileFilling, float] = {}  # that run: when they began (monotonic)
        self._wake = threading.Event()
        self._closed = False
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._wake, settings.refresh_s), name="shared-folder", daemon=True
        )
        weakref.finalize(self, self._wake.set)
        watch.start()

    # -- namespace -----------------------------------------------------------------------------------------------------

    def name_entries(self, make_name: Callable[[], bytes]) -> None:
        """Use a namespace. Until then the tier has nothing and takes nothing.

        Args:
            make_name: Returns 16 bytes made of all that entries depend on: weights, layout, rank, versions. Called now, and
                again after the weights have changed.
        """
        self._make_name = make_name
        self._wanted = make_name()
        self._try_to_look()

    def invalidate(self, epoch: int) -> None:
        """The weights changed: other entries are used from now on. Nothing is deleted."""
        with self.folder.lock:
            self._epoch, self._name, self._wanted = epoch, b"", b""
            self._wrong.clear()
            self.folder.leave_space()

    def look(self) -> None:
        """Look at what other processes have done. Opens the namespace of new weights, and deletes wrong files."""
        for file in list(self._wrong):
            if self._wrong.pop(file, False) is None:  # not replaced meanwhile
                self._drop(file)
        while (name := self._wanted) != self._name:
            self.folder.use_space(name.hex())
            with self.folder.lock:  # the weights may have changed again
                if self._wanted == name and self.folder.space is not None:
                    self._name = name
        self.folder.refresh()

    def _try_to_look(self) -> None:
        """`look`; if it fails, the tier has what was seen before, and the next look tries again."""
        try:
            self.look()
        except OSError as error:
            self.count("look_" + _reason(error), error)
        except Exception:  # without the thread that looks, new weights would never get their namespace
            self.count("look_error")
            logger.exception("shared folder: the look at it failed")

    def _space(self) -> Space | None:
        """The index of the namespace, for the engine's thread; None until it is open.

        Names the namespace if the weights have changed. The thread that looks opens it, because that reads the disk.
        """
        if not self._wanted and self._make_name is not None:
            self._wanted = self._make_name()
            self._wake.set()
        return self.folder.space if self._name else None

    # -- queries: the index only ---------------------------------------------------------------------------------------

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """See Tier."""
        space = self._space()
        return space is not None and space.get(kind, key) is not None

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`."""
        space = self._space()
        while space is not None and first < len(keys) and space.get(EntryKind.KV, keys[first]) is not None:
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`. No state is here while a read does not come back: its disk hangs."""
        space = self._space()
        if space is None:
            return after
        while limit > after and space.get(EntryKind.STATE, keys[limit - 1]) is None:
            limit -= 1
        if limit > after and self._is_stuck():
            self.count("stuck")
            return after
        return limit

    def _is_stuck(self) -> bool:
        """Whether a read has taken longer than a request waits."""
        oldest = min(list(self._reads.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > self.wait_s

    # -- put, read: on other threads -----------------------------------------------------------------------------------

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        """See Tier."""
        return [self._put(entry) for entry in entries]

    def _put(self, entry: Entry) -> bool:
        tag = entry.tag
        name = self._file_name(tag)
        with self.folder.lock:
            space, namespace = self.folder.space, self._name
            if space is None or not namespace or tag.epoch != self._epoch:
                self.count("old_weights")
                return False
            if space.get(tag.kind, tag.key) is not None:
                return True
        self._wrong.pop(name, None)  # its file is about to be replaced
        header = make_header(namespace, tag, len(entry.data), entry.checksum)
        try:
            written = self.folder.write(name, [header, entry.data], space)
        except OSError as error:
            self.count("write_" + _reason(error), error)
            return False
        if not written:
            self.count("no_room")
        return written

    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> list[int | None]:
        """See Tier."""
        with closing(self.fill(tags, [[buffer] for buffer in buffers])) as filling:
            return filling.wait()

    def fill(self, tags: Sequence[Tag], buffers: Sequence[Sequence[memoryview]]) -> FileFilling:
        """See `SharedTier`."""
        return FileFilling(self, tags, buffers)

    def _path(self, tag: Tag) -> str | None:
        """The file of an entry; None: there is none. Call it with the folder's lock."""
        space = self.folder.space
        if space is None or not self._name or tag.epoch != self._epoch:
            return None
        file = space.get(tag.kind, tag.key)
        return None if file is None else self.folder.place(tag.key, file)

    def _judge(self, tag: Tag, namespace: bytes, entry_bytes: int, header: bytes | OSError | None) -> int | None:
        """The checksum of an entry that was read; None if it is not right. See `FileReads.wait` for its header."""
        name = self._file_name(tag)
        checksum = checksum_in(header, namespace, tag, entry_bytes) if isinstance(header, bytes) and header else None
        if isinstance(header, OSError) and header.errno != errno.ENOENT:
            self.count("read_" + _reason(header), header)
            if header.errno in _LASTING:
                self._drop(name)
        elif isinstance(header, OSError):
            self.count("gone")
            self.folder.forget(name)
        elif header is None:
            self.count("gone")
        elif checksum is None:
            self.count("not_valid")
            self._drop(name)
        elif tag.kind == EntryKind.STATE:
            self.folder.touch(name)
        return checksum

    # -- remove --------------------------------------------------------------------------------------------------------

    def remove(self, tags: Iterable[Tag]) -> None:
        """See Tier: the entries were wrong when they arrived on the device. The thread that looks deletes their files."""
        for tag in tags:
            if self.contains(tag.kind, tag.key):
                self.count("wrong")
                name = self._file_name(tag)
                self._wrong[name] = None
                self.folder.forget(name)
        self._wake.set()

    def describe(self, stats: TierStats) -> None:
        """Add what is in the folder, and what was given up."""
        with self.folder.lock:
            space = self.folder.space
            if space is not None:
                stats.kv_blocks, stats.states = space.counts[EntryKind.KV], space.counts[EntryKind.STATE]
        stats.bytes_used, stats.bytes_budget = self.folder.bytes_used, self.folder.budget_bytes
        with self._counting:
            stats.faults = dict(self.counts)

    def clear(self) -> None:
        """See Tier. The entries stay: they are still right, and others use them."""

    def close(self) -> None:
        """Stop the thread, and release the locks."""
        self._closed = True
        self._wake.set()
        self.folder.close()

    def count(self, reason: str, error: BaseException | None = None) -> None:
        """Count what was given up; logs the first of each reason."""
        with self._counting:
            self.counts[reason] += 1
            first = self.counts[reason] == 1
        if first and error is not None:
            logger.error("shared folder: %s", error)

    def _file_name(self, tag: Tag) -> FileName:
        return FileName(tag.kind, tag.depth_tokens // self._block_tokens, tag.key, tag.parent)

    def _drop(self, name: FileName) -> None:
        try:
            self.folder.delete(name)
        except OSError as error:
            self.folder.forget(name)
            self.count("delete_" + _reason(error), error)


class FileFilling:
    """Entries of a folder that are being read; see `Filling`.

    Args:
        tier: The folder's tier.
        tags: See `Tier.get`.
        buffers: See `SharedTier.fill`.
    """

    def __init__(self, tier: FileTier, tags: Sequence[Tag], buffers: Sequence[Sequence[memoryview]]) -> None:
        self._tier, self._tags, self._sizes = tier, tags, [sum(map(len, views)) for views in buffers]
        with tier.folder.lock:
            self._namespace = tier._name
            paths = [tier._path(tag) for tag in tags]
        tier._reads[self] = time.monotonic()
        try:
            self._files = FileReads(paths, HEADER_BYTES, buffers)
        except BaseException:
            del tier._reads[self]
            raise

    def wait(self) -> list[int | None]:
        """See `Filling`."""
        headers = self._files.wait()
        self._tier._reads.pop(self, None)
        return [
            self._tier._judge(tag, self._namespace, size, header)
            for tag, size, header in zip(self._tags, self._sizes, headers, strict=True)
        ]

    def close(self) -> None:
        """See `Filling`."""
        self._files.close()
        self._tier._reads.pop(self, None)


def _watch(tier_of: Callable[[], FileTier | None], wake: threading.Event, refresh_s: float) -> None:
    """Look at what other processes have done, until the tier is gone or closed."""
    while True:
        wake.wait(refresh_s)
        wake.clear()
        tier = tier_of()
        if tier is None or tier._closed:
            return
        tier._try_to_look()
        del tier


def _reason(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error")
