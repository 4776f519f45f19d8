"""`lru`: evicts the least recently used checkpoint, and probationary checkpoints before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class LruEviction[T: KeptState]:
    """Least recently used (or published) first, probationary states before all others.

    Two linked hash maps. ``victim`` skips pinned states. A state is pinned from a request's admission to its first
    forward, so there are few; a probationary state is never pinned.
    """

    def __init__(self) -> None:
        self._probationary: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probationary) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        return chain(self._probationary, self._others)

    def added(self, state: T) -> None:
        (self._probationary if state.reason == CheckpointReason.INTERVAL else self._others)[state] = None

    def used(self, state: T) -> None:
        if state in self._probationary:
            del self._probationary[state]
            self._others[state] = None
        else:
            self._others.move_to_end(state)

    def removed(self, state: T) -> None:
        del (self._probationary if state in self._probationary else self._others)[state]

    def victim(self, evictable: Callable[[T], bool], *, probationary_only: bool = False) -> T | None:
        states = self._probationary if probationary_only else self
        return next((state for state in states if evictable(state)), None)

    def clear(self) -> None:
        self._probationary.clear()
        self._others.clear()
