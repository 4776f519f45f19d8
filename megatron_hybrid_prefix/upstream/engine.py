"""`EngineSeam`: megatron's dynamic engine, its private hooks under neutral names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, override

import msgpack
import torch
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron.core.inference.sampling_params import SamplingParams

from megatron_hybrid_prefix.upstream.capabilities import form_of, only_in
from megatron_hybrid_prefix.upstream.coordinator import LAUNCHED, MARK, PARTIAL, refused, streamed
from megatron_hybrid_prefix.upstream.rebinding import Applied, apply

logger = logging.getLogger(__name__)


class EngineSeam(DynamicInferenceEngine):
    """Megatron's engine; a subclass overrides the methods without an underscore."""

    # Of megatron's engine.
    use_coordinator: bool
    _state_events: Any
    _pending_signals: Any
    _send_request_records_to_coordinator: Callable[[Sequence[DynamicInferenceRequestRecord]], None]

    _epoch: int | None = None
    _takes_messages = False
    _most_tokens: int | None = None  # the step's budget, while a round of scheduling runs
    # A subclass sets these: whether a step did not come to its end; whether `tokens_of_chunk` says where the chunks of a prompt end, and
    # not the sizes of CUDA graphs.
    needs_reset = cuts_chunks = False

    @override
    def add_request(
        self,
        request_id: int,
        prompt: str | list[int] | torch.Tensor,
        sampling_params: SamplingParams | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> asyncio.Future[DynamicInferenceRequest] | None:
        """See upstream, and `receive_request`. Returns None only for messages of a coordinator.

        Hashes of blocks that megatron's client has made are not used: the cache makes its own.

        Raises:
            ValueError: The request has images.
        """
        what = getattr(sampling_params, MARK, None) if self._takes_messages else None
        if what is not None:
            self.message_received(what, request_id, prompt, sampling_params)
            return None
        try:
            _refuse_images(request_id, kwargs)
            return self.receive_request(request_id, prompt, sampling_params)
        except Exception as error:
            if not self._takes_messages:
                raise
            # Megatron's loop would end, and the replica with it. The client gets a failed request.
            logger.error("request %d was refused", request_id, exc_info=error)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self.reply_refused(request_id, kind + str(error).removeprefix(f"request {request_id}: "))
            return None

    async def start_listening_to_data_parallel_coordinator(self, *args: Any, **kwargs: Any) -> str:
        """A coordinator that it starts is a `CoordinatorSeam`; megatron's own where that does not fit and the cache is optional."""
        replaced = Applied()
        apply([LAUNCHED], replaced)
        try:
            address: str = await super().start_listening_to_data_parallel_coordinator(*args, **kwargs)
        finally:
            replaced.undo()
        return address

    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """See upstream, and `drop_futures`. Raises the error of a step that failed."""
        try:
            with _as_it_failed():
                await super().run_engine(loop=loop)
        except Exception as error:
            self.drop_futures(f"a step failed: {type(error).__name__}: {error}")
            raise
        finally:  # megatron returns if its task is cancelled, in a step, too
            if self.needs_reset:
                self.drop_futures("a step was cancelled")

    async def run_engine_with_coordinator(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Raises the error of a step that failed."""
        with _as_it_failed():
            await super().run_engine_with_coordinator(loop=loop)

    async def shutdown(self) -> None:
        """See upstream, and `drop_futures`. Futures get an error that says so."""
        self.drop_futures("the engine was shut down")
        await super().shutdown()

    def schedule_requests(self) -> int:
        """Takes the messages of the coordinator, on all ranks of a replica alike."""
        self._takes_messages = True
        before = self.state
        try:
            messages: int = super().schedule_requests()
        finally:
            self._takes_messages = False
        self.messages_taken()
        if self.state == EngineState.UNPAUSING != before:
            self.work_begins()
        return messages

    async def _ep_establish_consensus(self, local_work: int, signal_consensus: bool) -> tuple[int, bool]:
        """After idle time `work_begins` on all expert-parallel ranks, so that they agree."""
        was_idle = self._last_ep_consensus[0] == 0
        work, all_pausing = await super()._ep_establish_consensus(local_work, signal_consensus)
        if self.expert_ranks_agree_on_work and was_idle and work:
            self.work_begins()
        return work, all_pausing

    def schedule_chunked_prefill(self) -> None:
        """See upstream, and `tokens_of_chunk`. The budget of a chunk holds for one round."""
        self._most_tokens = self.context.max_tokens
        try:
            super().schedule_chunked_prefill()
        finally:
            self.context.max_tokens, self._most_tokens = self._most_tokens, None

    def _can_schedule_chunked_prefill(self, req: DynamicInferenceRequest) -> bool:
        """Whether this round admits a request; sets how long a chunk may be."""
        context = self.context
        if self._most_tokens is not None:
            context.max_tokens = self._most_tokens
        if not super()._can_schedule_chunked_prefill(req):
            return False
        tokens = self.tokens_of_chunk(req)
        if tokens is not None and self._most_tokens is not None:
            # Megatron cuts the chunk to the step's budget: the only size that it takes from outside.
            context.max_tokens = context.active_token_count + tokens
        return tokens is None or tokens > 0

    def _find_cg_chunk_size(self, max_chunk_tokens: int) -> int | None:
        """Chunks end on the grid of the scans."""
        return None if self.cuts_chunks else super()._find_cg_chunk_size(max_chunk_tokens)

    @override
    def _add_request(self, request: DynamicInferenceRequest) -> asyncio.Future[DynamicInferenceRequest]:
        """The prompt is hashed on arrival."""
        return self.accept_request(request)

    @override
    def _handle_failed_request(self, request_id: int) -> None:
        """Refused requests get our record, too."""
        self.refuse_request(request_id)

    @override
    def _should_run_async_sched_overlap(self) -> bool:
        """False if something must happen between two forwards."""
        return self.may_overlap_steps()

    @override
    def _check_stop_words_for_request_post_append(self, request: DynamicInferenceRequest) -> tuple[bool, int]:
        """A stop word may begin before a preemption."""
        return self.check_stop_words(request)

    @override
    def _get_and_clear_stop_word_finished_ids(self, active_request_ids: list[int]) -> set[int]:
        """Drops log-probs of a stop word; ends requests whose load failed."""
        return self.take_stopped_ids(active_request_ids)

    @property
    @override
    def _generation_epoch(self) -> int | None:
        return self._epoch

    @_generation_epoch.setter
    def _generation_epoch(self, epoch: int | None) -> None:
        # Megatron sets it when a trainer announces new weights; `reset` sets it to None.
        if epoch is not None and epoch != self._epoch:
            self.invalidate()
        self._epoch = epoch

    def reset(self) -> None:
        """A suspended engine stays suspended until `resume`, and one under a coordinator stays in its state."""
        state = getattr(self, "state", None)  # None in megatron's constructor
        suspended = state in (EngineState.SUSPENDED, EngineState.SUSPENDING)
        ended = state in (None, EngineState.STOPPING, EngineState.STOPPED)
        stays = suspended or (not ended and self.use_coordinator)
        # A loop may wait for the condition.
        names = ["state", "use_coordinator", "_state_events", "_pending_signals", "_cond"]
        names += ["local_metadata_ledger", "local_metadata_ledger_enabled"]  # what a trainer looks up
        kept = {name: getattr(self, name) for name in names if stays and hasattr(self, name)}
        super().reset()
        for name, value in kept.items():
            setattr(self, name, value)
        if suspended:
            self.resume_request_ids: list[int] = []

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def receive_request(
        self, request_id: int, prompt: str | list[int] | torch.Tensor, sampling_params: SamplingParams | None
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Make a request from a prompt, and accept it."""
        return super().add_request(request_id, prompt, sampling_params)

    def accept_request(self, request: DynamicInferenceRequest) -> asyncio.Future[DynamicInferenceRequest]:
        """Record and queue a new request, or refuse it. The future gives its result.

        Drafts past the end of an answer need no KV block here. Megatron from 3fd8f33076 (0.20) on counts them, and refuses a request
        that just fits.
        """
        context = self.context
        drafts, context.num_speculative_tokens = context.num_speculative_tokens, 0
        try:
            return super()._add_request(request)
        finally:
            context.num_speculative_tokens = drafts

    def refuse_request(self, request_id: int) -> None:
        """Refuse a request that can never run; the next step returns it."""
        super()._handle_failed_request(request_id)

    def tokens_of_chunk(self, request: DynamicInferenceRequest) -> int | None:
        """Most tokens that the next chunk of a prompt may compute in this step; 0: it waits; None: as many as there is room for."""
        return None

    def may_overlap_steps(self) -> bool:
        """Whether the next forward may launch before the last one's bookkeeping is done."""
        return bool(super()._should_run_async_sched_overlap())

    def check_stop_words(self, request: DynamicInferenceRequest) -> tuple[bool, int]:
        """Whether the answer now ends with a stop word, and the number of tokens cut off."""
        return super()._check_stop_words_for_request_post_append(request)

    def take_stopped_ids(self, active_request_ids: list[int]) -> set[int]:
        """Active requests that end with this step's bookkeeping, regardless of the sampled token."""
        return super()._get_and_clear_stop_word_finished_ids(active_request_ids)

    def invalidate(self) -> None:
        """The weights changed."""

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def message_received(self, what: str, number: int, prompt: Any, params: Any) -> None:
        """The coordinator told this replica something, see `CoordinatorSeam.tell`."""

    def drop_futures(self, why: str) -> list[int]:
        """The engine's loop ended: the futures of the requests that it leaves get an error. Returns their ids."""
        return []

    @property
    def expert_ranks_agree_on_work(self) -> bool:
        """Whether there are other expert-parallel ranks, and all of them call `work_begins` before the first step after idle time."""
        return self.use_coordinator and self.ep_world_size > 1 and not self.disable_ep_consensus

    def work_begins(self) -> None:
        """All ranks were paused, or all expert-parallel ranks were idle, and go on. They all call it: collectives are possible."""

    def messages_taken(self) -> None:
        """The messages of the coordinator so far were taken; a step or an idle moment follows."""

    def reply(self, records: Sequence[DynamicInferenceRequestRecord]) -> None:
        """Send finished requests to the coordinator, as megatron does after a step."""
        if not self.is_mp_coordinator or not records:
            return
        if form_of("trainers look requests up") == "yes":
            self._send_request_records_to_coordinator(records)
        else:  # Needless from cac6b7bc69 (0.20): megatron has a method for it since then.
            message = [Headers.ENGINE_REPLY.value, [record.merge().serialize() for record in records]]
            self.socket_for_receiving_requests.send(msgpack.packb(message, use_bin_type=True))

    def reply_refused(self, request_id: int, why: str) -> None:
        """Send the coordinator a failed request in reply to one that the engine does not have."""
        if self.use_coordinator:
            self.reply([DynamicInferenceRequestRecord(requests=[refused(request_id, why)])])

    def send_partials(self, outputs: Sequence[dict[str, Any]]) -> None:
        """Send the coordinator new output of unfinished requests, each with its ``request_id``, in megatron's own message.

        Its contents are ours: what megatron's main puts there lacks the number of cached tokens.
        """
        if outputs:
            self.tell_coordinator(*streamed(PARTIAL, outputs))

    @only_in("aborts and new tokens", "yes")
    def _try_send_streaming_partials(self) -> None:
        """Shows megatron the whole answers of preempted requests. Of their last parts it would skip the tokens that it counts as sent."""
        records = {number: entry.record for number, entry in self.requests.items() if len(entry.record.requests) > 1}
        for number, record in records.items():
            whole = record.merge()
            whole.stop_word_ids = record[-1].stop_word_ids
            self.requests[number].record = DynamicInferenceRequestRecord(requests=[whole])
        try:
            super()._try_send_streaming_partials()
        finally:
            for number, record in records.items():
                self.requests[number].record = record

    def tell_coordinator(self, *frames: bytes) -> None:
        """Send the coordinator a message; only the first rank of a replica does."""
        if self.is_mp_coordinator:
            self.socket_for_receiving_requests.send_multipart(frames)

    # -- private state -------------------------------------------------------------------------------------------------

    def can_admit(self, request: DynamicInferenceRequest) -> bool:
        """Whether this round would admit the first waiting request."""
        if self.enable_chunked_prefill:
            return bool(self._can_schedule_chunked_prefill(request))
        return all(self.context.check_availability(request))

    def request_admitted(self) -> None:
        """Wake the engine's loop, as megatron does after each admission."""
        self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    def count_waits(self, requests: int) -> None:
        """Add to megatron's count of requests that waited for a prefix another request computes."""
        self._prefix_coordination_waits += requests

    def drop_pending_logits(self) -> None:
        """Drop the logits that asynchronous scheduling keeps for the next step: their rows are gone."""
        self.controller._async_sched_logits.clear()


def _refuse_images(request_id: int, given: Mapping[str, Any]) -> None:
    images = [name for name in ("imgs", "imgs_sizes", "num_tiles") if given.get(name) is not None]
    if images:
        raise ValueError(f"request {request_id}: {images[0]}: this engine takes text; use megatron's own for images")


@contextmanager
def _as_it_failed() -> Iterator[None]:
    """Raises the error of a loop. Megatron makes it a SystemExit, which ends the asyncio loop, too, and whoever waits there hangs."""
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, Exception):
            raise
        raise end.__context__ from None
