"""`Removals`: requests that leave the context before they finish.

The next step returns an aborted request, like a refused one. A request whose load from the host failed starts over. Both leave
with a step's bookkeeping, as a request that ends with a stop word does, in either scheduling mode. A request without an active
row (paused, or between two chunks of its prompt) is removed between two forwards.
"""

from __future__ import annotations

import logging
from collections.abc import MutableSequence

import torch

from megatron_hybrid_prefix.mcore.context.no_cache import NoCache
from megatron_hybrid_prefix.mcore.engine.record import compute_again
from megatron_hybrid_prefix.upstream.engine import EngineSeam
from megatron_hybrid_prefix.upstream.names import ContextOverflowError, Status

logger = logging.getLogger(__name__)

# Megatron's coordinator sends the text of one class of errors.
NOT_FINITE = (
    "its logits, keys, values or states are not finite (NaN, infinite or beyond 1e18): look at the weights, and at the embeddings of its "
    "tokens; nothing of the step is cached"
)


class Removals:
    """The requests of an engine that leave early. Changes its tables of requests.

    Attributes:
        aborting: Ids of aborted requests that are still in the context.
        restarting: Ids of requests that leave with this step's bookkeeping and start over.
        restarting_between_chunks: Ids of requests that start over, too, but wait between two chunks, without a row for the step's
            bookkeeping.
        failing: Those of both that do not start over, but have failed, and why: they computed something that is not finite, or their
            grammar does not go on.
    """

    def __init__(self, engine: EngineSeam, cached: NoCache) -> None:
        self._engine = engine
        self._cached = cached
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self.aborting: set[int] = set()
        self.restarting: set[int] = set()
        self.restarting_between_chunks: set[int] = set()
        self.failing: dict[int, str] = {}

    # -- aborts --------------------------------------------------------------------------------------------------------

    def abort(self, request_id: int, queue: MutableSequence[int]) -> None:
        """Abort an unfinished request. ``queue``: the requests outside the context."""
        engine = self._engine
        if request_id in queue and engine.get_request(request_id).finished_chunk_token_count == 0:
            queue.remove(request_id)
            self._finish(request_id)
        else:
            self.aborting.add(request_id)
            engine.stop_word_finished_request_ids.add(request_id)

    def finish_resumed(self) -> None:
        """Finish aborted requests that wait to be resumed."""
        for request_id in sorted(self.aborting):
            self._engine.resume_request_ids.remove(request_id)
            self._finish(request_id)

    def _forget(self, request_id: int) -> None:
        self.aborting.discard(request_id)
        self._cached.forget_request(request_id)
        self._engine.stop_word_finished_request_ids.discard(request_id)

    def _finish(self, request_id: int) -> None:
        # The next step returns it with the finished requests, like a refused request.
        engine = self._engine
        self._forget(request_id)
        entry = engine.requests[request_id]
        request = entry.record[-1]
        request.status = Status.COMPLETED
        request.generated_length = len(request.generated_tokens)
        request.add_event_finish()
        engine.failed_request_ids.append(request_id)
        entry.future.set_result(entry.record)

    # -- requests that start over ----------------------------------------------------------------------------------------

    def requeue(self, request_ids: set[int]) -> None:
        """Put requests that start over at the front of the queue, but after a prompt between two chunks."""
        engine = self._engine
        waiting = engine.waiting_request_ids
        for request_id in sorted(request_ids):
            if self._starts_over(request_id):
                chunked = waiting and waiting[0] == engine.context.chunked_prefill_request_id
                waiting.insert(1 if chunked else 0, request_id)

    def _starts_over(self, request_id: int) -> bool:
        """Makes the request as new. False: it has failed, and the step returns it."""
        request = self._engine.get_request(request_id)
        if request_id in self.failing:
            why = self.failing.pop(request_id)
            self._forget(request_id)
            logger.warning("request %d has failed: %s", request_id, why)
            request.add_event_error_nontransient(ContextOverflowError(request_id, why, is_transient=False))
            self._engine.refuse_request(request_id)
            return False
        if request.generated_tokens:  # it goes on after its answer so far, as after a preemption
            self._engine.requests[request_id].record.checkpoint()
            request = self._engine.get_request(request_id)
        compute_again(request)
        known = self._cached.prefix_request(request)
        if known is not None and not known.counted_tokens:
            request.num_cached_tokens = 0  # what it loaded was wrong
        return True

    # -- between two forwards --------------------------------------------------------------------------------------------

    @torch.inference_mode()  # megatron may have made its bookkeeping tensors in inference mode
    def take_out(self) -> None:
        """Remove the rows that are in no running forward."""
        engine, context = self._engine, self._engine.context
        for request_id in sorted(self.restarting_between_chunks):
            # One that starts over is still first in the queue.
            if self._cached.remove_waiting_row(request_id) and not self._starts_over(request_id):
                engine.waiting_request_ids.remove(request_id)
        self.restarting_between_chunks.clear()
        chunk_runs = context.get_index_of_chunked_prefill_request() != -1
        for request_id in sorted(self.aborting):
            if chunk_runs and request_id == context.chunked_prefill_request_id:
                continue
            if self._cached.remove_waiting_row(request_id):
                if request_id in engine.waiting_request_ids:
                    engine.waiting_request_ids.remove(request_id)
                self._finish(request_id)
