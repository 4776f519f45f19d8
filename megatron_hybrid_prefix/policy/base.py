"""The interface of an eviction policy, and what it may know of a state.

A policy only ranks states. The cache drops a state as soon as its KV is evicted, so every state that a policy ranks can
be reached. The ranking depends only on the order of calls, never on wall time or addresses. So all ranks decide alike.

A policy ranks no *guesses*: speculative checkpoints, which the cache drops before all else (``tiers/blocks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, runtime_checkable

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class KeptState(Protocol):
    """A published checkpoint, as a policy sees it: its place in the prefix tree, and why it is kept.

    A policy does not know on which tier the state is. Each tier has its own policy object (see also `KnowsTiers`).
    """

    @property
    def key(self) -> bytes:
        """Hash of all tokens before the state. A state that is evicted and computed again has the same key."""

    @property
    def depth_blocks(self) -> int:
        """Number of blocks before the state."""

    @property
    def reason(self) -> CheckpointReason | None:
        """Why the state is kept; None for a node without a state."""

    @property
    def parent(self) -> Self | None:
        """The node of the previous block."""


class EvictionPolicy[T: KeptState](Protocol):
    """Ranks published states. Each method should take O(log n) or less, amortised."""

    def __len__(self) -> int:
        """Number of ranked states."""

    def __iter__(self) -> Iterator[T]:
        """The ranked states, in any order. Used by ``check_integrity``."""

    def added(self, state: T) -> None:
        """``state`` was published."""

    def used(self, state: T) -> None:
        """A request resumes from ``state``.

        The states above it get no call, because the request does not use them.
        """

    def removed(self, state: T) -> None:
        """``state`` was evicted, or dropped with its KV."""

    def victim(self, evictable: Callable[[T], bool]) -> T | None:
        """The state to evict next; None if there is none. Changes no order.

        Args:
            evictable: Whether a state may be evicted (it is not pinned).
        """

    def clear(self) -> None:
        """All states were dropped."""


@runtime_checkable
class SharesMemory(Protocol):
    """A policy that can rank states by value per byte freed, for a memory that KV and states share.

    Other policies rank states alone: then KV from which no request can resume goes first, and after it their victim.
    """

    def share_memory(self, *, state_blocks: float) -> None:
        """States and KV share their memory. Called once for each tier, before any other method but `tier_below`.

        Args:
            state_blocks: Bytes of a state, in KV blocks.
        """


@runtime_checkable
class KnowsHolders(Protocol):
    """A policy that ranks by what evicting a state frees, and so asks which KV running requests hold."""

    def know_holders(self, is_held: Callable[[Any], bool]) -> None:
        """Running requests hold KV of the device, so that it does not go with a state. Called at most once.

        Args:
            is_held: Whether they hold the KV before a state.
        """

    def rank(self, state: Any) -> None:
        """They do not hold the KV before ``state`` any more: evicting it frees more bytes now."""


@runtime_checkable
class KnowsTiers(Protocol):
    """A policy that knows which states the tier below keeps, too.

    Its history of a state goes on when the state moves between the tiers, and a state is lost only when no tier keeps it. Other
    policies get a second object for the tier below, which knows nothing of the first.
    """

    def tier_below(self) -> EvictionPolicy[Any]:
        """The policy of the tier below. Called once, before any other method."""


@runtime_checkable
class RemembersEvicted(Protocol):
    """A policy that remembers states for a while after no tier keeps them any more."""

    def evicted_keys(self) -> Iterable[bytes]:
        """Keys of these states, evicted longest ago first."""
