"""`lru`: evicts the least recently used checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from megatron_hybrid_prefix.policy.base import KeptState


class LruEviction[T: KeptState]:
    """Least recently used (or published) first. ``victim`` skips pinned states, of which there are few."""

    def __init__(self) -> None:
        self._states: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[T]:
        return iter(self._states)

    def added(self, state: T) -> None:
        self._states[state] = None

    def used(self, state: T) -> None:
        self._states.move_to_end(state)

    def removed(self, state: T) -> None:
        del self._states[state]

    def victim(self, evictable: Callable[[T], bool]) -> T | None:
        return next((state for state in self._states if evictable(state)), None)

    def clear(self) -> None:
        self._states.clear()
