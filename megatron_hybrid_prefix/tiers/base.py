"""What a tier is: how deep it holds a prefix, and, behind the host, how entries go there and come back.

Entries are named by what they hold (`Tag`), so a tier may outlive the process, or be shared by several. What the host evicts
is offered to the tier behind it; what a prompt could resume from deeper there comes back through the host's pages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)


class DepthTier(Protocol):
    """What the matcher asks of every tier below the device. Both questions change nothing."""

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """Blocks up to which the KV of ``keys[first:]`` lies here without a gap; ``first`` where the next block does not."""

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """Blocks before the deepest state that lies here, in (after, limit]; ``after`` where there is none."""


class Entry(NamedTuple):
    """An entry on its way to a tier.

    Attributes:
        tag: What it holds.
        data: Its bytes on this rank; valid only during the call.
        checksum: A signed 64-bit number, of the tag and of the bytes as they left the device; it has to come back with them.
    """

    tag: Tag
    data: memoryview
    checksum: int


class Tier(ABC):
    """A tier behind the host, on one rank. Only one thread calls it.

    Whatever it does costs time at most: an entry that does not come back, or comes back with other bytes, is dropped,
    counted, and computed again. An exception is logged, and counts as "no".

    Attributes:
        same_on_all_ranks: Whether the tiers of all ranks hold the same, whatever happens to a copy on one of them. Else
            ranks agree on depths, where there are several, which costs them a collective for every question.
    """

    same_on_all_ranks: bool = False

    @abstractmethod
    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """Whether such an entry lies here."""

    @abstractmethod
    def put(self, entries: Sequence[Entry]) -> Sequence[bool]:
        """Keep these entries, or refuse some; the bytes have to be copied before it returns.

        Returns:
            Of each entry whether it is kept.
        """

    @abstractmethod
    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> Sequence[int | None]:
        """Write entries into buffers, each as long as the entry.

        Returns:
            Of each entry the checksum that came with it; None where it does not lie here (the buffer is not used then).
        """

    @abstractmethod
    def remove(self, tags: Iterable[Tag]) -> None:
        """These entries came back wrong, or not at all: they lie here no more. Unknown ones are passed over."""

    @abstractmethod
    def clear(self) -> None:
        """Nothing that this process stored lies here any more."""

    def invalidate(self, epoch: int) -> None:
        """The weights changed: keys of before are never asked for again.

        Args:
            epoch: Of the new weights.
        """
        self.clear()

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`; override it where one question for many keys is faster."""
        while first < len(keys) and self.contains(EntryKind.KV, keys[first]):
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`; override it where one question for many keys is faster."""
        while limit > after and not self.contains(EntryKind.STATE, keys[limit - 1]):
            limit -= 1
        return max(after, limit)


class TierBehind:
    """The tier behind the host as the cache sees it: what it says is agreed on by all ranks, and it never raises.

    Args:
        name: In transfers and statistics.
        tier: This rank's.
        agree: The least value of all ranks, which call it together; None: there is one rank.
    """

    def __init__(self, name: str, tier: Tier, agree: Callable[[int], int] | None = None) -> None:
        self.name = name
        self.tier = tier
        self._agree: Callable[[int], int] = int if agree is None or tier.same_on_all_ranks else agree

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """Whether such an entry lies here, on this rank."""
        return self._ask(False, self.tier.contains, kind, key)

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`."""
        return self._agree(self._ask(first, self.tier.kv_depth, keys, first))

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`. A state that one rank lacks is of no use, so ranks go down until all have the same one."""
        tried = limit + 1
        while after < limit < tried:
            tried, limit = limit, self._agree(self._ask(after, self.tier.state_depth, keys, after, limit))
        return max(after, limit)

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
