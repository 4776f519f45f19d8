"""`HybridPrefixEngine`: megatron's dynamic engine, where it has to know of the cache.

Weights epochs, requests that are preempted or aborted, and forwards that fail; which log-probs a request is given.
Scheduling and stepping are megatron's.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import BlockOverflowError
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_hybrid_prefix.layers.mamba2 import use_slot_mixers
from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.engine.coalesce import Coalescing
from megatron_hybrid_prefix.mcore.engine.log_probs import StepLogProbs, cut_to_tokens
from megatron_hybrid_prefix.mcore.ranks.coordinator import meet_subscribers
from megatron_hybrid_prefix.upstream.contract import check_contract

if TYPE_CHECKING:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

logger = logging.getLogger(__name__)

# While a prompt is computed in chunks, one part in so many of a step's tokens may go to prompts that are cached but for less
# than a block.
_BESIDE_CHUNK = 4
# Waiting requests that are looked at for each row that is free: those that are held back take none.
_LOOKED_AT = 4


class HybridPrefixEngine(DynamicInferenceEngine):
    """Megatron's engine around a `HybridPrefixContext`; around any other context only log-probs differ from megatron's engine.

    Args:
        controller: Megatron's text generation controller. The Mamba mixers of its model get prefill by slots.
        context: The context.
    """

    _epoch: int | None = None
    _coalescing: Coalescing | None = None
    _aborting: set[int] = frozenset()  # type: ignore[assignment]  # while megatron's constructor runs
    _start_over_chunked: set[int] = frozenset()  # type: ignore[assignment]

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext) -> None:
        check_contract()
        if getattr(context, "state_pool", None) is not None:
            use_slot_mixers(controller.inference_wrapped_model.model)
        super().__init__(controller, context)
        if self._has_cache and context.coalesces:
            self._coalescing = Coalescing(context.prefix_cache, context.keys_of)

    def reset(self) -> None:
        """See upstream; figures of a step that never came to its end are dropped, too."""
        super().reset()
        self._aborting = set()
        # Requests whose load from the host failed: in this step; and those between two chunks, until the next one.
        self._start_over: set[int] = set()
        self._start_over_chunked = set()
        context = self.context
        context.prefix_cache_hits = context.prefix_cache_blocks_matched = 0
        context.prefix_cache_prefill_computed_tokens = context.prefix_cache_prefill_skipped_tokens = 0
        self._drop_pending_logits()

    def suspend(self) -> None:
        """See upstream; requests that are over stay so, and those that start over start clean."""
        if self._is_suspended:
            return
        recompute = self.context.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE
        # The next step hands these out; megatron would take them for running ones.
        over = {request_id: self.requests.pop(request_id) for request_id in self.failed_request_ids}
        if recompute:
            self._forget_chunks(self.waiting_request_ids)
        super().suspend()
        self.requests |= over
        if recompute:
            self._drop_pending_logits()
            self._finish_aborted_on_resume()

    def create_cuda_graphs(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream. A capture resets the context; what that costs is said, and running requests start over.

        Resuming captures again where buffers were offloaded and their addresses changed; megatron would forget the running
        requests.
        """
        if self.cuda_graph_impl == "local" and self._has_cache and self._is_suspended:
            self._prepare_for_reset()
        return super().create_cuda_graphs(*args, **kwargs)

    def _prepare_for_reset(self) -> None:
        running = sorted(set(self.requests) - {*self.resume_request_ids, *self.failed_request_ids})
        stats = self.context.prefix_stats()
        if running or stats.slots_used:
            logger.warning(
                "capturing CUDA graphs forgets %d cached states and starts %d running requests over; "
                "static_kv_memory_pointers=True keeps them",
                stats.slots_used,
                len(running),
            )
        self._forget_chunks([*running, *self.resume_request_ids])
        for request_id in running:
            self.requests[request_id].record.checkpoint()
        self.resume_request_ids = [*running, *self.resume_request_ids]
        self._drop_pending_logits()
        self._finish_aborted_on_resume()

    def _forget_chunks(self, request_ids: Iterable[int]) -> None:
        """Prompts that were computed in part will be computed whole."""
        for request_id in request_ids:
            request = self.get_request(request_id)
            if request.finished_chunk_token_count:
                self._compute_again(request_id)
                request.prompt_log_probs = request.generated_log_probs = None
                request.prompt_top_n_logprobs = request.generated_top_n_logprobs = None

    def _finish_aborted_on_resume(self) -> None:
        for request_id in sorted(self._aborting):
            self.resume_request_ids.remove(request_id)
            self._finish_aborted(request_id)

    @property
    def _is_suspended(self) -> bool:
        # No state yet while megatron's constructor captures.
        return getattr(self, "state", None) in (EngineState.SUSPENDED, EngineState.SUSPENDING)

    def _drop_pending_logits(self) -> None:
        # Async scheduling keeps the logits of a forward for the next step; megatron forgets that its rows are gone.
        self.controller._async_sched_logits.clear()

    async def start_listening_to_data_parallel_coordinator(self, *args: Any, **kwargs: Any) -> str:
        """See upstream; returns when all ranks hear each other."""
        address = await super().start_listening_to_data_parallel_coordinator(*args, **kwargs)
        meet_subscribers(self)  # before the engine's loop gets its first turn
        if self.ep_world_size == 1:
            # Megatron asks its peers only every so often whether there is work, and with the last answer goes on: with empty
            # forwards where there is none, and deaf to PAUSE. Without peers asking costs nothing.
            self.ep_consensus_interval = 1
        return address

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: int, prompt: str | list[int] | torch.Tensor, sampling_params: SamplingParams | None = None
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """See upstream. The prompt's tokens stay on the host, where keys are made and steps put together.

        Megatron sends them to the device, and waits for them to come back for each of these.

        Raises:
            TypeError: An id in a list is no integer.
            ValueError: A tensor is not (tokens,) integers. (Which device it is on does not matter.)
        """
        megatrons_cache = self.context.enable_prefix_caching and not self._has_cache
        if megatrons_cache or not isinstance(self.context, HybridPrefixContext):
            return super().add_request(request_id, prompt, sampling_params)
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            prompt = self.controller.tokenize_prompt(self.controller.tokenizer, text, sampling_params.add_BOS)
        if not isinstance(prompt, torch.Tensor):
            # An array first: five times as fast as a tensor from a list, half a millisecond for 8,000 tokens.
            prompt = (
                torch.frombuffer(array("q", prompt), dtype=torch.int64)
                if len(prompt)
                else torch.empty(0, dtype=torch.int64)
            )
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(f"request {request_id}: a prompt of shape {tuple(prompt.shape)} and type {prompt.dtype}")
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=text,
            prompt_tokens=prompt.to("cpu", torch.int64),
            sampling_params=sampling_params,
            block_size_tokens=self.context.block_size_tokens,
        )
        request.enable_prefix_caching = self._has_cache  # set afterwards: keys in place of megatron's hashes
        return self._add_request(request)

    def _add_request(self, request: DynamicInferenceRequest) -> asyncio.Future[DynamicInferenceRequest]:
        """See upstream; the keys of the prompt are made here, on arrival."""
        if self._has_cache:
            self.context.keys_of(request)
        future = super()._add_request(request)
        self._refuse_if_never_active(request)
        self._use_own_record(request.request_id)
        return future

    def _handle_failed_request(self, request_id: int) -> None:
        """See upstream."""
        self._use_own_record(request_id)
        super()._handle_failed_request(request_id)

    def _use_own_record(self, request_id: int) -> None:
        entry = self.requests[request_id]
        if not isinstance(entry.record, _Record):
            entry.record = _Record(requests=entry.record.requests, latency=entry.record.latency)

    def _refuse_if_never_active(self, request: DynamicInferenceRequest) -> None:
        # Megatron checks against all blocks, and would pause for good what needs more than the active ones.
        allocator, block_tokens = self.context.kv_block_allocator, self.context.block_size_tokens
        tokens = len(request.prompt_tokens) + request.sampling_params.num_tokens_to_generate
        if request.status == Status.FAILED or -(-tokens // block_tokens) <= allocator.active_count:
            return
        self.waiting_request_ids.remove(request.request_id)
        request.status = Status.FAILED
        request.add_event_error_nontransient(BlockOverflowError(request.request_id))
        self._handle_failed_request(request.request_id)

    def abort_request(self, request_id: int) -> bool:
        """Give a request up; its blocks and slots are free by the end of the next step.

        It comes back from that step as finished, with the tokens it has by then (a waiting one without any). With tensor
        or pipeline parallelism call this on every rank, between the same two steps.

        Args:
            request_id: Of a request that was added.

        Returns:
            Whether it was unfinished.
        """
        entry = self.requests.get(request_id)
        if entry is None or request_id in self.failed_request_ids:
            return False
        queue = self.resume_request_ids if self._is_suspended else self.waiting_request_ids
        if request_id in queue and entry.record[-1].finished_chunk_token_count == 0:
            queue.remove(request_id)
            self._finish_aborted(request_id)
        else:
            self._aborting.add(request_id)
            # Active requests end the way of a stop word: with the step's bookkeeping, in either scheduling mode.
            self.stop_word_finished_request_ids.add(request_id)
        return True

    def has_unfinished_requests(self) -> bool:
        """See upstream; also while the next step has aborted or refused requests to hand out."""
        return super().has_unfinished_requests() or bool(getattr(self, "failed_request_ids", ()))

    @property
    def _has_cache(self) -> bool:
        return getattr(self.context, "prefix_cache", None) is not None

    def schedule_waiting_requests(self) -> None:
        """See upstream. First takes out aborted requests that no forward is running for.

        Requests whose prefix is being computed wait for it, out of the queue; prompts that are cached but for a little do
        not wait for the chunks of another one.
        """
        if self._has_to_take_out:
            self._take_out_aborted()
        if not self.waiting_request_ids:
            return
        if not self._has_cache:
            super().schedule_waiting_requests()
            return
        before = list(self.waiting_request_ids)
        held = self._wait_for_loads() | self._hold_back()
        if self.context.chunked_prefill_request_id != -1:
            self._start_beside_chunk()
        super().schedule_waiting_requests()
        if held:
            left = held.union(self.waiting_request_ids)
            chunked = self.context.chunked_prefill_request_id  # has to stay first
            order = [i for i in before if i == chunked] + [i for i in before if i in left and i != chunked]
            self.waiting_request_ids.clear()
            self.waiting_request_ids.extend(order)
        if self.waiting_request_ids and not self.context.total_request_count and self.context.give_up_loads():
            # What waiting requests hold is all that the first of them needs.
            super().schedule_waiting_requests()

    def _wait_for_loads(self) -> set[int]:
        """Begins loads from the host; takes requests out of the queue that shall wait for theirs in this round."""
        context = self.context
        if context.host_moves is None:
            return set()
        if context.paused_request_count:
            context.give_up_loads()  # running requests come first, and nobody is admitted
            return set()
        held = set()
        free_rows = context.max_requests - context.total_request_count
        for request_id in list(islice(self.waiting_request_ids, _LOOKED_AT * free_rows)):
            request = self.get_request(request_id)
            between_chunks = request.finished_chunk_token_count > 0
            if not between_chunks and context.load_back(request, others_run=context.total_request_count > 0):
                held.add(request_id)
        self._take_from_queue(held)
        return held

    def _take_from_queue(self, request_ids: set[int]) -> None:
        if request_ids:
            left = [i for i in self.waiting_request_ids if i not in request_ids]
            self.waiting_request_ids.clear()
            self.waiting_request_ids.extend(left)

    def _hold_back(self) -> set[int]:
        """Takes requests out of the queue that shall wait in this round."""
        if self._coalescing is None or len(self.waiting_request_ids) < 2:
            return set()
        head = self.get_request(self.waiting_request_ids[0])
        if not (
            self._can_schedule_chunked_prefill(head)
            if self.enable_chunked_prefill
            else all(self.context.check_availability(head))
        ):
            return set()  # nobody is admitted in this round
        free_rows = self.context.max_requests - self.context.total_request_count
        waiting = (self.get_request(i) for i in self.waiting_request_ids)
        held = set(self._coalescing.held_back(waiting, most=_LOOKED_AT * free_rows))
        if held:
            self._prefix_coordination_waits += len(held)
            self._take_from_queue(held)
        return held

    def _start_beside_chunk(self) -> None:
        """Starts prompts of which little is left to compute, with a part of the step's tokens; the rest is the chunk's."""
        context = self.context
        most_tokens = context.max_tokens // _BESIDE_CHUNK
        free_rows = context.max_requests - context.total_request_count - 1  # the chunk's own
        for request_id in list(islice(self.waiting_request_ids, 1, 1 + _LOOKED_AT * max(0, free_rows))):
            request = self.get_request(request_id)
            length = request.remaining_prompt_length
            resume = context.keys_of(request).match(context.prefix_cache, length).resume_tokens
            tokens = length - resume
            if not resume or tokens > min(most_tokens, context.block_size_tokens):
                continue
            if context.total_request_count + 2 > context.max_requests or not all(context.check_availability(request)):
                return
            context.add_beside_chunk(request)
            most_tokens -= tokens
            request.remaining_prompt_tokens = request.remaining_prompt_tokens.new_empty(0)
            request.add_event_add_context()
            self.waiting_request_ids.remove(request_id)
            self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    def _should_run_async_sched_overlap(self) -> bool:
        """See upstream; not while an aborted request has to be taken out between two forwards, or one waits for its load."""
        if self._has_to_take_out or (self._has_cache and self.context.loads_wait):
            return False
        return super()._should_run_async_sched_overlap()

    @property
    def _has_to_take_out(self) -> bool:
        return bool(self._aborting or self._start_over_chunked)

    @torch.inference_mode()  # megatron's bookkeeping tensors may have been made in it
    def _take_out_aborted(self) -> None:
        if not hasattr(self.context, "remove_waiting_row"):
            return  # around megatron's context they end once they run
        context = self.context
        for request_id in sorted(self._start_over_chunked):
            if context.remove_waiting_row(request_id):
                self._compute_again(request_id)  # it is still the first one waiting
        self._start_over_chunked.clear()
        chunk_runs = context.get_index_of_chunked_prefill_request() != -1
        for request_id in sorted(self._aborting):
            if chunk_runs and request_id == context.chunked_prefill_request_id:
                continue
            if context.remove_waiting_row(request_id):
                if request_id in self.waiting_request_ids:
                    self.waiting_request_ids.remove(request_id)
                self._finish_aborted(request_id)

    def _finish_aborted(self, request_id: int) -> None:
        # The next step hands it out among the finished ones, like a refused request.
        self._aborting.discard(request_id)
        if self._has_cache:
            self.context.forget_request(request_id)
        self.stop_word_finished_request_ids.discard(request_id)
        request = self.requests[request_id].record[-1]
        request.status = Status.COMPLETED
        request.generated_length = len(request.generated_tokens)
        request.add_event_finish()
        self.failed_request_ids.append(request_id)
        self.requests[request_id].future.set_result(self.requests[request_id].record)

    # -- stop words ----------------------------------------------------------------------------------------------------

    def _check_stop_words_for_request_post_append(self, request: DynamicInferenceRequest) -> tuple[bool, int]:
        """See upstream; a stop word may have begun before the request was preempted."""
        if not request.stop_word_ids:
            return False, 0
        entry = self.requests.get(request.request_id)
        earlier = [] if entry is None else entry.record.requests[:-1]
        before = [token for part in earlier for token in part.generated_tokens]
        request.generated_tokens = before + request.generated_tokens
        found, trimmed_tokens = super()._check_stop_words_for_request_post_append(request)
        left = request.generated_tokens
        request.generated_tokens = left[len(before) :]
        surplus = len(before) - len(left)  # earlier parts end with so much of the stop word
        for part in reversed(earlier):
            if surplus > 0:
                own = len(part.generated_tokens)
                part.generated_tokens = part.generated_tokens[: max(0, own - surplus)]
                surplus -= own
        # Megatron takes as many log-probs off this step's, and fails where that leaves none of a first token's.
        return found, trimmed_tokens if request.generated_tokens else 0

    def _get_and_clear_stop_word_finished_ids(self, active_request_ids: list[int]) -> set[int]:
        """See upstream; log-probs of a stop word that was cut off go, too, those of earlier steps included.

        Requests whose load failed leave the context the same way: in this step, and without its token.
        """
        result = super()._get_and_clear_stop_word_finished_ids(active_request_ids)
        host_moves = getattr(self.context, "host_moves", None)
        if host_moves is not None and (failed := self.context.failed_loads().difference(result)):
            between_chunks = failed & {self.context.chunked_prefill_request_id}
            self._start_over_chunked |= between_chunks
            self._start_over |= failed - between_chunks
            self.stop_word_being_finished_ids = result | self._start_over
        for request_id in result:
            cut_to_tokens(self.requests[request_id].record)
        return result | self._start_over if self._start_over else result

    # -- loads that failed, preemption ---------------------------------------------------------------------------------

    def post_process_requests(
        self,
        request_ids: torch.Tensor,
        finished_request_ids: torch.Tensor,
        evict_request_ids: torch.Tensor | None,
        step_time: float,
        sample: torch.Tensor,
        accepted_tokens: torch.Tensor | None,
        log_probs: list[list[float]] | None,
        consumed_chunked_prefill_request_id: int,
        top_n_logprobs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See upstream; requests whose load failed did not finish, they wait again.

        Log-probs go only to requests that want them, and are as many as their tokens.
        """
        again = self._start_over
        if again:
            self._start_over = set()
        # A prompt's next token may be the one that ends answers: a request between two chunks did not finish either.
        running = again | {consumed_chunked_prefill_request_id}
        left = [request_id not in running for request_id in finished_request_ids.tolist()]
        if not all(left):
            finished_request_ids = finished_request_ids[torch.tensor(left, dtype=torch.bool)]
        given = None
        if log_probs:
            requests = [self.get_request(request_id) for request_id in request_ids.tolist()]
            given = StepLogProbs(requests, log_probs, top_n_logprobs, consumed_chunked_prefill_request_id)
            log_probs, top_n_logprobs = given.selected, given.top_n
        result = super().post_process_requests(
            request_ids,
            finished_request_ids,
            evict_request_ids,
            step_time,
            sample,
            accepted_tokens,
            log_probs,
            consumed_chunked_prefill_request_id,
            top_n_logprobs,
            *args,
            **kwargs,
        )
        if given is not None:
            given.name_all_tokens(self.controller.tokenizer)
            for record in result[1]:
                cut_to_tokens(record)  # of a stop word that ended with the request
        for request_id in sorted(again):
            self._compute_again(request_id)
            # A prompt between two of its chunks stays first.
            chunked = (
                self.waiting_request_ids and self.waiting_request_ids[0] == self.context.chunked_prefill_request_id
            )
            self.waiting_request_ids.insert(1 if chunked else 0, request_id)
        if self._aborting:
            self._aborting.intersection_update(self.requests)  # the others finished; their ids may come again
        if evict_request_ids is not None and self._has_cache:
            for request_id in evict_request_ids.tolist():
                keys = self.context.keys_of(self.get_request(request_id))
                keys.resumes = self.context.prefix_cache.has_retracted(request_id)
        return result

    def _compute_again(self, request_id: int) -> None:
        request = self.get_request(request_id)
        request.remaining_prompt_tokens = request.prompt_tokens
        request.finished_chunk_token_count = request.num_cached_tokens = 0

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def async_forward(self) -> tuple[dict | None, dict, float]:
        """See upstream; after a forward that raised, what it was to publish is dropped."""
        if self._has_to_take_out and not self._is_suspended:
            self._take_out_aborted()
        try:
            return await super().async_forward()
        except BaseException:
            if self._has_cache:
                self.context.fail_forward()
            raise

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _generation_epoch(self) -> int | None:
        return self._epoch

    @_generation_epoch.setter
    def _generation_epoch(self, epoch: int | None) -> None:
        # Megatron sets it when a trainer announces new weights, and to None in `reset`.
        if epoch is not None and epoch != self._epoch:
            self.invalidate()
        self._epoch = epoch

    def invalidate(self) -> None:
        """The weights changed: nothing that was cached before is reused, running requests cache no more.

        With tensor or pipeline parallelism call it on every rank, between the same two steps.
        """
        if self._has_cache:
            self.context.invalidate()
        for module in self.controller.inference_wrapped_model.model.modules():
            if isinstance(module, MambaMixer):
                module._A_neg_exp_cache_stale = True  # megatron refreshes it only in train()


class _Record(DynamicInferenceRequestRecord):
    """A request's record that keeps, on preemption, what megatron's drops."""

    def checkpoint(self, tokenizer: Any = None) -> None:
        """See upstream; attributes of the sampling parameters, stop words and caching stay, and merging works."""
        old = self[-1]
        super().checkpoint(tokenizer)
        new = self[-1]
        for name, value in vars(old.sampling_params).items():
            if name not in vars(new.sampling_params):
                setattr(new.sampling_params, name, value)
        new.stop_word_ids = old.stop_word_ids
        new.block_size_tokens = old.block_size_tokens
        new.enable_prefix_caching = old.enable_prefix_caching
        new.status = old.status
        if not old.generated_tokens:
            # It starts over: its parts would be merged with lists that it left half-filled.
            new.prompt = old.prompt
            new.events = old.events + new.events
            del self.requests[-2]
        for name in ("generated_log_probs", "generated_top_n_logprobs"):
            if getattr(old, name) is not None and getattr(new, name) is None:
                setattr(new, name, [])

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """See upstream; nothing remains of a prompt that is over, and a reply shall not carry it."""
        merged = super().merge(tokenizer)
        merged.remaining_prompt_tokens = None
        return merged
