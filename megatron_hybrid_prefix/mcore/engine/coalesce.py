"""`Coalescing`: requests wait for a prefix that another request is computing, instead of computing it, too.

A waiting request is held back if its prompt shares more with a prompt being computed than with the cache. The other request is
told to checkpoint the state where the two prompts diverge. A request that wants the log-probs of its prompt waits only for one
that computes them, too. Decisions count tokens and rounds, never time, so all ranks decide
alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.mcore.context.request import PrefixRequest
from megatron_hybrid_prefix.requests.book import is_prefilling

# A round costs a step, so a request waits only for more than this. (A GPU step takes as long as a few hundred tokens.)
_MIN_SAVED_TOKENS = 256
# A request stops waiting after this many rounds without progress of the other one (it may lack KV blocks).
_MAX_IDLE_ROUNDS = 8


class Coalescing:
    """Which waiting requests wait for a prefix."""

    def __init__(self, cache: HybridPrefixCache, prefix_request: Callable[[Any], PrefixRequest]) -> None:
        self._cache = cache
        self._prefix_request = prefix_request
        # By waiting request: owner, the owner's progress, rounds without progress.
        self._idle: dict[int, tuple[int, int, int]] = {}

    def held_back(self, waiting: Iterable[Any], most: int) -> list[int]:
        """Ids of the requests to hold back in this round. Looks at the first ``most`` of the queue."""
        cache, block_tokens = self._cache, self._cache.block_tokens
        owners = _Owners(block_tokens)
        held: list[int] = []
        idle: dict[int, tuple[int, int, int]] = {}
        for request in islice(waiting, most):
            keys = self._prefix_request(request)
            live = cache.live.get(request.request_id)
            if live is not None:  # between two chunks
                if is_prefilling(live):
                    owners.add(keys.chain.keys, live.planned_tokens, request.request_id, keys.top_n)
                continue
            length = request.remaining_prompt_length
            resume = keys.match(cache, length).resume_tokens
            owner_of = owners.of(keys.top_n)
            if keys.read and owner_of:
                last_block = (length - 1) // block_tokens
                prompt_keys = keys.chain.keys
                # A key covers the whole prefix: after a key that is not shared, none is.
                first_own = bisect_left(
                    range(last_block), True, lo=resume // block_tokens, key=lambda i: prompt_keys[i] not in owner_of
                )
                shared_tokens = first_own * block_tokens
                if shared_tokens - resume >= _MIN_SAVED_TOKENS:
                    owner = owner_of[prompt_keys[first_own - 1]]
                    if self._waits(request.request_id, owner, shared_tokens, idle):
                        held.append(request.request_id)
                        continue
            if keys.write:
                owners.add(keys.chain.keys, resume, keys, keys.top_n)
        self._idle = idle
        return held

    def _waits(self, request_id: int, owner: Any, position_tokens: int, idle: dict[int, tuple[int, int, int]]) -> bool:
        """Tell the owner to checkpoint the state there; returns whether to wait for it."""
        if not isinstance(owner, int):
            owner.wanted.add(position_tokens)  # not admitted yet, but earlier in the queue
            return True
        if not self._cache.request_checkpoint(owner, position_tokens):
            return False
        progress = self._cache.live[owner].planned_tokens
        last_owner, last_progress, rounds = self._idle.get(request_id, (owner, -1, 0))
        rounds = rounds + 1 if (last_owner, last_progress) == (owner, progress) else 0
        idle[request_id] = (owner, progress, rounds)
        return rounds < _MAX_IDLE_ROUNDS


class _Owners:
    """Who computes which blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._by_top_n: dict[int | None, dict[bytes, Any]] = {None: {}}

    def add(self, keys: Sequence[bytes], start_tokens: int, owner: Any, top_n: int | None) -> None:
        """``owner`` computes the blocks with these keys from a position on, and with ``top_n`` their log-probs."""
        scored = [] if top_n is None else [top_n]
        for table in (self._by_top_n.setdefault(each, {}) for each in [None, *scored]):
            for key in keys[start_tokens // self._block_tokens :]:
                table.setdefault(key, owner)

    def of(self, top_n: int | None) -> Mapping[bytes, Any]:
        """Owners by key of a block; with ``top_n`` only those that compute its log-probs with as many most likely tokens."""
        if top_n is None:
            return self._by_top_n[None]
        enough = sorted(each for each in self._by_top_n if each is not None and each >= top_n)
        return ChainMap(*(self._by_top_n[each] for each in enough))
