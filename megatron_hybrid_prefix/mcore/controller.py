"""`HybridPrefixController`: megatron's text generation controller, right about a chunked prefill that has to wait."""

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
