"""`lru`: evicts the least recently used checkpoint, and guesses before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.needs import is_guess


class LruEviction[T: KeptState]:
    """Least recently used (or published) first. ``victim`` skips pinned states, of which there are few."""

    def __init__(self) -> None:
        self._guesses: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._guesses) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        return chain(self._guesses, self._others)

    def added(self, state: T) -> None:
        (self._guesses if is_guess(state) else self._others)[state] = None

    def used(self, state: T) -> None:
        (self._guesses if state in self._guesses else self._others).move_to_end(state)

    def removed(self, state: T) -> None:
        del (self._guesses if state in self._guesses else self._others)[state]

    def victim(self, evictable: Callable[[T], bool], *, guesses_only: bool = False) -> T | None:
        states = self._guesses if guesses_only else self
        return next((state for state in states if evictable(state)), None)

    def clear(self) -> None:
        self._guesses.clear()
        self._others.clear()
