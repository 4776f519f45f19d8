"""`ScoredEviction`: what the baselines `seglen` and `tlru` share. They only say in which order states go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import takewhile

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.needs import Ancestry


class ScoredEviction[T: KeptState](LruEviction[T], ABC):
    """Guesses first, as `lru`; the others in an order of the subclass. A victim takes O(n log n): good enough to compare with."""

    def __init__(self) -> None:
        super().__init__()
        self._ancestry: Ancestry[T] = Ancestry()  # of states that are no guesses

    @abstractmethod
    def order(self, states: Iterable[T]) -> Iterable[T]:
        """The states, first to go first. They come in the order of `lru`."""

    def replay_blocks(self, state: T) -> int:
        """Blocks from the nearest kept state above that is no guess: what a request for ``state`` computes without it."""
        above = self._ancestry.nearest_above(state)
        return state.depth_blocks - (0 if above is None else above.depth_blocks)

    def __iter__(self) -> Iterator[T]:
        yield from takewhile(lambda state: state not in self._others, super().__iter__())
        yield from self.order(self._others)

    def added(self, state: T) -> None:
        super().added(state)
        if state in self._others:
            self._ancestry.add(state)

    def removed(self, state: T) -> None:
        if state in self._others:
            self._ancestry.remove(state)
        super().removed(state)

    def clear(self) -> None:
        super().clear()
        self._ancestry.clear()
