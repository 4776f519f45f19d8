"""What a policy may know of a kept state, and what a policy is asked.

A policy only ranks. The cache drops a state whose KV path is gone at once, so what a policy is asked about is always
reachable. Decisions follow the order of calls alone (no wall time, no addresses), so that every rank takes the same.

A state is *probationary* while it was kept on a guess (`CheckpointReason.INTERVAL`) and nobody has resumed from it. Another guess may only
have the slot of a probationary state: guessing never costs what is known to be of use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, Self

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class KeptState(Protocol):
    """What a policy may know of a published checkpoint: its place in the prefix tree, and why it is kept.

    Where a state is kept (on the device, on the host) is not asked: a policy ranks what it is told of.
    """

    @property
    def key(self) -> bytes:
        """Digest of all tokens before the state; the same when the state is lost and made again."""

    @property
    def depth_blocks(self) -> int:
        """Blocks before the state."""

    @property
    def reason(self) -> CheckpointReason | None:
        """Why it is kept; None for a node that keeps no state."""

    @property
    def parent(self) -> Self | None:
        """The node one block earlier."""


class EvictionPolicy[T: KeptState](Protocol):
    """Ranks published states; each verb O(log n) or better, amortised."""

    def __len__(self) -> int:
        """States ranked."""

    def __iter__(self) -> Iterator[T]:
        """States ranked, in any order; for ``check_integrity``."""

    def added(self, state: T) -> None:
        """``state`` was published; probationary if it is kept on a guess."""

    def used(self, state: T) -> None:
        """A request resumes from ``state``, which is not probationary any more; its ancestors are not told, they were of no use."""

    def removed(self, state: T) -> None:
        """``state`` is gone (evicted, or with its KV)."""

    def victim(self, evictable: Callable[[T], bool], *, probationary_only: bool = False) -> T | None:
        """The state to lose next among those that are ``evictable`` (not pinned), or None; asking changes no order.

        Args:
            evictable: Which may go.
            probationary_only: Among the probationary ones only.
        """

    def clear(self) -> None:
        """All states are gone."""
