"""`PrefixScheduling`: which waiting requests are admitted in a round, where there is a cache.

A request waits for its prefix while that is loaded from the host, or computed for another request. A prompt that is cached but
for a little does not wait for the chunks of another one. All else is megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.engine.coalesce import Coalescing
from megatron_hybrid_prefix.upstream.engine import EngineSeam

# While a prompt is computed in chunks, one part in so many of a step's tokens may go to prompts that are cached but for less
# than a block.
_BESIDE_CHUNK = 4
# Waiting requests that are looked at for each row that is free: those that are held back take none.
_LOOKED_AT = 4


class PrefixScheduling:
    """Megatron's scheduling of waiting requests, without those that wait for a prefix.

    Args:
        engine: The engine.
        context: Its context, with a cache.
    """

    def __init__(self, engine: EngineSeam, context: HybridPrefixContext) -> None:
        assert context.prefix_cache is not None
        self._engine = engine
        self._context = context
        self._cache = context.prefix_cache
        self._loads = context.loads
        self._coalescing = Coalescing(self._cache, context.prefix_request) if context.coalesces else None

    def schedule(self, admit: Callable[[], None]) -> None:
        """One round.

        Args:
            admit: Megatron's scheduling, of what is in the queue.
        """
        waiting, context = self._engine.waiting_request_ids, self._context
        before = list(waiting)
        held = self._wait_for_loads() | self._hold_back()
        if context.chunked_prefill_request_id != -1:
            self._start_beside_chunk()
        admit()
        if held:
            left = held.union(waiting)
            chunked = context.chunked_prefill_request_id  # has to stay first
            self._set_queue([i for i in before if i == chunked] + [i for i in before if i in left and i != chunked])
        if waiting and not context.total_request_count and self._cache.loads.give_up():
            # What waiting requests hold is all that the first of them needs.
            admit()

    def note_preempted(self, request_ids: list[int]) -> None:
        """Requests were preempted: each resumes from what it left on the host, if anything."""
        for request_id in request_ids:
            keys = self._context.prefix_request(self._engine.get_request(request_id))
            keys.resumes = self._cache.loads.is_swapped_out(request_id)

    def _wait_for_loads(self) -> set[int]:
        """Begins loads from the host; takes requests out of the queue that shall wait for theirs in this round."""
        engine, context = self._engine, self._context
        if self._loads is None:
            return set()
        if context.paused_request_count:
            self._cache.loads.give_up()  # running requests come first, and nobody is admitted
            return set()
        held = set()
        free_rows = context.max_requests - context.total_request_count
        for request_id in list(islice(engine.waiting_request_ids, _LOOKED_AT * free_rows)):
            request = engine.get_request(request_id)
            between_chunks = request.finished_chunk_token_count > 0
            if not between_chunks and self._loads.load_back(request, others_run=context.total_request_count > 0):
                held.add(request_id)
        self._take_from_queue(held)
        return held

    def _hold_back(self) -> set[int]:
        """Takes requests out of the queue that wait in this round for what others compute."""
        engine, context = self._engine, self._context
        if self._coalescing is None or len(engine.waiting_request_ids) < 2:
            return set()
        if not engine.can_admit(engine.get_request(engine.waiting_request_ids[0])):
            return set()  # nobody is admitted in this round
        free_rows = context.max_requests - context.total_request_count
        waiting = (engine.get_request(i) for i in engine.waiting_request_ids)
        held = set(self._coalescing.held_back(waiting, most=_LOOKED_AT * free_rows))
        engine.count_waits(len(held))
        self._take_from_queue(held)
        return held

    def _start_beside_chunk(self) -> None:
        """Starts prompts of which little is left to compute, with a part of the step's tokens; the rest is the chunk's."""
        engine, context = self._engine, self._context
        most_tokens = context.max_tokens // _BESIDE_CHUNK
        free_rows = context.max_requests - context.total_request_count - 1  # the chunk's own
        for request_id in list(islice(engine.waiting_request_ids, 1, 1 + _LOOKED_AT * max(0, free_rows))):
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
