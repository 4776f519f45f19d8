"""End tokens: what ends an answer, also as an accepted draft.

Megatron ends an answer if its newest token is ``termination_id``. It does not look at the drafts that a step accepted before that
token, and knows one end token for each request. More of them are an attribute of the sampling parameters:
``sampling_params.add_attributes({"stop_token_ids": [7, 9]})``. As ``termination_id``, such a token is the answer's last one.
"""

from __future__ import annotations

from typing import Any

import torch


def end_tokens_of(params: Any) -> tuple[int, ...]:
    """All end tokens of a request, without repetition; empty: only its length ends it.

    Args:
        params: Megatron's ``SamplingParams``, with its ``termination_id`` set.
    """
    first = params.termination_id
    more = getattr(params, "stop_token_ids", None) or ()
    return tuple(dict.fromkeys(token for token in (first, *more) if token is not None and token >= 0))


class EndsOfDrafts:
    """Rejects drafts that are an end token, and so all drafts after them.

    If the draft was right, the step samples the same token in its place, and the answer ends there. KV, states and log-probs of the drafts
    after it go as those of any rejected draft.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._on_device: torch.Tensor | None = None

    def reject(self, drafts: torch.Tensor, ends: list[tuple[int, ...]]) -> None:
        """Set drafts that are an end token to -1. Does not wait for the device.

        Args:
            drafts: (rows, drafts) integer, on the device. Is changed.
            ends: For each row: the request's end tokens.
        """
        if not any(ends):
            return
        tokens = self._ends(ends, drafts.device)
        is_end = drafts == tokens if tokens.shape[1] == 1 else (drafts[:, :, None] == tokens[:, None, :]).any(dim=-1)
        drafts.masked_fill_(is_end, -1)

    def _ends(self, ends: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
        """(rows, most end tokens of a row), filled with -1."""
        if self._on_device is None or self._rows != ends:  # as a rule rows stay the same for many steps
            most = max(map(len, ends))
            padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in ends], dtype=torch.int64)
            self._on_device = padded.pin_memory().to(device, non_blocking=True)
            self._rows = ends
        return self._on_device
