"""`ControllerSeam`: megatron's text generation controller, its private hooks under neutral names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.inference.sampling.base import Sampling
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch.overrides import TorchFunctionMode

from megatron_hybrid_prefix.upstream.context import ContextSeam

# Options of each request's log-probs: rows of the context's tables.
_LOG_PROB_FIELDS = ("return_log_probs", "skip_prompt_log_probs", "top_n_logprobs")


class ControllerSeam(TextGenerationController):
    """Megatron's controller; a subclass overrides the methods without an underscore."""

    _sampling: Sampling

    def _init_dynamic_sampling_tensors(self) -> None:
        """Our sampling is put around megatron's, which does not wait for the device then."""
        super()._init_dynamic_sampling_tensors()
        backend = self._sampling
        if type(backend) is TorchSampling:
            backend = QueuedSampling(backend._rng, backend._vocab_size)
        self._sampling = self.sampling_around(backend)

    def _dynamic_step_forward_logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """A forward is published once it is launched, and copies to the host are launched after it."""
        super()._dynamic_step_forward_logits(input_ids, position_ids)
        self.forward_launched()

    def _dynamic_step_sample_logits(self) -> None:
        """The prompt's next token follows a chunk; benchmarks wrap it to force answers."""
        super()._dynamic_step_sample_logits()
        self.tokens_sampled()

    def _dynamic_step_sample_logits_and_verify_tokens(
        self, input_ids: torch.Tensor, token_row_indices: torch.Tensor | None = None
    ) -> None:
        """The prompt's next token follows a chunk, with drafts, too."""
        super()._dynamic_step_sample_logits_and_verify_tokens(input_ids, token_row_indices)
        self.tokens_sampled()

    def _verify_speculative_tokens(
        self,
        output_tokens: torch.Tensor,
        input_tokens_required: torch.Tensor,
        num_decode_requests: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A draft that is an end token is not accepted: it is sampled, and ends the answer."""
        if num_decode_requests:
            shape = num_decode_requests, self.num_speculative_tokens + 1
            self.before_verification(input_tokens_required[: shape[0] * shape[1]].view(shape)[:, 1:])
        return super()._verify_speculative_tokens(
            output_tokens, input_tokens_required, num_decode_requests, *args, **kwargs
        )

    def _dynamic_step_calculate_log_probs_speculative(self) -> Any:
        """Those of the context where bits count: megatron asks it for them without drafts, and in asynchronous steps, alone."""
        context = self.inference_wrapped_model.inference_context
        with LogSoftmax(context.log_probs_of) if getattr(context, "is_exact", False) else nullcontext():
            return super()._dynamic_step_calculate_log_probs_speculative()

    def _transfer_samples_to_cpu(self, active_request_count: int) -> Any:
        """A request may have several end tokens."""
        result = super()._transfer_samples_to_cpu(active_request_count)
        ends = self.inference_wrapped_model.inference_context.active_request_metadata["termination_id"]
        self.tokens_on_host(result[0], ends[:active_request_count])
        return result

    def _compact_async_sched_logits(self, survivor_idxs: torch.Tensor) -> None:
        """The log-prob options move with the rows; megatron leaves them in place."""
        super()._compact_async_sched_logits(survivor_idxs)
        wanted = self.inference_wrapped_model.inference_context.active_request_metadata
        rows = survivor_idxs.to("cpu")
        for field in _LOG_PROB_FIELDS:
            wanted[field][: len(rows)] = wanted[field][rows]  # indexing by a tensor copies

    def _build_async_sched_request_state(
        self, sampled_tokens_cpu: torch.Tensor, resolved_sequence_lengths: torch.Tensor
    ) -> Any:
        """A prompt between two chunks may have no row in a step; several end tokens.

        Megatron assumes that a chunked prompt has a chunk in every step. It has none if decodes took the KV blocks for it.
        Needless from 94939b85d5 (0.20), but for the end tokens.
        """
        context = self.inference_wrapped_model.inference_context
        rows = slice(context.paused_request_count, context.total_request_count)
        self.tokens_on_host(sampled_tokens_cpu, context.request_metadata["termination_id"][rows])
        chunked = context.chunked_prefill_request_id
        if chunked == -1 or context.get_index_of_chunked_prefill_request() != -1:
            return super()._build_async_sched_request_state(sampled_tokens_cpu, resolved_sequence_lengths)
        context.chunked_prefill_request_id = -1
        try:
            return super()._build_async_sched_request_state(sampled_tokens_cpu, resolved_sequence_lengths)
        finally:
            context.chunked_prefill_request_id = chunked

    async def _run_async_sched_step_overlap(self) -> Any:
        """Prefills may have run: megatron overlaps steps of decodes alone."""
        context = self.inference_wrapped_model.inference_context
        if isinstance(context, ContextSeam):
            context.decode_next()
        return await super()._run_async_sched_step_overlap()

    def _run_async_sched_sample_mtp(self) -> Any:
        """Prefills accepted no drafts.

        A prefill does not write its rows, and only legacy scheduling clears them: megatron would use the drafts that another
        request accepted before.
        """
        self.clear_accepted_drafts()
        return super()._run_async_sched_sample_mtp()

    def _rewind_kv_cache(self, accepted_counts_cpu: torch.Tensor | None = None) -> Any:
        """Only KV goes back to the last accepted token: what a decode reads of states and rings does not depend on rejected drafts."""
        context: Any = self.inference_wrapped_model.inference_context
        states = getattr(context, "states", None)  # `StateMemory`
        # Megatron would copy states of Mamba2 layers; the rest of what it rewinds is the same for all models.
        is_hybrid, context.is_hybrid_model = context.is_hybrid_model, context.is_hybrid_model and states is None
        try:
            blocks, released = super()._rewind_kv_cache(accepted_counts_cpu)
        finally:
            context.is_hybrid_model = is_hybrid
        return blocks, released & (blocks != context.kv_block_allocator.dummy_block_idx)  # drafts past an answer's end

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def sampling_around(self, backend: Sampling) -> Sampling:
        """The sampling backend to use in place of megatron's."""
        return backend

    def forward_launched(self) -> None:
        """Called after a forward was launched, and its logits copied; the device may still run it."""

    def tokens_sampled(self) -> None:
        """Called after sampling and verifying drafts, before log-probs are computed."""

    def before_verification(self, drafts: torch.Tensor) -> None:
        """Called before drafts are compared with what the model sampled; what it sets to -1 is rejected, with all that follows.

        Args:
            drafts: (rows, drafts) integer, on the device: those of the rows that decode. A copy.
        """

    def tokens_on_host(self, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Called when a step's sampled tokens arrived, before megatron looks which requests they end.

        Args:
            tokens: (rows,) integer on the host, by active row.
            ends: (rows,) int64 on the host: the token that ends each request. May be changed.
        """

    # -- private state -------------------------------------------------------------------------------------------------

    @property
    def sampled_tokens(self) -> torch.Tensor:
        """The step's sampled tokens by active row, on the device."""
        return self._sampled_tokens_cuda

    @property
    def accepted_counts(self) -> torch.Tensor:
        """(max_requests,) on the device: how many drafts of each active row the step accepted."""
        return self._accepted_token_counts_per_request

    @property
    def step_logits(self) -> torch.Tensor:
        """The step's logits, on the device: (1, rows, vocabulary); a row per token if prompts may have log-probs."""
        return self._all_logits_cuda

    def clear_accepted_drafts(self) -> None:
        """Set the accepted drafts of all rows to none. Does nothing without drafts."""
        if self._accepted_tokens_per_request is not None:
            self._accepted_tokens_per_request.fill_(-1)
            self._accepted_token_counts_per_request.zero_()


class LogSoftmax(TorchFunctionMode):
    """Inside, PyTorch's ``log_softmax`` over the last dimension is another function."""

    def __init__(self, ours: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._ours = ours

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        return self._ours(args[0]) if func is torch.nn.functional.log_softmax else func(*args, **(kwargs or {}))


class QueuedSampling(TorchSampling):
    """Megatron's sampling with PyTorch, queued on the device without waiting for it; draws what megatron's draws.

    Megatron copies the row numbers of each group of like requests to the device, and waits for that copy. It is queued after
    the forward, so the host waits for the forward, and asynchronous scheduling launches the next one late: 0.6 ms of 6.0 on an
    H100, `hybrid-4b`, 64 rows. Here one group needs no row numbers, and the copies for several are not waited for.

    With drafts, megatron samples several groups.
    """

    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        **flags: Any,
    ) -> torch.Tensor:
        """The next token of each row.

        Args:
            logits: (>= n, vocabulary).
            n: Rows to sample.
            context: Has the sampling parameters of the step's requests.
            gather_indices: (>= n,) integer: which rows of ``logits``; None: the first.
            token_to_request_index: (n,) integer, the request of each row, where drafts have rows, too.
            output: (n,) int64, filled and returned; None: a new tensor.
            **flags: Megatron's, passed on.
        """
        groups = _rows_by_parameters(context)
        if len(groups) > 1 and token_to_request_index is not None:
            where = {"gather_indices": gather_indices, "token_to_request_index": token_to_request_index}
            return super().sample_kernel(logits, n, context, output=output, **where, **flags)
        logits = logits[:n] if gather_indices is None else logits[gather_indices[:n], :]
        if output is None:
            output = torch.empty(n, device=logits.device, dtype=torch.int64)
        for parameters, rows in groups.items():
            if len(groups) == 1:
                output.copy_(self._sampled(logits, *parameters))
            else:
                # The driver reads so few bytes at once.
                numbers = torch.tensor(rows).to(logits.device, non_blocking=True)
                output[numbers] = self._sampled(logits[numbers, :], *parameters)
        return output

    def _sampled(self, logits: torch.Tensor, *parameters: Any) -> torch.Tensor:
        tokens: torch.Tensor = self.sample_from_logits(
            logits, *parameters, generator=self._rng, vocab_size=self._vocab_size
        )
        return tokens

    def log_probs_kernel(
        self, logits: torch.Tensor, context: Any, *, token_to_request_index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probs of the distribution that each row is drawn from: (rows, vocabulary)."""
        groups = _rows_by_parameters(context)
        if len(groups) != 1:
            log_probs: torch.Tensor = super().log_probs_kernel(
                logits, context, token_to_request_index=token_to_request_index
            )
            return log_probs
        (parameters,) = groups
        return torch.log_softmax(self.filter_logits(logits, *parameters, vocab_size=self._vocab_size), dim=-1)


def _rows_by_parameters(context: Any) -> dict[tuple[float, int, float], list[int]]:
    """Active rows by temperature, top-k and top-p."""
    count, metadata = context.total_request_count - context.paused_request_count, context.active_request_metadata
    rows = defaultdict(list)
    columns = (metadata[name][:count].tolist() for name in ("temperature", "top_k", "top_p"))
    for row, parameters in enumerate(zip(*columns, strict=True)):
        rows[parameters].append(row)
    return rows


def after_sampling(controller: TextGenerationController, change: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call ``change`` after each step that samples without drafts; it may overwrite the sampled tokens.

    Args:
        controller: Megatron's controller or a subclass.
        change: Gets the tokens by active row, on the device.

    Returns:
        A function that undoes this.
    """
    sample = controller._dynamic_step_sample_logits

    def sampling() -> Any:
        result = sample()
        change(controller._sampled_tokens_cuda)
        return result

    controller._dynamic_step_sample_logits = sampling

    def undo() -> None:
        del controller._dynamic_step_sample_logits

    return undo
