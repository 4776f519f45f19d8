"""`HybridPrefixController`: megatron's text generation controller with fixes for chunks, drafts and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.engine.sampling import EndsOfDrafts, RowSampling
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.upstream.controller import ControllerSeam
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequestRecord

# Options of each request's log-probs: rows of the context's tables.
_LOG_PROB_FIELDS = ("return_log_probs", "skip_prompt_log_probs", "top_n_logprobs")


class HybridPrefixController(ControllerSeam):
    """Megatron's controller, for this package's engine."""

    # The engine sets these, by request: answers that are decoded again, options, end tokens (with drafts, and where there
    # are others than ``termination_id``: most steps need neither), and the record.
    replays: Mapping[int, Sequence[int]] = MappingProxyType({})
    row_options: Mapping[int, SamplingOptions] = MappingProxyType({})
    end_tokens: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    other_ends: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    record_of: Callable[[int], DynamicInferenceRequestRecord]

    @cached_property
    def _ends_of_drafts(self) -> EndsOfDrafts:
        return EndsOfDrafts()  # here, because `install` calls megatron's constructor alone

    def sampling_around(self, backend: Any) -> Any:
        return RowSampling(backend, self.sampling_rng, self)

    def forward_launched(self) -> None:
        context = self.inference_wrapped_model.inference_context
        if isinstance(context, HybridPrefixContext):
            context.forward_launched()

    def tokens_sampled(self) -> None:
        """After a chunk that does not finish its prompt, sets the prompt's next token as the sampled token.

        The token sampled there is not used, but megatron would report its log-prob for the prompt's next token.
        """
        context = self.inference_wrapped_model.inference_context
        token = getattr(context, "next_prompt_token", None)
        if token is None:
            return  # megatron's own context
        context.step_sampled(self.step_logits)
        row = context.get_index_of_chunked_prefill_request()
        if row != -1:
            # The token is known on the host, so the fill does not synchronise.
            self.sampled_tokens[row - context.paused_request_count].fill_(token)

    def before_verification(self, drafts: torch.Tensor) -> None:
        """An answer ends at its first end token, also if that is a draft."""
        if self.end_tokens:
            ends = [self.end_tokens.get(request_id, ()) for request_id in self._request_ids()[: len(drafts)]]
            self._ends_of_drafts.reject(drafts, ends)

    def tokens_on_host(self, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Megatron knows one end token: of several the sampled one, if it is among them."""
        if not self.other_ends:
            return
        known = ends.tolist()
        for row, (request_id, token) in enumerate(zip(self._request_ids(), tokens.tolist(), strict=True)):
            own = self.other_ends.get(request_id)
            if own is not None:
                known[row] = token if token in own else own[0]
        ends.copy_(torch.tensor(known))

    def _request_ids(self) -> list[int]:
        """Ids of the active rows."""
        context = self.inference_wrapped_model.inference_context
        ids: list[int] = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        return ids

    def pending_logits_moved(self, rows: torch.Tensor) -> None:
        """See the seam. Also moves the log-prob options, which megatron leaves in place."""
        wanted = self.inference_wrapped_model.inference_context.active_request_metadata
        rows = rows.to("cpu")
        for field in _LOG_PROB_FIELDS:
            wanted[field][: len(rows)] = wanted[field][rows]  # indexing by a tensor copies

    def build_request_state(self, *args: Any, **kwargs: Any) -> Any:
        """See the seam. Megatron assumes that a chunked prompt has a chunk in every step.

        It has none if decodes took the KV blocks for its next chunk.
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
        return getattr(self.inference_wrapped_model.inference_context, "states", None) is not None

    def roll_back_states(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        self.inference_wrapped_model.inference_context.states.roll_back(slots, accepted)

    def before_draft_sampling(self) -> None:
        """See the seam. Clears the accepted drafts of all rows.

        A prefill does not write its rows, and only legacy scheduling clears them. Without this, megatron would use the drafts
        that another request accepted before.
        """
        self.clear_accepted_drafts()
