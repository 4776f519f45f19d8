"""`ScoredEviction`: what the baselines `seglen` and `tlru` share. They only say which state goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.needs import Ancestry


class ScoredEviction[T: KeptState](LruEviction[T], ABC):
    """Guesses first, as `lru`. Of the other states the subclass picks one, in O(states): good enough to compare with."""

    def __init__(self) -> None:
        super().__init__()
        self._ancestry: Ancestry[T] = Ancestry()  # of states that are no guesses

    @abstractmethod
    def pick(self, states: Iterable[T]) -> T | None:
        """Which of ``states`` goes first; None if there are none. They are in the order of `lru`."""

    def replay_blocks(self, state: T) -> int:
        """Blocks from the nearest kept state above that is no guess: what a request for ``state`` computes without it."""
        return state.depth_blocks - self._ancestry.depth_above_blocks(state)

    def added(self, state: T) -> None:
        super().added(state)
        if state in self._others:
            self._ancestry.add(state)

    def used(self, state: T) -> None:
        if state not in self._others:
            self._ancestry.add(state)
        super().used(state)

    def removed(self, state: T) -> None:
        if state in self._others:
            self._ancestry.remove(state)
        super().removed(state)

    def victim(self, evictable: Callable[[T], bool], *, probationary_only: bool = False) -> T | None:
        guess = super().victim(evictable, probationary_only=True)
        return guess if guess is not None or probationary_only else self.pick(filter(evictable, self._others))

    def clear(self) -> None:
        super().clear()
        self._ancestry.clear()
