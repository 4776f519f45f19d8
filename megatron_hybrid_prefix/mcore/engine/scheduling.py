"""`PrefixScheduling`: which waiting requests a round admits, with a cache.

A request waits while its prefix is read from the tier behind the host, or computed for another request. A prompt with less than one uncached
block does not wait for the chunks of another prompt. Megatron decides everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from megatron_hybrid_prefix.mcore.context.admission import LostLoad
from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.context.request import PrefixRequest
from megatron_hybrid_prefix.mcore.engine.coalesce import Coalescing
from megatron_hybrid_prefix.upstream.engine import EngineSeam

# While a prompt is computed in chunks, up to 1/N of a step's tokens may admit prompts with less than one uncached block.
_BESIDE_CHUNK_DIVISOR = 4
# The first requests of the queue among which a prompt's group is looked for. Samples of one prompt are sent together.
_GROUP_WITHIN = 1024
# Waiting requests to look at per free row: those that are held back take no row.
_CANDIDATES_PER_ROW = 4


class PrefixScheduling:
    """Megatron's scheduling, without requests that wait for a prefix."""

    def __init__(self, engine: EngineSeam, context: HybridPrefixContext) -> None:
        self._engine = engine
        self._context = context
        self._cache = context.prefix_cache
        self._coalescing = Coalescing(self._cache, context.prefix_request) if context.checkpoint_slots else None
        self._queue: list[int] = []  # of this round, with those that are held back
        self._groups: Counter[bytes] | None = None  # among them, by their last key; None: not counted yet

    def schedule(self, admit: Callable[[], None]) -> None:
        """One round. ``admit``: megatron's scheduling of the requests in the queue."""
        waiting, context = self._engine.waiting_request_ids, self._context
        before = self._queue = list(waiting)
        self._groups = None
        context.group_of = self._group_of if len(before) > 1 else None
        held = self._wait_for_fetches() | self._hold_back()
        if context.chunked_prefill_request_id != -1:
            with suppress(LostLoad):
                self._start_beside_chunk()
        with suppress(LostLoad):
            admit()
        if held:
            left = held.union(waiting)
            chunked = context.chunked_prefill_request_id  # must stay first
            self._set_queue([i for i in before if i == chunked] + [i for i in before if i in left and i != chunked])

    def _group_of(self, known: PrefixRequest) -> int:
        """Number of other waiting requests with the same whole blocks: samples of one prompt."""
        if self._groups is None:
            requests = map(self._engine.get_request, self._queue[:_GROUP_WITHIN])
            waiting = (self._context.prefix_request(request) for request in requests)
            self._groups = Counter(
                each.chain.keys[-1] for each in waiting if each.chain.keys and not each.counted_tokens
            )
        return max(0, self._groups[known.chain.keys[-1]] - 1) if known.chain.keys else 0

    def _wait_for_fetches(self) -> set[int]:
        """Removes requests from the queue that wait in this round for the tier behind the host."""
        engine, context = self._engine, self._context
        if context.host_moves is None or context.paused_request_count:
            return set()  # with paused requests, no request is admitted
        held: set[int] = set()
        free_rows = context.max_requests - context.total_request_count
        for seen, request_id in enumerate(list(islice(engine.waiting_request_ids, _CANDIDATES_PER_ROW * free_rows))):
            request = engine.get_request(request_id)
            between_chunks = request.finished_chunk_token_count > 0
            others_run = context.total_request_count > 0 or seen > len(held)
            if not between_chunks and context.loads.waits(request, others_run):
                held.add(request_id)
        self._take_from_queue(held)
        return held

    def _hold_back(self) -> set[int]:
        """Remove requests from the queue that wait in this round for a prefix of another request."""
        engine, context = self._engine, self._context
        if self._coalescing is None or len(engine.waiting_request_ids) < 2:
            return set()
        if not engine.can_admit(engine.get_request(engine.waiting_request_ids[0])):
            return set()  # this round admits no request
        free_rows = context.max_requests - context.total_request_count
        waiting = (engine.get_request(i) for i in engine.waiting_request_ids)
        held = set(self._coalescing.held_back(waiting, most=_CANDIDATES_PER_ROW * free_rows))
        engine.count_waits(len(held))
        self._take_from_queue(held)
        return held

    def _start_beside_chunk(self) -> None:
        """Admit prompts with few uncached tokens, with a part of the step's tokens; the chunk gets the rest."""
        engine, context = self._engine, self._context
        most_tokens = context.max_tokens // _BESIDE_CHUNK_DIVISOR
        free_rows = context.max_requests - context.total_request_count - 1  # one row is the chunk's
        for request_id in list(islice(engine.waiting_request_ids, 1, 1 + _CANDIDATES_PER_ROW * max(0, free_rows))):
            request = engine.get_request(request_id)
            length = request.remaining_prompt_length
            resume = context.prefix_request(request).match(self._cache, length).resume_tokens
            tokens = length - resume
            if not resume or tokens > min(most_tokens, context.block_size_tokens):
                continue
            if context.total_request_count + 2 > context.max_requests or not all(context.check_availability(request)):
                return
            context.add_beside_chunk(request)
            most_tokens -= tokens
            request.remaining_prompt_tokens = request.remaining_prompt_tokens.new_empty(0)
            request.add_event_add_context()
            engine.waiting_request_ids.remove(request_id)
            engine.request_admitted()

    def _take_from_queue(self, request_ids: set[int]) -> None:
        if request_ids:
            self._set_queue([i for i in self._engine.waiting_request_ids if i not in request_ids])

    def _set_queue(self, request_ids: list[int]) -> None:
        self._engine.waiting_request_ids.clear()
        self._engine.waiting_request_ids.extend(request_ids)
