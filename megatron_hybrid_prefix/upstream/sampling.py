"""`QueuedSampling`: megatron's sampling with PyTorch, queued on the device without waiting for it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from megatron.core.inference.sampling.torch_sampling import TorchSampling


class QueuedSampling(TorchSampling):
    """Draws what megatron's draws, by the same generator.

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
        if len(groups) != 1 and token_to_request_index is not None:
            where = {"gather_indices": gather_indices, "token_to_request_index": token_to_request_index}
            return super().sample_kernel(logits, n, context, output=output, **where, **flags)
        logits = logits[:n] if gather_indices is None else logits[gather_indices[:n], :]
        if output is None:
            output = torch.empty(n, device=logits.device, dtype=torch.int64)
        for parameters, rows in groups.items():
            if len(groups) == 1:
                output.copy_(self._sampled(logits, *parameters))
            else:
                numbers = torch.tensor(rows).to(
                    logits.device, non_blocking=True
                )  # so few bytes the driver reads at once
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
