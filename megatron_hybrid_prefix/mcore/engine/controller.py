"""`HybridPrefixController`: megatron's text generation controller, right about chunks, drafts and log-probs."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid_prefix.upstream.controller import ControllerSeam

# What a step's log-probs are computed by, of each request: rows of the context's tables.
_LOG_PROB_FIELDS = ("return_log_probs", "skip_prompt_log_probs", "top_n_logprobs")


class HybridPrefixController(ControllerSeam):
    """Megatron's controller for the engine of this package."""

    def tokens_sampled(self) -> None:
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
            self.sampled_tokens[row - context.paused_request_count].fill_(token)

    def pending_logits_moved(self, rows: torch.Tensor) -> None:
        """See the seam. Megatron does not move what says whether log-probs are wanted."""
        wanted = self.inference_wrapped_model.inference_context.active_request_metadata
        rows = rows.to("cpu")
        for field in _LOG_PROB_FIELDS:
            wanted[field][: len(rows)] = wanted[field][rows]  # indexing by a tensor copies

    def build_request_state(self, *args: Any, **kwargs: Any) -> Any:
        """See the seam. Megatron takes it that a prompt begun in chunks has a chunk in every step.

        It has none where decodes took the KV blocks that its next chunk needs.
        """
        context = self.inference_wrapped_model.inference_context
        request_id = context.chunked_prefill_request_id
        if request_id == -1 or context.get_index_of_chunked_prefill_request() != -1:
            return super().build_request_state(*args, **kwargs)
        context.chunked_prefill_request_id = -1
        try:
            return super().build_request_state(*args, **kwargs)
        finally:
            context.chunked_prefill_request_id = request_id

    @property
    def rolls_back_states(self) -> bool:
        """See the seam."""
        return getattr(self.inference_wrapped_model.inference_context, "states", None) is not None

    def roll_back_states(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """See the seam."""
        self.inference_wrapped_model.inference_context.states.roll_back(slots, accepted)

    def before_draft_sampling(self) -> None:
        """See the seam. Megatron takes what another request had accepted before for a prefill's.

        Its rows say which drafts were accepted; those of prefills are not written, and only legacy scheduling clears them.
        """
        self.clear_accepted_drafts()
