"""`HybridPrefixEngine`: megatron's dynamic engine with this package's cache.

It adds weights epochs, preempted and aborted requests, failed forwards, correct log-probs per request, and what a coordinator
tells it. Megatron does the scheduling and stepping. Long, because it is one class: megatron's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, override

import torch

from megatron_hybrid_prefix.errors import RequestDroppedError
from megatron_hybrid_prefix.layers.kinds import invalidate_layers, use_slot_mixers
from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.context.no_cache import NoCache
from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
from megatron_hybrid_prefix.mcore.engine.exact import make_exact
from megatron_hybrid_prefix.mcore.engine.log_probs import StepLogProbs, add_cached, cut_to_tokens
from megatron_hybrid_prefix.mcore.engine.record import RequestRecord, forget_chunks, whole_answer
from megatron_hybrid_prefix.mcore.engine.removals import NOT_FINITE, Removals
from megatron_hybrid_prefix.mcore.engine.requests import Answer, Prompt, RequestRules
from megatron_hybrid_prefix.mcore.engine.sampling import end_tokens_of
from megatron_hybrid_prefix.mcore.engine.scheduling import PrefixScheduling
from megatron_hybrid_prefix.mcore.ranks.coordinator import meet_subscribers
from megatron_hybrid_prefix.mcore.state.layout import check_described
from megatron_hybrid_prefix.mcore.state.weights import WeightSamples
from megatron_hybrid_prefix.platform.kernel_caches import kernel_folders
from megatron_hybrid_prefix.platform.side_by_side import compiled_side_by_side
from megatron_hybrid_prefix.requests.explain import Explanation
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.support.environment import say
from megatron_hybrid_prefix.text.grammar import AnswerGrammar
from megatron_hybrid_prefix.text.tokenizer import other_ends
from megatron_hybrid_prefix.upstream.blocks import block_counts, blocks_up_to_the_end
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.coordinator import TELL_ABORT
from megatron_hybrid_prefix.upstream.engine import EngineSeam
from megatron_hybrid_prefix.upstream.graphs import kinds_of_step, kinds_to_compile, launch_eagerly, replay_none
from megatron_hybrid_prefix.upstream.moe import ModelRoutes, count_tokens_of_drafts
from megatron_hybrid_prefix.upstream.names import (
    BlockOverflowError,
    DynamicInferenceContext,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineState,
    EngineSuspendedError,
    KVCacheManagementMode,
    MaxSequenceLengthOverflowError,
    SamplingParams,
    Status,
    TextGenerationController,
)

logger = logging.getLogger(__name__)


class HybridPrefixEngine(EngineSeam):
    """Megatron's engine around a `HybridPrefixContext`. With any other context only log-probs differ from megatron's.

    Args:
        controller: Megatron's text generation controller. The recurrent layers of its model get slot mixers.
        context: The context.

    Attributes:
        removals: Requests that leave the context before they finish.
        on_step: Called after each step. A replica sends the new tokens there.
        on_question: Called between two steps, when a client of the coordinator asks all replicas: what is asked, its number, prompt
            and sampling parameters.
        step_began_s: When the current step began (``perf_counter``); None between steps. Other threads may read it.

    Raises:
        ValueError: The context was made for other recurrent layers than those of the model.
    """

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self.on_question: Callable[[str, int, Any, Any], None] = lambda *question: None
        self.step_began_s: float | None = None
        self._was_idle = False  # when the next request to be admitted came
        self._weights: WeightSamples | None = None
        self._announced = False  # new weights, since the engine was suspended
        self._captured_at: list[int] = []  # addresses of the weights; empty: no graphs
        check_overrides()
        check_described(controller.inference_wrapped_model.model, context.config.mamba_inference_state_config)
        self._cached = context if isinstance(context, NoCache) else NoCache()
        if self._cached.states is not None:
            use_slot_mixers(controller.inference_wrapped_model.model)
        count_tokens_of_drafts(controller.inference_wrapped_model.model)
        if self._cached.states is not None and context.moe_enable_routing_replay:
            context.moe_routing_metadata = ModelRoutes(context, controller.inference_wrapped_model.model)
        with_cache = isinstance(context, HybridPrefixContext)
        self._schedule = PrefixScheduling(self, context).schedule if with_cache else lambda admit: admit()
        self.removals = Removals(self, self._cached)
        self._records: dict[int, RequestRecord] = {}  # see `HybridPrefixController.records`
        self.cuts_chunks = self._cached.is_exact
        if self._cached.is_exact:
            make_exact(controller)
        own = self._own = isinstance(controller, HybridPrefixController)
        if own:
            controller.records = self._records
        super().__init__(controller, context)
        # That a request can have.
        self._most_blocks = min(block_counts(context.kv_block_allocator).active, self._cached.room_for(1))
        if self._cached.samples_weights:
            self._weights = WeightSamples(controller.inference_wrapped_model.model, context.config.pg_collection)
        self._rules = RequestRules(self, samples_rows=own, is_exact=self._cached.is_exact)
        self._cached.serve(controller.inference_wrapped_model.model)

    def reset(self) -> None:
        """Also resets the statistics of an unfinished step, and forgets the drafts that it accepted.

        Megatron forgets them at the end of a step. Left by one that raised, they would fail each later prefill. The futures of
        dropped requests get a `RequestDroppedError`, and clients of a coordinator a failed request.
        """
        if getattr(self, "use_coordinator", False):
            self.messages_taken()  # what ended, and was not told
        for request_id in self.drop_futures("the engine was reset"):
            self.reply_refused(request_id, "the engine was reset")
        super().reset()
        if isinstance(self.controller, HybridPrefixController):
            self.controller.clear_accepted_drafts()
        self.removals.clear()
        self._records.clear()
        self.needs_reset = False
        context = self.context
        context.prefix_cache_hits = context.prefix_cache_blocks_matched = 0
        context.prefix_cache_prefill_computed_tokens = context.prefix_cache_prefill_skipped_tokens = 0
        self.drop_pending_logits()

    def drop_futures(self, why: str) -> list[int]:
        """Megatron cancels them. But a cancelled future ends the task that awaits it as if that task had been cancelled.

        The coordinator answers the requests that a replica leaves.
        """
        entries: dict[int, Any] = getattr(self, "requests", {})  # none before the first reset
        dropped = {request_id: entry.future for request_id, entry in entries.items() if not entry.future.done()}
        for request_id, future in dropped.items():
            future.set_exception(RequestDroppedError(f"request {request_id}: {why}"))
            future.exception()  # most callers look at the steps' results alone: asyncio must not warn of it
        return list(dropped)

    # -- suspension ----------------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Finished requests stay finished; requests that start over are reset."""
        if self._is_suspended:
            return
        recompute = self.context.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE
        # The next step returns these; megatron would treat them as running.
        over = {request_id: self.requests.pop(request_id) for request_id in self.failed_request_ids}
        if recompute:
            forget_chunks(map(self.get_request, self.waiting_request_ids))
        super().suspend()
        self.requests |= over
        if recompute:
            self.drop_pending_logits()
            self.removals.finish_resumed()

    def resume(self) -> None:
        """Trainers change weights meanwhile: nothing older is reused, except with ``keep_on_resume`` and equal weights.

        With several ranks (tensor, pipeline or expert parallelism) call this on each.
        """
        if self._is_suspended:
            if self._cached.keeps_on_resume:
                self._look_at_weights(experts=True)  # a collective, so also where new weights were announced
            elif not self._announced:
                self._drop_old_weights(
                    "resume(): the weights may have changed while the engine was suspended; where they never do, set "
                    "keep_on_resume=True"
                )
            if self._announced:
                self._read_new_weights()
        super().resume()
        self._leave_wrong_graphs()

    def _check_not_suspended(self) -> None:
        if self._is_suspended:
            raise EngineSuspendedError("the engine is suspended: call engine.resume() first")

    def create_cuda_graphs(self, *args: Any, **kwargs: Any) -> Any:
        """A capture resets the context: logs what is lost, and restarts running requests. A line goes before megatron's progress bar.

        Resuming captures again if offloaded buffers changed their addresses. Megatron would lose the running requests.
        """
        if self.cuda_graph_impl == "local" and self._is_suspended:
            self._prepare_for_reset()
        kinds = kinds_of_step(self)
        if kinds:
            say(
                logger,
                f"capturing CUDA graphs of {len(kinds)} kinds of step; kernels that are missing are compiled first, and kept: "
                f"{kernel_folders()}",
            )
            if not self._is_suspended:  # else they are compiled
                with compiled_side_by_side() as without_launches:
                    for kind in kinds_to_compile(self):
                        launch_eagerly(self, kind, without_launches())
                if self.context.states is not None:
                    self.context.states.compile_flush()
        captured = super().create_cuda_graphs(*args, **kwargs)
        self._captured_at = self._weights_at() if kinds else []
        return captured

    def _weights_at(self) -> list[int]:
        return [weight.data_ptr() for weight in self.controller.inference_wrapped_model.model.parameters()]

    def _leave_wrong_graphs(self) -> None:
        """Graphs read the weights where they were: if these lie elsewhere now, steps run without graphs."""
        if self._captured_at and self._captured_at != self._weights_at():
            logger.warning(
                "the weights are in other memory than CUDA graphs were captured with: steps run without graphs; write new weights in "
                "place (copy_, load_state_dict)"
            )
            replay_none(self)
            self._captured_at = []

    def _prepare_for_reset(self) -> None:
        running = sorted(set(self.requests) - {*self.resume_request_ids, *self.failed_request_ids})
        stats = self._cached.prefix_stats()
        if running or stats.slots_used:
            logger.warning(
                "capturing CUDA graphs drops %d cached states and restarts %d running requests; "
                "static_kv_memory_pointers=True keeps them",
                stats.slots_used,
                len(running),
            )
        forget_chunks(map(self.get_request, [*running, *self.resume_request_ids]))
        for request_id in running:
            self.requests[request_id].record.checkpoint()
        self.resume_request_ids: list[int] = [*running, *self.resume_request_ids]
        self.drop_pending_logits()
        self.removals.finish_resumed()

    @property
    def _is_suspended(self) -> bool:
        # Megatron's constructor captures before it sets `state`.
        return getattr(self, "state", None) in (EngineState.SUSPENDED, EngineState.SUSPENDING)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(self, *args: Any, **kwargs: Any) -> str:
        """Returns once all ranks receive each other's messages."""
        address: str = await super().start_listening_to_data_parallel_coordinator(*args, **kwargs)
        meet_subscribers(self)  # before the engine's loop starts
        if self.ep_world_size == 1:
            # Megatron queries its peers for work only every few steps, and acts on the last answer in between: it runs empty
            # forwards and ignores PAUSE. Without peers a query costs nothing.
            self.ep_consensus_interval = 1
        return address

    def message_received(self, what: str, number: int, prompt: Any, params: Any) -> None:
        """The number is that of a request to abort, or of a question."""
        if what == TELL_ABORT:
            self.abort_request(number)
        else:
            self.on_question(what, number, prompt, params)

    def messages_taken(self) -> None:
        """Returns the requests that ended without a step, since the next step may be far off."""
        if not self.failed_request_ids or self._is_suspended:
            return
        records = [self.requests.pop(request_id).record for request_id in self.failed_request_ids]
        self.failed_request_ids.clear()
        # Megatron has replied to those that it refused.
        self.reply([record for record in records if record.requests[-1].status != Status.FAILED])

    # -- requests ------------------------------------------------------------------------------------------------------

    def receive_request(
        self, request_id: int, prompt: str | list[int] | torch.Tensor, sampling_params: SamplingParams | None
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Keeps the prompt's tokens on the host, where keys and steps are made.

        Megatron sends the tokens to the device, and waits to copy them back for both.

        Raises:
            ValueError: The request is wrong (see `RequestRules`), or the id is in use. Nothing else changes.
        """
        return self._accept_new(self._new_request(request_id, prompt, sampling_params))

    def _new_request(
        self, request_id: int, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> DynamicInferenceRequest:
        text, tokens, params = self._rules.accept(request_id, prompt, sampling_params)
        if request_id in self.requests:
            raise ValueError(
                f"request {request_id}: this id is in use until a step returns its request: choose another"
            )
        on_host, caches = self._cached.prompts_on_host, self.context.enable_prefix_caching
        if not on_host:
            tokens = tokens.to(torch.cuda.current_device())  # megatron's context copies them there
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=text,
            prompt_tokens=tokens,
            sampling_params=params,
            block_size_tokens=self.context.block_size_tokens,
            enable_prefix_caching=caches and not on_host,
        )
        request.enable_prefix_caching = caches  # after construction: our keys replace megatron's hashes
        self._cached.prefix_request(request, arrives=True)
        return request

    def _accept_new(self, request: DynamicInferenceRequest) -> asyncio.Future[DynamicInferenceRequest]:
        try:
            return self.accept_request(request)
        except BaseException:
            # Megatron records a request before it looks at it.
            self.requests.pop(request.request_id, None)
            for ids in (self.waiting_request_ids, self.failed_request_ids):
                if request.request_id in ids:
                    ids.remove(request.request_id)
            raise

    @override
    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequestRecord]:
        """Returns the records of these prompts only; other requests that finish meanwhile have their futures.

        Raises:
            EngineSuspendedError: The engine is suspended.
            RequestDroppedError: The engine was reset meanwhile.
            ValueError: A prompt or the parameters are wrong; none of the prompts is run.
        """
        self._check_not_suspended()
        requests = [self._new_request(self._free_id(), prompt, sampling_params) for prompt in prompts]
        try:
            for request in requests:
                self._accept_new(request)
        except BaseException:
            for request in requests:
                self.abort_request(request.request_id)
            raise
        ids = [request.request_id for request in requests]
        records: dict[int, DynamicInferenceRequestRecord] = {}
        while left := set(ids) - records.keys():
            if gone := left - self.requests.keys():
                raise RequestDroppedError(f"request {min(gone)}: the engine was reset")
            records |= {record.request_id: record for record in self.step_modern()["finished_request_records"]}
        return [records[request_id] for request_id in ids]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of a sequence, by one prefill. With ``exact="bits"`` those that were returned while its tokens were generated.

        Waits for its own request alone, as `generate`. What the cache has of the sequence, and log-probs that it keeps, are not computed.

        Args:
            tokens: Two token ids or more, of prompt and answer.

        Returns:
            Of each token but the first.

        Raises:
            ValueError: The tokens are wrong, or more than a step or a sequence takes; or the engine has logits of last tokens alone
                (``materialize_only_last_token_logits``).
        """
        if len(tokens) < 2:
            raise ValueError(f"a score needs two tokens or more, not {len(tokens)}")
        if self.context.config.materialize_only_last_token_logits:
            raise ValueError("a score needs logits of all tokens: set materialize_only_last_token_logits=False")
        params = SamplingParams(return_log_probs=True, skip_prompt_log_probs=False, num_tokens_total=len(tokens))
        params.num_tokens_to_generate = None
        (record,) = self.generate([list(tokens)], params)
        found: list[float] | None = record.merge().prompt_log_probs
        if found is None or len(found) != len(tokens) - 1:
            why = [repr(event.payload) for event in record[-1].events if event.payload is not None]
            raise ValueError(f"{len(tokens)} tokens have no score here: {', '.join(why) or record[-1].status}")
        return found

    def explain(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Explanation:
        """What a request would reuse if it came now, and why not more. Changes nothing, whatever runs or waits.

        It does not look whether the weights have changed, and is no collective. All ranks decide alike on what is on the device and on
        the host; of a tier below the host it says what this rank knows.

        Args:
            prompt: Text, or token ids: (tokens,) integers.
            sampling_params: With its cache options, as for `add_request`.

        Raises:
            ValueError: The request is wrong, or the engine has no prefix cache.
        """
        _, tokens, params = self._rules.accept(0, prompt, sampling_params)
        return self._cached.explain(tokens, params)

    def _free_id(self) -> int:
        """An id that no request has. The caller of `add_request` chooses its own."""
        while (number := int(next(self.request_counter))) in self.requests:
            pass
        return number

    def accept_request(self, request: DynamicInferenceRequest) -> asyncio.Future[DynamicInferenceRequest]:
        """Makes the keys of the prompt on arrival. A request without an end token gets all of the tokenizer's."""
        asked = request.sampling_params
        if asked.termination_id is None:
            own = getattr(asked, "stop_token_ids", None) or ()
            asked.add_attributes({"stop_token_ids": [*own, *other_ends(self.controller.tokenizer)]})
        if request.request_id not in self.requests:  # one that resumes after a suspension keeps its answer
            self._records.pop(request.request_id, None)  # of an earlier request with this id
        if self.requests.keys() <= {*self.failed_request_ids, *self.removals.aborting}:
            self._was_idle = True
        self._cached.prefix_request(request)
        wants_tokens = asked.num_tokens_to_generate != 0 and asked.num_tokens_total != len(request.prompt_tokens)
        super().accept_request(request)
        self._refuse_if_it_cannot_run(request, wants_tokens=wants_tokens)
        record = self._own_record(request.request_id)
        record.options = SamplingOptions.of(asked)
        record.ends = end_tokens_of(asked)  # megatron has set the default of its own
        wanted = None if record.options is None else record.options.structured_outputs
        if wanted is not None:  # `RequestRules` have compiled it
            record.grammar = AnswerGrammar(wanted, self.controller.tokenizer, self.controller.vocab_size, record.ends)
        ends_otherwise = record.ends and (self.num_speculative_tokens or record.ends != (asked.termination_id,))
        if record.options is not None or ends_otherwise:
            self._records[request.request_id] = record
        return self.requests[request.request_id].future

    def refuse_request(self, request_id: int) -> None:
        self._own_record(request_id)
        super().refuse_request(request_id)

    def _own_record(self, request_id: int) -> RequestRecord:
        entry = self.requests[request_id]
        if not isinstance(entry.record, RequestRecord):
            entry.record = RequestRecord(requests=entry.record.requests, latency=entry.record.latency)
            entry.record.continued = self._cached.continue_request
        if not isinstance(entry.future, Answer) and not entry.future.done():
            entry.future = Answer(loop=entry.future.get_loop())
        return entry.record

    @property
    def _rows_leave(self) -> bool:
        """Whether rows may have to leave before the next forward."""
        return bool(self.removals.aborting or self.removals.restarting_between_chunks)

    def _refuse_if_it_cannot_run(self, request: DynamicInferenceRequest, *, wants_tokens: bool) -> None:
        # Megatron lowers the tokens to generate to those that fit: none of them after a prompt of the longest sequence.
        number, error = request.request_id, None
        if wants_tokens and request.sampling_params.num_tokens_to_generate == 0:
            limit = f"max_sequence_length={self.context.max_sequence_length}"
            error = MaxSequenceLengthOverflowError(number, f"the prompt leaves no room to generate in {limit}")
        # It checks against all blocks. A request that needs more than the active blocks would stay paused forever.
        elif blocks_up_to_the_end(request, self.context.block_size_tokens) > self._most_blocks:
            error = BlockOverflowError(number)
        if error is None or request.status == Status.FAILED:
            return
        self.waiting_request_ids.remove(number)
        request.status = Status.FAILED
        request.add_event_error_nontransient(error)
        self.refuse_request(number)

    def abort_request(self, request_id: int) -> bool:
        """Abort a request; its blocks and slots are free by the end of the next step.

        That step returns it as finished, with the tokens generated so far (none if it was waiting). With tensor or pipeline parallelism call this on
        every rank, between the same two steps.

        Args:
            request_id: Id of a request that was added.

        Returns:
            Whether the request was unfinished.
        """
        if request_id not in self.requests or request_id in self.failed_request_ids:
            return False
        self.removals.abort(request_id, self.resume_request_ids if self._is_suspended else self.waiting_request_ids)
        return True

    def has_unfinished_requests(self) -> bool:
        """Also True while the next step has aborted or refused requests to return."""
        return super().has_unfinished_requests() or bool(getattr(self, "failed_request_ids", ()))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule_waiting_requests(self) -> None:
        """See upstream and `PrefixScheduling`. First removes aborted requests that are in no running forward."""
        if self._rows_leave:
            self.removals.take_out()
        if not self.waiting_request_ids:
            return
        if self._was_idle and not self.expert_ranks_agree_on_work:
            self._look_at_weights(experts=False)
        self._was_idle = False
        self._schedule(super().schedule_waiting_requests)

    def may_overlap_steps(self) -> bool:
        """False if an aborted request must leave between two forwards, or a request waits for its load."""
        if self._rows_leave or self._cached.loads_wait:
            return False
        context, tokens = self.context, self.context.active_token_count
        if context.num_prefill_requests:
            if not self._own:
                return False
            context.active_token_count = context.total_request_count  # they have a token each in the next forward
        try:
            return super().may_overlap_steps()
        finally:
            context.active_token_count = tokens

    async def async_step(self) -> Any:
        """A replica sends new tokens after a step: see `on_step` and `step_began_s`.

        Raises:
            EngineSuspendedError: The engine is suspended.
            RuntimeError: An earlier step raised, and the engine was not reset since.
        """
        self._check_not_suspended()
        if self.needs_reset:
            raise RuntimeError("a step failed and left half-written states: call engine.reset() first")
        self.step_began_s = time.perf_counter()
        try:
            if self._rows_leave:
                self.removals.take_out()
            result = await super().async_step()
            if not self.has_unfinished_requests():
                self._cached.flush()
        except BaseException:
            self.needs_reset = True
            self._cached.fail_step()
            raise
        finally:
            self.step_began_s = None
        self.on_step()
        return result

    def take_stopped_ids(self, active_request_ids: list[int]) -> set[int]:
        """Also cuts off the log-probs of a stop word, those of earlier steps included.

        Requests whose load failed leave the context the same way: in this step, without its token. So do those that computed something
        that is not finite, and those that resumed from it.
        """
        stopped = super().take_stopped_ids(active_request_ids)
        wrong: frozenset[int] = getattr(self.controller, "wrong_ids", frozenset())
        left = self._records.keys() & {*active_request_ids} - stopped
        grammars = {number: self._records[number].grammar for number in left}
        stuck = {number: each.stuck for number, each in grammars.items() if each and each.stuck}
        self.removals.failing |= stuck | dict.fromkeys(wrong - stopped, NOT_FINITE)
        failed = (self._cached.failed_requests(wrong, active_request_ids) | stuck.keys()) - stopped
        if failed:
            between_chunks = failed & {self.context.chunked_prefill_request_id}
            self.removals.restarting_between_chunks |= between_chunks
            self.removals.restarting |= failed - between_chunks
            self.stop_word_being_finished_ids = stopped | self.removals.restarting
        for request_id in stopped:
            cut_to_tokens(self.requests[request_id].record)
        return stopped | self.removals.restarting

    def check_stop_words(self, request: DynamicInferenceRequest) -> tuple[bool, int]:
        """Also finds a stop word that began before a preemption."""
        if not request.stop_word_ids:
            return False, 0
        entry = self.requests.get(request.request_id)
        with whole_answer(request, earlier=[] if entry is None else entry.record.requests[:-1]):
            found, trimmed_tokens = super().check_stop_words(request)
        # Megatron cuts this many log-probs off this step's, and fails if none remain of a first token.
        return found, trimmed_tokens if request.generated_tokens else 0

    def post_process_requests(
        self,
        request_ids: torch.Tensor,
        finished_request_ids: torch.Tensor,
        evict_request_ids: torch.Tensor | None,
        step_time: float,
        sample: torch.Tensor,
        accepted_tokens: torch.Tensor | None,
        log_probs: list[list[float] | None] | None,
        consumed_chunked_prefill_request_id: int,
        top_n_logprobs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Requests whose load failed are not finished: they wait again.

        Only requests that asked for log-probs get them, exactly one per token.
        """
        restarting, self.removals.restarting = self.removals.restarting, set()
        # A request between two chunks is not finished either, even if its next prompt token is the end-of-text token.
        running = restarting | {consumed_chunked_prefill_request_id}
        left = [request_id not in running for request_id in finished_request_ids.tolist()]
        if not all(left):
            finished_request_ids = finished_request_ids[torch.tensor(left, dtype=torch.bool)]
        given, scored = None, self._cached.scored
        if log_probs:
            requests = [self.get_request(request_id) for request_id in request_ids.tolist()]
            of_rows, tops_of_rows = log_probs, top_n_logprobs or {}
            add_cached(requests, scored.of_step, self.controller.tokenizer)
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
            for row, request in enumerate(requests):
                scored.collect(request.request_id, of_rows[row], tops_of_rows.get(row))
            for record in result[1]:
                cut_to_tokens(record)  # log-probs of a stop word that ended the request
        for record in result[1]:
            if (routes := self._cached.finished_routes.get(record.request_id)) is not None:
                last = record[-1]  # of a preempted request: its prompt has all parts before
                last.routing_indices = routes[: len(last.prompt_tokens) + len(last.generated_tokens) - 1]
        if restarting:
            self.removals.requeue(restarting)
        self.removals.aborting.intersection_update(self.requests)  # ids of those that finished may be reused
        for request_id in self._records.keys() - self.requests.keys():
            del self._records[request_id]
        return result

    # -- exactness -----------------------------------------------------------------------------------------------------

    def tokens_of_chunk(self, request: DynamicInferenceRequest) -> int | None:
        """Where bits have to be equal, chunks end on the grid of the scans."""
        return self.context.chunk_on_grid(request) if self.cuts_chunks else None

    # -- weights -------------------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """The weights changed: older entries are not reused, and running requests stop caching.

        With several ranks (tensor, pipeline or expert parallelism) call this on each, between the same two steps.
        """
        self._cached.invalidate()
        if self._is_suspended:  # a trainer may have unmapped the weights, or not written them all
            self._announced = True
        else:
            self._read_new_weights()

    def _drop_old_weights(self, why: str) -> None:
        self._cached.invalidate(why)
        self._read_new_weights()

    def _read_new_weights(self) -> None:
        invalidate_layers(self.controller.inference_wrapped_model.model)
        if self._weights is not None:
            self._weights.take()
        self._announced = False
        if not self._is_suspended:  # else when it has resumed, which may capture again
            self._leave_wrong_graphs()

    def work_begins(self) -> None:
        """Looks at the weights."""
        self._look_at_weights(experts=True)

    def _look_at_weights(self, *, experts: bool) -> None:
        """Notice weights that changed though nobody said so. A collective; with ``experts`` also of the expert-parallel ranks."""
        what = None if self._weights is None else self._weights.changed(experts=experts)
        if what is not None:
            self._drop_old_weights(
                f"the weights changed, and nobody announced it ({what}); announce it: engine.invalidate(), or a new "
                "generation epoch"
            )
