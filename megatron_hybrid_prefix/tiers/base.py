"""Interfaces of a tier: how deep it holds a prefix, and how entries are stored behind the host and loaded back.

An entry is named by its content (`Tag`), so a tier may outlive the process or be shared by several. The tier behind the host is
offered what the host evicts. If it holds more of a prompt than the host, entries come back through the host's pages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)


class DepthTier(Protocol):
    """What the matcher asks of every tier below the device. Both methods are read-only."""

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
    """A tier behind the host, on one rank. Only one thread calls it.

    A tier cannot produce wrong tokens: an entry that is lost, or comes back with other bytes, is dropped, counted and
    computed again. An exception is logged and counts as "not here".

    Attributes:
        same_on_all_ranks: True: the tiers of all ranks always hold the same entries. False: with several ranks each
            depth query costs a collective, by which ranks agree.
    """

    same_on_all_ranks: bool = False

    @abstractmethod
    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """Whether the entry is here."""

    @abstractmethod
    def put(self, entries: Sequence[Entry]) -> Sequence[bool]:
        """Store entries; a tier may refuse some. Copy the bytes before returning.

        Returns:
            For each entry: whether it was stored.
        """

    @abstractmethod
    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> Sequence[int | None]:
        """Read entries into buffers. Each buffer has the length of its entry.

        Returns:
            For each entry: the checksum stored with it, or None if it is not here (its buffer is then ignored).
        """

    @abstractmethod
    def remove(self, tags: Iterable[Tag]) -> None:
        """Remove entries that came back wrong or not at all. Unknown entries are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything that this process stored."""

    def invalidate(self, epoch: int) -> None:
        """The weights changed: older keys are never asked for again.

        Args:
            epoch: Epoch of the new weights.
        """
        self.clear()

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`. Override it if one query for many keys is faster."""
        while first < len(keys) and self.contains(EntryKind.KV, keys[first]):
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`. Override it if one query for many keys is faster."""
        while limit > after and not self.contains(EntryKind.STATE, keys[limit - 1]):
            limit -= 1
        return max(after, limit)


class Filling(Protocol):
    """Entries that are being read into pages of the host."""

    def wait(self) -> Sequence[int | None]:
        """Wait until nothing writes to the pages any more. Returns what `Tier.get` does."""

    def close(self) -> None:
        """Tidy up, after `wait`; waits itself if need be. Called in any case."""


class SharedTier(Tier):
    """A tier that outlives the process. Threads call `put`, `get` and `fill`, while the engine's thread calls the other methods.

    It is offered states that are no guesses as soon as they are computed, after the KV before them, and nothing when the
    host evicts.

    Attributes:
        wait_s: Requests wait for a load at most this long; one that is late on any rank is a miss on all.
        least_blocks: A load that saves fewer blocks than this is not begun, and a state less deep is not offered.
        threads: Threads that read.
        fills: Entries are read by `fill`, not by `get`.
    """

    wait_s: float = 1.0
    least_blocks: int = 0
    threads: int = 8
    fills: bool = False

    def wants(self, tag: Tag) -> bool:
        """Whether the entry is to be put. A thread asks before it copies the bytes; False: it is here already."""
        return True

    def use_memory(self, memory: memoryview) -> None:
        """What this thread passes to `put` and `get` lies in this memory, which stays as long as the tier is used."""

    def fill(self, tags: Sequence[Tag], buffers: Sequence[Sequence[memoryview]]) -> Filling:
        """Begin to read entries, as `get` does, but straight into pages of the host.

        Args:
            tags: See `get`.
            buffers: For each entry: receive its bytes, one after the other.
        """
        raise NotImplementedError


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy bytes while other threads run. (An assignment to a slice would stop them.)"""
    import numpy as np  # not above: what only needs a tier's names, such as a replay, imports no numpy

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class TierBehind:
    """The tier behind the host, as the cache uses it: all ranks get the same answers, and no method raises.

    Args:
        name: Its name in transfers and statistics.
        tier: The tier of this rank.
        agree: Returns the minimum over all ranks; a collective. None: there is one rank.

    Attributes:
        shared, least_blocks: Whether it is a `SharedTier`, and its limit.
    """

    def __init__(self, name: str, tier: Tier, agree: Callable[[int], int] | None = None) -> None:
        self.name = name
        self.tier = tier
        self.shared = isinstance(tier, SharedTier)
        self.least_blocks = tier.least_blocks if isinstance(tier, SharedTier) else 0
        self._agree: Callable[[int], int] = int if agree is None or tier.same_on_all_ranks else agree

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """Whether the entry is here, on this rank."""
        return self._ask(False, self.tier.contains, kind, key)

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`."""
        return self._agree(self._ask(first, self.tier.kv_depth, keys, first))

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`. Ranks go down to the deepest state that all of them hold, and that is worth a load."""
        tried = limit + 1
        while after < limit < tried:
            tried, limit = limit, self._agree(self._ask(after, self.tier.state_depth, keys, after, limit))
        return limit if limit - after >= max(1, self.least_blocks) else after

    def remove(self, tags: Iterable[Tag]) -> None:
        """See `Tier`."""
        self._ask(None, self.tier.remove, tags)

    def clear(self) -> None:
        """See `Tier`."""
        self._ask(None, self.tier.clear)

    def invalidate(self, epoch: int) -> None:
        """See `Tier`."""
        self._ask(None, self.tier.invalidate, epoch)

    def _ask[T](self, otherwise: T, question: Callable[..., T], *arguments: Any) -> T:
        try:
            return question(*arguments)
        except Exception as error:  # a plugin's code may raise anything
            logger.error("the tier %r behind the host: %s failed: %r", self.name, question.__name__, error)
            return otherwise
