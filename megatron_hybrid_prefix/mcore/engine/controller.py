"""`HybridPrefixController`: megatron's text generation controller, right about chunks, drafts and log-probs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

# What a step's log-probs are computed by, of each request: rows of the context's tables.
_LOG_PROB_FIELDS = ("return_log_probs", "skip_prompt_log_probs", "top_n_logprobs")


class HybridPrefixController(TextGenerationController):
    """Megatron's controller for the engine of this package."""

    def _dynamic_step_sample_logits(self) -> None:
        """See upstream and `_continue_prompt`."""
        super()._dynamic_step_sample_logits()
        self._continue_prompt()

    def _dynamic_step_sample_logits_and_verify_tokens(
        self, input_ids: torch.Tensor, token_row_indices: torch.Tensor | None = None
    ) -> None:
        """See upstream and `_continue_prompt`."""
        super()._dynamic_step_sample_logits_and_verify_tokens(input_ids, token_row_indices)
        self._continue_prompt()

    def _continue_prompt(self) -> None:
        """After a chunk that is not its prompt's last comes the prompt's next token, not the one sampled there.

        Nobody is given the sampled one, but megatron takes its log-prob for that of the prompt's next token.
        """
        context = self.inference_wrapped_model.inference_context
        token = getattr(context, "next_prompt_token", None)
        if token is None:
            return  # megatron's own context
        row = context.get_index_of_chunked_prefill_request()
        if row != -1:
            # A fill, and the token is known on the host: nothing to wait for.
            self._sampled_tokens_cuda[row - context.paused_request_count].fill_(token)

    def _compact_async_sched_logits(self, survivor_idxs: torch.Tensor) -> None:
        """See upstream, which moves the logits of requests that go on to the front, but not whether log-probs are wanted."""
        super()._compact_async_sched_logits(survivor_idxs)
        wanted = self.inference_wrapped_model.inference_context.active_request_metadata
        rows = survivor_idxs.to("cpu")
        for field in _LOG_PROB_FIELDS:
            wanted[field][: len(rows)] = wanted[field][rows]  # indexing by a tensor copies

    def _build_async_sched_request_state(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream, which takes it that a prompt begun in chunks has a chunk in every step.

        It has none where decodes took the KV blocks that its next chunk needs.
        """
        context = self.inference_wrapped_model.inference_context
        request_id = context.chunked_prefill_request_id
        if request_id == -1 or context.get_index_of_chunked_prefill_request() != -1:
            return super()._build_async_sched_request_state(*args, **kwargs)
        context.chunked_prefill_request_id = -1
        try:
            return super()._build_async_sched_request_state(*args, **kwargs)
        finally:
            context.chunked_prefill_request_id = request_id

    def _run_async_sched_sample_mtp(self) -> Any:
        """See upstream, which takes what another request had accepted before for a prefill's.

        Its rows say which drafts were accepted; those of prefills are not written, and only legacy scheduling clears them.
        """
        self._accepted_tokens_per_request.fill_(-1)
        self._accepted_token_counts_per_request.zero_()
        return super()._run_async_sched_sample_mtp()
