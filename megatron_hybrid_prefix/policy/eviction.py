"""Which checkpoint goes when a slot is needed. (KV blocks have an order of their own: ``index/blocks.py``.)

A policy only ranks. The facade drops a state whose KV path is gone at once, so what a policy is asked about is always
reachable. Decisions follow the order of calls alone (no wall time, no addresses), so that every rank takes the same.

A state is *spare* while it was kept on a guess (`Reason.INTERVAL`) and nobody has resumed from it. Another guess may only
have the slot of a spare state: guessing never costs what is known to be of use.

- ``lru``: here; the least recently used goes first, spare ones before all others.
- ``replay_cost``: the one goes first whose loss is expected to cost the least (``replay_cost.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

from megatron_hybrid_prefix.policy.base import EvictionPolicy, KeptState
from megatron_hybrid_prefix.policy.boundaries import Reason
from megatron_hybrid_prefix.policy.replay_cost import ReplayCostEviction

__all__ = ["EvictionPolicy", "KeptState", "LruEviction", "ReplayCostEviction", "make_eviction_policy"]


class LruEviction[T: KeptState]:
    """Least recently used (or published) first, on the states' own clock, spare ones before the others.

    Two linked hash maps. ``victim`` steps over what is not evictable: pinned states, at most as many as requests wait
    between admission and first forward (a spare one is never pinned).

    Args:
        reason_of: Why a state is kept, where that is not its ``reason`` (in another tier).
    """

    def __init__(self, reason_of: Callable[[T], Reason | None] = attrgetter("reason")) -> None:
        self._reason_of = reason_of
        self._spare: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spare) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        return chain(self._spare, self._others)

    def added(self, state: T) -> None:
        """See EvictionPolicy."""
        (self._spare if self._reason_of(state) == Reason.INTERVAL else self._others)[state] = None

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


def make_eviction_policy[T: KeptState](
    name: str, kind: type[T], *, reason_of: Callable[[T], Reason | None] = attrgetter("reason")
) -> EvictionPolicy[T]:
    """The policy called ``name`` over states of ``kind``.

    Args:
        name: "lru" or "replay_cost".
        kind: Of the states.
        reason_of: Why a state is kept, where that is not its ``reason``: each tier has a policy of its own.

    Raises:
        ValueError: There is no such policy.
    """
    if name == "lru":
        return LruEviction[T](reason_of)
    if name == "replay_cost":
        return ReplayCostEviction[T](reason_of=reason_of)
    raise ValueError(f"eviction_policy={name!r}: must be 'lru' or 'replay_cost'")
