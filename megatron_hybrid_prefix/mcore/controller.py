"""`HybridPrefixController`: megatron's text generation controller, right about waiting chunks and about drafts."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController


class HybridPrefixController(TextGenerationController):
    """Megatron's controller for the engine of this package."""

    def _build_async_sched_request_state(self, *args: Any) -> Any:
        """See upstream, which takes it that a prompt begun in chunks has a chunk in every step.

        It has none where decodes took the KV blocks that its next chunk needs.
        """
        context = self.inference_wrapped_model.inference_context
        request_id = context.chunked_prefill_request_id
        if request_id == -1 or context.get_index_of_chunked_prefill_request() != -1:
            return super()._build_async_sched_request_state(*args)
        context.chunked_prefill_request_id = -1
        try:
            return super()._build_async_sched_request_state(*args)
        finally:
            context.chunked_prefill_request_id = request_id

    def _run_async_sched_sample_mtp(self) -> Any:
        """See upstream, which takes what another request had accepted before for a prefill's.

        Its rows say which drafts were accepted; those of prefills are not written, and only legacy scheduling clears them.
        """
        self._accepted_tokens_per_request.fill_(-1)
        self._accepted_token_counts_per_request.zero_()
        return super()._run_async_sched_sample_mtp()
