"""Which checkpoint goes when a slot is needed. (KV blocks have an order of their own: ``index/blocks.py``.)

A policy only ranks. The facade drops a state whose KV path is gone at once, so what a policy is asked about is always
reachable. Decisions follow the order of calls alone (no wall time, no addresses), so that every rank takes the same.

A state is *spare* while it was kept on a guess (`Reason.INTERVAL`) and nobody has resumed from it. Spare states go before
all others, and another guess may only have the slot of one of them: guessing never costs what is known to be of use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from megatron_hybrid_prefix.policy.boundaries import Reason


class KeptState(Protocol):
    """What a policy may know of a published checkpoint: its place in the prefix tree, and why it is kept."""

    @property
    def depth_blocks(self) -> int:
        """Blocks before the state."""

    @property
    def slot(self) -> int:
        """Where it is; below 0 for a node that keeps no state (an ancestor)."""

    @property
    def reason(self) -> Reason | None:
        """Why it is kept; None for a node that keeps no state."""

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
        """``state`` was published; spare if it is kept on a guess."""

    def used(self, state: T) -> None:
        """A request resumes from ``state``, which is not spare any more; its ancestors are not told, they were of no use."""

    def removed(self, state: T) -> None:
        """``state`` is gone (evicted, or with its KV)."""

    def victim(self, evictable: Callable[[T], bool], *, spare_only: bool = False) -> T | None:
        """The state to lose next among those that are ``evictable`` (not pinned), or None; nothing changes.

        Args:
            evictable: Which may go.
            spare_only: Among the spare ones only.
        """

    def clear(self) -> None:
        """All states are gone."""


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


def make_eviction_policy[T: KeptState](name: str, kind: type[T]) -> EvictionPolicy[T]:
    """The policy called ``name`` over states of ``kind``.

    Raises:
        ValueError: There is no such policy.
    """
    if name == "lru":
        return LruEviction[T]()
    raise ValueError(f"eviction_policy={name!r}: must be 'lru'")
