"""`lru`: the checkpoint goes first that was not used for the longest time, probationary ones before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class LruEviction[T: KeptState]:
    """Least recently used (or published) first, on the states' own clock, probationary ones before the others.

    Two linked hash maps. ``victim`` steps over what is not evictable: pinned states, at most as many as requests wait
    between admission and first forward (a probationary one is never pinned).
    """

    def __init__(self) -> None:
        self._probationary: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probationary) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        return chain(self._probationary, self._others)

    def added(self, state: T) -> None:
        """See EvictionPolicy."""
        (self._probationary if state.reason == CheckpointReason.INTERVAL else self._others)[state] = None

    def used(self, state: T) -> None:
        """See EvictionPolicy."""
        if state in self._probationary:
            del self._probationary[state]
            self._others[state] = None
        else:
            self._others.move_to_end(state)

    def removed(self, state: T) -> None:
        """See EvictionPolicy."""
        del (self._probationary if state in self._probationary else self._others)[state]

    def victim(self, evictable: Callable[[T], bool], *, probationary_only: bool = False) -> T | None:
        """See EvictionPolicy."""
        states = self._probationary if probationary_only else self
        return next((state for state in states if evictable(state)), None)

    def clear(self) -> None:
        """See EvictionPolicy."""
        self._probationary.clear()
        self._others.clear()
