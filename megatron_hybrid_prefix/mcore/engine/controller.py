"""`HybridPrefixController`: megatron's text generation controller with fixes for chunks, drafts and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.engine.sampling import RowSampling, reject_ends
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.upstream.controller import ControllerSeam
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequestRecord


class HybridPrefixController(ControllerSeam):
    """Megatron's controller, for this package's engine."""

    # The engine sets these, by request: answers that are decoded again, options, end tokens (with drafts, and where there
    # are others than ``termination_id``: most steps need neither), and the record.
    replays: Mapping[int, Sequence[int]] = MappingProxyType({})
    row_options: Mapping[int, SamplingOptions] = MappingProxyType({})
    end_tokens: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    other_ends: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    record_of: Callable[[int], DynamicInferenceRequestRecord]

    # Ids of requests for which nothing could be sampled in the last step: their logits were not finite.
    wrong_ids: frozenset[int] = frozenset()
    # (rows,) bool, on the device: rows of logits of the step that were not finite, so that the token means nothing.
    wrong_rows: torch.Tensor
    _wrong_on_host: torch.Tensor | None = None

    def sampling_around(self, backend: Any) -> Any:
        return RowSampling(backend, self.sampling_rng, self)

    def forward_launched(self) -> None:
        context = self.inference_wrapped_model.inference_context
        if isinstance(context, SlotContext):
            context.mark_logits(self.step_logits)
        if isinstance(context, HybridPrefixContext):
            context.forward_launched()

    def tokens_sampled(self) -> None:
        """After a chunk that does not finish its prompt, sets the prompt's next token as the sampled token.

        The token sampled there is not used, but megatron would report its log-prob for the prompt's next token.
        """
        context = self.inference_wrapped_model.inference_context
        self._send_wrong(context)
        token = getattr(context, "next_prompt_token", None)
        if token is None:
            return  # megatron's own context
        context.step_sampled(self.step_logits)
        row = context.get_index_of_chunked_prefill_request()
        if row != -1:
            # The token is known on the host, so the fill does not synchronise.
            self.sampled_tokens[row - context.paused_request_count].fill_(token)

    def _send_wrong(self, context: Any) -> None:
        """Copies to the host which requests have a wrong token; it arrives before the tokens do."""
        wrong, width, decodes = self.wrong_rows, context.num_speculative_tokens + 1, context.num_decode_requests
        if width > 1:  # rows of drafts that are not accepted do not count
            used = torch.arange(width, device=wrong.device) <= self.accepted_counts[:decodes, None]
            of_decodes = (wrong[: decodes * width].view(decodes, width) & used).any(dim=1)
            wrong = torch.cat([of_decodes, wrong[decodes * width :]])
        if self._wrong_on_host is None:
            self._wrong_on_host = torch.empty(context.max_requests, dtype=torch.bool).pin_memory()
        self._wrong_on_host[: len(wrong)].copy_(wrong, non_blocking=True)

    def before_verification(self, drafts: torch.Tensor) -> None:
        """An answer ends at its first end token, also if that is a draft."""
        if self.end_tokens:
            ends = [self.end_tokens.get(request_id, ()) for request_id in self._request_ids()[: len(drafts)]]
            reject_ends(drafts, ends)

    def tokens_on_host(self, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Megatron knows one end token: of several the sampled one, if it is among them."""
        assert self._wrong_on_host is not None
        wrong = self._wrong_on_host[: len(tokens)]
        self.wrong_ids = frozenset()
        if wrong.any():
            ids = self._request_ids()
            self.wrong_ids = frozenset(ids[row] for row in wrong.nonzero()[:, 0].tolist())
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
        return context.request_ids[context.paused_request_count : context.total_request_count].tolist()
