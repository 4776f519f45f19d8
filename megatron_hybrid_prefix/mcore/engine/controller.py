"""`HybridPrefixController`: megatron's text generation controller with fixes for chunks, drafts and log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.engine.record import RequestRecord
from megatron_hybrid_prefix.mcore.engine.sampling import RowSampling, reject_ends
from megatron_hybrid_prefix.upstream.controller import ControllerSeam


class HybridPrefixController(ControllerSeam):
    """Megatron's controller, for this package's engine."""

    # The engine sets it, by request id: records of the unfinished requests that megatron alone would not sample, or not end, as they
    # ask. Most steps have none.
    records: Mapping[int, RequestRecord] = MappingProxyType({})

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
            context.forward_launched(self.step_logits)

    def tokens_sampled(self) -> None:
        """After a chunk that does not finish its prompt, sets the prompt's next token as the sampled token.

        The token sampled there is not used, but megatron would report its log-prob for the prompt's next token.
        """
        context = self.inference_wrapped_model.inference_context
        self._send_wrong(context)
        if not isinstance(context, SlotContext):
            return
        context.step_sampled(self.step_logits)
        row = context.get_index_of_chunked_prefill_request()
        if row != -1:
            # The token is known on the host, so the fill does not synchronise.
            self.sampled_tokens[row - context.paused_request_count].fill_(context.next_prompt_token)

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
        """An answer ends at its first end token, also if that is a draft. No draft fills an open chunk, see `DecodeStep`."""
        context = self.inference_wrapped_model.inference_context
        if isinstance(context, SlotContext) and context.is_exact and context.states is not None:
            live = context.live_indices[context.paused_request_count :][: len(drafts)]
            most = torch.from_numpy(context.states.decodes.most_drafts)[live.long()].to(
                drafts.device, non_blocking=True
            )
            drafts.masked_fill_(torch.arange(drafts.shape[1], device=drafts.device) >= most[:, None], -1)
        if self.records:
            reject_ends(drafts, [self._ends_of(request_id) for request_id in self.request_ids()[: len(drafts)]])

    def tokens_on_host(self, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Megatron knows one end token: of several the sampled one, if it is among them."""
        assert self._wrong_on_host is not None
        wrong = self._wrong_on_host[: len(tokens)]
        self.wrong_ids = frozenset()
        if wrong.any():
            ids = self.request_ids()
            self.wrong_ids = frozenset(ids[row] for row in wrong.nonzero()[:, 0].tolist())
        if not self.records:
            return
        known = ends.tolist()
        for row, (request_id, token) in enumerate(zip(self.request_ids(), tokens.tolist(), strict=True)):
            if own := self._ends_of(request_id):
                known[row] = token if token in own else own[0]
        ends.copy_(torch.tensor(known))

    def _ends_of(self, request_id: int) -> tuple[int, ...]:
        record = self.records.get(request_id)
        return () if record is None else record.ends

    def request_ids(self) -> list[int]:
        """Ids of the active rows."""
        context = self.inference_wrapped_model.inference_context
        return context.request_ids[context.paused_request_count : context.total_request_count].tolist()
