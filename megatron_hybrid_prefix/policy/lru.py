"""`lru`: the checkpoint goes first that was not used for the longest time, spare ones before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import Reason


class LruEviction[T: KeptState]:
    """Least recently used (or published) first, on the states' own clock, spare ones before the others.

    Two linked hash maps. ``victim`` steps over what is not evictable: pinned states, at most as many as requests wait
    between admission and first forward (a spare one is never pinned).
    """

    def __init__(self) -> None:
        self._spare: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spare) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        return chain(self._spare, self._others)

    def added(self, state: T) -> None:
        """See EvictionPolicy."""
        (self._spare if state.reason == Reason.INTERVAL else self._others)[state] = None

    def used(self, state: T) -> None:
        """See EvictionPolicy."""
        if state in self._spare:
            del self._spare[state]
            self._others[state] = None
        else:
            self._others.move_to_end(state)

    def removed(self, state: T) -> None:
        """See EvictionPolicy."""
        del (self._spare if state in self._spare else self._others)[state]

    def victim(self, evictable: Callable[[T], bool], *, spare_only: bool = False) -> T | None:
        """See EvictionPolicy."""
        states = self._spare if spare_only else self
        return next((state for state in states if evictable(state)), None)

    def clear(self) -> None:
        """See EvictionPolicy."""
        self._spare.clear()
        self._others.clear()
