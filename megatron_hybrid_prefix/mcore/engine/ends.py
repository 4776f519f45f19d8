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


class AcceptedDrafts:
    """Cuts the accepted drafts of requests at their first end token.

    An end token that is an accepted draft becomes the token that the step samples. (It is what the model sampled there, or
    the draft would not have been accepted.) The drafts after it are rejected, and so are their KV, states and log-probs.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._on_device: torch.Tensor | None = None

    def cut(self, tokens: torch.Tensor, accepted: torch.Tensor, ends: list[tuple[int, ...]]) -> torch.Tensor | None:
        """Reject drafts from the first end token on.

        Does not wait for the device.

        Args:
            tokens: (rows, drafts + 1) integer, on the device: the step's input; the first one of each row is no draft.
            accepted: (rows, drafts + 1) bool, on the device: True up to the last accepted draft. Is changed.
            ends: For each row: the request's end tokens.

        Returns:
            (rows,) int64, on the device: accepted tokens of each row, at least 1; None: no row has an end token.
        """
        if not any(ends):
            return None
        is_end = (tokens[:, 1:, None] == self._ends(ends, tokens.device)[:, None, :]).any(dim=-1)
        accepted[:, 1:].masked_fill_(is_end.cumsum(dim=1) > 0, False)
        return accepted.sum(dim=1)

    def _ends(self, ends: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
        """(rows, most end tokens of a row), filled with -1."""
        if self._on_device is None or self._rows != ends:  # as a rule rows stay the same for many steps
            most = max(map(len, ends))
            padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in ends], dtype=torch.int64)
            self._on_device = padded.pin_memory().to(device, non_blocking=True)
            self._rows = ends
        return self._on_device
