"""`TierBehind`: the tier below the host, as the cache uses it. `EndOfChain`: there is none."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)


class EndOfChain:
    """What the host asks of the tier below it, answered where there is none: it has nothing and takes nothing.

    Attributes:
        takes: Whether it takes entries.
        least_blocks: A load that saves fewer blocks is not begun, and a state less deep is not offered.
    """

    takes = False
    least_blocks = sys.maxsize

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        """Whether the entry is here, on this rank."""
        return False

    def knows(self, kind: EntryKind, key: bytes) -> bool:
        """`contains`, for a reader that must change nothing."""
        return False

    def remove(self, tags: Iterable[Tag]) -> None:
        """Removes entries that came back wrong or not at all."""

    def invalidate(self, epoch: int) -> None:
        """The weights changed."""


END_OF_CHAIN = EndOfChain()


class TierBehind(EndOfChain):
    """The tier below the host, as the cache uses it: all ranks get the same answers, and no method raises.

    It has nothing until its namespace is known.

    Args:
        tier: The tier of this rank.
        agree: Returns the minimum over all ranks; a collective. By default there is one rank.
    """

    def __init__(self, tier: Tier, agree: Callable[[int], int] = int) -> None:
        self.tier, self.least_blocks, self.takes = tier, tier.least_blocks, True
        self._agree = agree
        self._make_namespace: Callable[[], bytes] | None = None
        self._namespace, self._epoch = b"", 0

    def name_entries(self, make_namespace: Callable[[], bytes]) -> None:
        """Use a namespace.

        Args:
            make_namespace: Returns 16 bytes made of all that entries depend on: weights, layout, rank, versions. Called now, and
                again when it is needed after the weights have changed.
        """
        self._make_namespace, self._namespace = make_namespace, b""
        self.namespace()

    def invalidate(self, epoch: int) -> None:
        """The weights changed: entries get another namespace. Nothing is removed."""
        self._epoch, self._namespace = epoch, b""

    def namespace(self, epoch: int | None = None) -> bytes:
        """The namespace of the weights of this epoch (None: of now); empty if it is not known any more."""
        if epoch is not None and epoch != self._epoch:
            return b""
        if not self._namespace and self._make_namespace is not None:
            try:
                namespace = self._make_namespace()
                self.tier.use_namespace(namespace)
                self._namespace = namespace
            except Exception as error:  # a plugin's code may raise anything
                logger.error("the tier behind the host: its namespace cannot be used: %r", error)
        return self._namespace

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        return self._ask(False, self.tier.contains, kind, key)

    def knows(self, kind: EntryKind, key: bytes) -> bool:
        """Makes no namespace."""
        return bool(self._namespace) and self.contains(kind, key)

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        return self._agree(self._ask(first, self.tier.kv_depth, keys, first))

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """Ranks go down to the deepest state that all of them hold, and that is worth a load."""
        tried = limit + 1
        while after < limit < tried:
            tried, limit = limit, self._agree(self._ask(after, self.tier.state_depth, keys, after, limit))
        return limit if limit - after >= max(1, self.least_blocks) else after

    def remove(self, tags: Iterable[Tag]) -> None:
        self._ask(None, self.tier.remove, tags)

    def _ask[T](self, otherwise: T, question: Callable[..., T], *arguments: Any) -> T:
        try:
            namespace = self.namespace()
            return question(namespace, *arguments) if namespace else otherwise
        except Exception as error:  # a plugin's code may raise anything
            logger.error("the tier behind the host: %s failed: %r", question.__name__, error)
            return otherwise
