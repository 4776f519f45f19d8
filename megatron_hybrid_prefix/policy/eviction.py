"""Which checkpoint goes when a slot is needed. (KV blocks have an order of their own: ``index/blocks.py``.)

A policy only ranks. The facade drops a state whose KV path is gone at once, so what a policy is asked about is always
reachable. Decisions follow the order of calls alone (no wall time, no addresses), so that every rank takes the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class KeptState(Protocol):
    """What a policy may know of a published checkpoint: its place in the prefix tree."""

    @property
    def depth_blocks(self) -> int:
        """Blocks before the state."""

    @property
    def slot(self) -> int:
        """Where it is; below 0 for a node that keeps no state (an ancestor)."""

    @property
    def parent(self) -> KeptState | None:
        """The node one block earlier."""


class EvictionPolicy[T: KeptState](Protocol):
    """Ranks published states; each verb O(log n) or better, amortised."""

    def __len__(self) -> int:
        """States ranked."""

    def __iter__(self) -> Iterator[T]:
        """States ranked, in any order; for ``check_integrity``."""

    def added(self, state: T) -> None:
        """``state`` was published."""

    def used(self, state: T) -> None:
        """A request resumes from ``state``; its ancestors are not told, they were of no use."""

    def removed(self, state: T) -> None:
        """``state`` is gone (evicted, or with its KV)."""

    def victim(self, evictable: Callable[[T], bool]) -> T | None:
        """The state to lose next among those that are ``evictable`` (not pinned), or None; nothing changes."""

    def clear(self) -> None:
        """All states are gone."""


class LruEviction[T: KeptState]:
    """Least recently used (or published) first, on the states' own clock: the order of a linked hash map.

    ``victim`` steps over pinned states, at most as many as requests wait between admission and first forward.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def added(self, state: T) -> None:
        """See EvictionPolicy."""
        self._order[state] = None

    def used(self, state: T) -> None:
        """See EvictionPolicy."""
        self._order.move_to_end(state)

    def removed(self, state: T) -> None:
        """See EvictionPolicy."""
        del self._order[state]

    def victim(self, evictable: Callable[[T], bool]) -> T | None:
        """See EvictionPolicy."""
        return next((state for state in self._order if evictable(state)), None)

    def clear(self) -> None:
        """See EvictionPolicy."""
        self._order.clear()


def make_eviction_policy[T: KeptState](name: str, kind: type[T]) -> EvictionPolicy[T]:
    """The policy called ``name`` over states of ``kind``.

    Raises:
        ValueError: There is no such policy.
    """
    if name == "lru":
        return LruEviction[T]()
    raise ValueError(f"eviction_policy={name!r}: must be 'lru'")
