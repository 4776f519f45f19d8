"""`Inspector`: questions about requests and about what is cached. They change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.requests import RequestBook
from megatron_hybrid_prefix.index.store import PrefixStore
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.pool.slots import NO_SLOT


class Inspector:
    """See the module; ``cache.inspect``.

    Args:
        store: What is cached.
        requests: Who uses it.
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

    def prefilling(self) -> list[int]:
        """Live requests that have prompt tokens left to plan, and cache what they compute, in the order of admission."""
        live = self._requests.live
        return [i for i, request in live.items() if request.write and request.planned_tokens < request.prompt_tokens]

    def planned_tokens(self, request_id: int) -> int:
        """Up to where a live request's forwards are planned."""
        return self._requests[request_id].planned_tokens

    def block_ids(self, request_id: int) -> tuple[int, ...]:
        """KV blocks of a live request, front first."""
        return tuple(self._requests[request_id].block_ids)

    def sequence_tokens(self, request_id: int) -> int:
        """Tokens of a live request that the cache knows: its prompt, and what was appended."""
        return self._requests[request_id].chain.tokens

    def request_keys(self, request_id: int) -> tuple[bytes, ...]:
        """Keys of a live request's full blocks, front first."""
        return tuple(self._requests[request_id].chain.keys)

    # -- what is cached ------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes of the prefix tree, in any order."""
        return iter(self._store.tree)

    def cached_slot(self, key: bytes) -> int | None:
        """Slot of the state kept at the end of the block with this key, if there is one."""
        node = self._store.tree.get(key)
        return None if node is None or node.slot == NO_SLOT else node.slot

    @property
    def host_tier(self) -> HostTier | None:
        """What is on the host."""
        return self._store.host
