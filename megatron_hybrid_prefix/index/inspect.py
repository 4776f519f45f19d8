"""`Inspector`: read-only queries about requests and about the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps

from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.requests import RequestBook
from megatron_hybrid_prefix.index.store import MemoryUse, PrefixStore
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.pool.slots import NO_SLOT


class Inspector:
    """Read-only queries (``cache.inspect``).

    Args:
        store: The cached blocks and states.
        requests: All requests.
    """

    def __init__(self, store: PrefixStore, requests: RequestBook) -> None:
        self._store, self._requests = store, requests

    # -- requests ------------------------------------------------------------------------------------------------------

    def is_live(self, request_id: int) -> bool:
        """Whether the request is admitted and not released."""
        return self._requests.is_admitted(request_id)

    def live_requests(self) -> list[int]:
        """Ids of the requests that are admitted and not released."""
        return [request_id for request_id, live in self._requests.live.items() if not live.is_loading]

    def loading_requests(self) -> list[int]:
        """Ids of the requests that hold a load and are not admitted yet."""
        return [request_id for request_id, live in self._requests.live.items() if live.is_loading]

    def prefilling(self) -> list[int]:
        """Live requests with prompt tokens left to plan that also write to the cache, in the order of admission."""
        live = self._requests.live
        return [i for i, request in live.items() if request.write and request.planned_tokens < request.prompt_tokens]

    def planned_tokens(self, request_id: int) -> int:
        """Position up to which a live request's forwards are planned."""
        return self._requests[request_id].planned_tokens

    def block_ids(self, request_id: int) -> tuple[int, ...]:
        """KV blocks of a live or loading request, front first."""
        return tuple(self._requests[request_id].block_ids)

    def sequence_tokens(self, request_id: int) -> int:
        """Length of a live request: its prompt and the appended tokens."""
        return self._requests[request_id].chain.tokens

    def request_keys(self, request_id: int) -> tuple[bytes, ...]:
        """Keys of a live request's full blocks, front first."""
        return tuple(self._requests[request_id].chain.keys)

    def live_slot(self, request_id: int) -> int | None:
        """Slot of a live request's own state; None if the engine has slots of its own for them."""
        return self._requests[request_id].live_slot

    # -- the cache -----------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes of the prefix tree, in any order."""
        return iter(self._store.tree)

    def memory_use(self) -> MemoryUse:
        """Who uses the memory. O(blocks)."""
        return self._store.memory_use()

    @contextmanager
    def watched_room(self, watch: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """A context that enters ``watch()`` around each call that takes blocks or a slot: with what it evicts and moves."""
        with ExitStack() as stack:
            stack.enter_context(watched_calls(self._store, ("take_blocks",), watch))
            stack.enter_context(watched_calls(self._store.checkpoints, ("take_slot", "take_probationary_slot"), watch))
            yield

    @property
    def node_count(self) -> int:
        """Number of nodes of the prefix tree."""
        return len(self._store.tree)

    def nodes_with_state(self) -> Iterator[Node]:
        """Nodes with a state on the device, in any order."""
        return (node for node in self._store.tree if node.slot != NO_SLOT)

    def node(self, key: bytes) -> Node | None:
        """The node with this key, on any tier; None if there is none."""
        return self._store.tree.get(key)

    def evictable(self) -> Iterator[Node]:
        """Nodes whose KV block has ref count 0, in the order of eviction."""
        return self._store.blocks.queue()

    def slot_readers(self, slot: int) -> int:
        """Number of admitted requests that still have to read the slot. The slot is pinned until then."""
        return self._store.slots.pins(slot)

    @property
    def free_slots(self) -> int:
        """Number of free checkpoint slots."""
        return self._store.slots.free_slots

    def cached_slot(self, key: bytes) -> int | None:
        """Slot of the state at the end of the block with this key; None if there is none on the device."""
        node = self._store.tree.get(key)
        return None if node is None or node.slot == NO_SLOT else node.slot

    @property
    def host_tier(self) -> HostTier | None:
        """The host tier; None if there is none."""
        return self._store.host


@contextmanager
def watched_calls(
    owner: object, names: Sequence[str], watch: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A context that enters ``watch()`` around each call of these methods of one object, to measure them."""

    def watched[**P, R](call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with watch():
                return call(*args, **kwargs)

        return within

    for name in names:
        setattr(owner, name, watched(getattr(owner, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)
