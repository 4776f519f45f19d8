"""`Tier`: the interface of a tier below the host memory. ``behind.py`` has such a tier as the cache uses it.

An entry is named by its content (`Tag`) and by a namespace: the weights, the layout and the rank that it depends on. So a tier
may outlive the process and be shared by several. If it holds more of a prompt than the host, entries come back through the host's pages.
"""

from __future__ import annotations

import atexit
import logging
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Protocol

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)


class DepthTier(Protocol):
    """Questions of the matcher to every tier below the device. Both methods are read-only."""

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """End, in blocks, of the gapless run of KV from ``keys[first]`` on; ``first`` if that block is not here."""

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """Depth, in blocks, of the deepest state in (after, limit] that is here; ``after`` if there is none."""


class Entry(NamedTuple):
    """An entry to be stored.

    Attributes:
        tag: Name of its content.
        data: Its bytes on this rank; valid only during the call.
        checksum: A signed 64-bit number over the tag and the bytes that left the device. Store it with the entry.
    """

    tag: Tag
    data: memoryview
    checksum: int


class Tier(ABC):
    """A tier below the host, on one rank.

    Several threads call `put`, `wants` and `get`, each for one entry, and may wait there. The engine's thread calls the other
    methods, which must not wait.

    A tier cannot produce wrong tokens: an entry that is lost, or comes back with other bytes, is dropped, counted and
    computed again. An exception is logged and counts as "not here".

    Every method takes the namespace: 16 bytes that are another number for other weights and for each rank. An entry of one
    namespace is not here in another.

    Args:
        settings: What the URL says: an object of `settings_class`.
        block_tokens: Tokens per block.
        make_ranking: Makes an eviction policy of the configured kind, for a tier that ranks its states.

    Attributes:
        settings_class: How the URL is read.
        wait_s: Requests wait for a load at most this long; one that is late on any rank is a miss on all.
        least_blocks: A load that saves fewer blocks than this is not begun, and a state less deep is not offered.
        threads: Threads that read.
        counts: Entries and loads that were given up, by reason.

    Raises:
        ValueError, OSError: The tier cannot be used; one line says why.
    """

    settings_class: ClassVar[type[TierSettings]] = TierSettings

    def __init__(self, settings: TierSettings, *, block_tokens: int, make_ranking: Callable[[], Any]) -> None:
        self.wait_s, self.threads = settings.wait_s, settings.threads
        self.least_blocks = ceil_div(settings.min_tokens, block_tokens)
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._about = "shared"  # for messages
        self._reads: dict[int, float] = {}  # reads that run: when they began (monotonic), by thread

    @abstractmethod
    def contains(self, namespace: bytes, kind: EntryKind, key: bytes) -> bool:
        """Whether the entry is here."""

    @abstractmethod
    def put(self, namespace: bytes, entry: Entry) -> bool:
        """Store an entry. Copy the bytes before returning. Returns whether it was stored."""

    @abstractmethod
    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        """Read an entry into buffers, one after the other, that have its length together.

        They lie in the host's memory: nothing may be written there after the return.

        Returns:
            The checksum stored with the entry, or None if it is not here (what is in the buffers is then ignored).
        """

    @abstractmethod
    def remove(self, namespace: bytes, tags: Iterable[Tag]) -> None:
        """Remove entries that came back wrong or not at all. Unknown entries are ignored."""

    def use_namespace(self, namespace: bytes) -> None:  # noqa: B027
        """The weights have this namespace from now on. Called before the first question about it; the first may wait."""

    def wants(self, namespace: bytes, tag: Tag) -> bool:
        """Whether the entry is to be put. A thread asks before it copies the bytes; False: it is here already."""
        return True

    def kv_depth(self, namespace: bytes, keys: Sequence[bytes], first: int) -> int:
        """Override it if one query for many keys is faster."""
        while first < len(keys) and self.contains(namespace, EntryKind.KV, keys[first]):
            first += 1
        return first

    def state_depth(self, namespace: bytes, keys: Sequence[bytes], after: int, limit: int) -> int:
        """Override it if one query for many keys is faster."""
        while limit > after and not self.contains(namespace, EntryKind.STATE, keys[limit - 1]):
            limit -= 1
        return max(after, limit)

    def describe(self, stats: TierStats) -> None:
        """Add what is here, and what was given up, to the statistics."""
        with self._counting:
            stats.faults = dict(self.counts)

    def close(self) -> None:  # noqa: B027
        """Let go of all that the tier holds. No other method is called after this one, but by threads that still run."""

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def count(self, reason: str, error: object = None) -> None:
        """Count what was given up; logs the first of each reason with an error."""
        with self._counting:
            self.counts[reason] += 1
            first = self.counts[reason] == 1
        if first and error is not None:
            logger.error("%s: %s: %s", self._about, reason, error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """This thread reads inside the block."""
        thread = threading.get_ident()
        self._reads[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._reads[thread]

    def _unless_stuck(self, depth: int, after: int) -> int:
        """The depth of a state; ``after`` while a read does not come back: what it comes from hangs."""
        if depth > after and self._is_stuck():
            self.count("stuck")
            return after
        return depth

    def _is_stuck(self) -> bool:
        """Whether a read has taken longer than a request waits."""
        oldest = min(list(self._reads.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > self.wait_s


# The header of a stored entry names the content, so that an entry that is torn, or another one, is known. The checksum of the entry's
# bytes was made on the device, and is compared there. The header has a digest of itself.
VERSION = 1  # of the header, and of the names of entries
_MAGIC = b"mhp-kv-s"
_FIELDS = struct.Struct("<8sII16s16s16sQQq")  # magic, version, kind, namespace, key, parent, depth, bytes, checksum
_DIGEST_BYTES = 16
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES


def make_header(namespace: bytes, tag: Tag, data_bytes: int, checksum: int) -> bytes:
    """The header of an entry, `HEADER_BYTES` long.

    Args:
        namespace: 16 bytes; see ``mcore/state/fingerprint.py``.
        tag: Name of the entry. Its epoch is not stored: the key depends on it.
        data_bytes: Bytes of the entry without the header.
        checksum: See `Entry`.
    """
    fields = _FIELDS.pack(
        _MAGIC, VERSION, tag.kind, namespace, tag.key, tag.parent, tag.depth_tokens, data_bytes, checksum
    )
    return fields + blake2b(fields, digest_size=_DIGEST_BYTES).digest()


def checksum_in(header: bytes, namespace: bytes, tag: Tag, data_bytes: int) -> int | None:
    """The checksum in a header; None if the header is not that of this entry."""
    checksum: int = _FIELDS.unpack(header[: _FIELDS.size])[-1]
    return checksum if header == make_header(namespace, tag, data_bytes, checksum) else None


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy bytes while other threads run. (An assignment to a slice would stop them.)"""
    import numpy as np  # not above: what only needs a tier's names, such as a replay, imports no numpy

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


_WORKERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in the order in which they began


def finish_at_exit(worker: Any) -> None:
    """Call its ``finish`` when the process ends, if it is still there: the interpreter must not go while its threads run."""
    _WORKERS[worker] = None


@atexit.register
def _at_exit() -> None:
    for worker in reversed(list(_WORKERS)):
        worker.finish()
