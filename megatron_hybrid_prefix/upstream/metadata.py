"""Megatron's metadata of a step's Mamba layers; it also tells the context what the step prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaMetadata

if TYPE_CHECKING:
    from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions


class PrefillListener(Protocol):
    """Gets called for each step: the context."""

    def live_rows(self, live_indices: torch.Tensor) -> torch.Tensor:
        """Where in the tensors of states those with these live indices are."""

    def prepare_prefill(self, sequences: int, *, padded_tokens: int, padded_sequences: int) -> None:
        """The next step prefills the last ``sequences`` active rows. The sizes include padding."""

    def show_prefill(self) -> None:
        """The prepared step runs now."""


class StateMetadata(MambaMetadata):
    """Megatron's metadata. Its live indices per row and its decode are used; decodes address states by row.

    Its chunks, and its extraction of states inside a prefill, are not used: `PrefillStep` replaces them.

    Args:
        context: Called for each step (``live_rows``), and for each that prefills (``prepare_prefill``, ``show_prefill``).
        **fields: Megatron's arguments.
    """

    def __init__(self, context: PrefillListener, **fields: Any) -> None:
        super().__init__(max_intermediate_count=0, **fields)
        self._context = context

    def compute_cpu_metadata(
        self,
        active_mamba_indices: torch.Tensor,
        *args: Any,
        batch_dimensions: InferenceBatchDimensions,
        padded_batch_dimensions: InferenceBatchDimensions,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See upstream."""
        result: dict[str, Any] = super().compute_cpu_metadata(
            self._context.live_rows(active_mamba_indices),
            *args,
            batch_dimensions=batch_dimensions,
            padded_batch_dimensions=padded_batch_dimensions,
            **kwargs,
        )
        if padded_batch_dimensions.prefill_req_count:
            self._context.prepare_prefill(
                batch_dimensions.prefill_req_count,
                padded_tokens=padded_batch_dimensions.token_count,
                padded_sequences=padded_batch_dimensions.prefill_req_count,
            )
        return result

    def load_from_cpu(self, d: dict[str, Any]) -> None:
        """See upstream."""
        super().load_from_cpu(d)
        if d["padded_prefill_count"]:
            self._context.show_prefill()

    @property
    def intermediate_chunk_indices(self) -> None:
        """Only megatron's own prefill reads it. That prefill ignores slots, so this raises before it computes wrong tokens.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the model's Mamba mixers do not read states by slot: call use_slot_mixers(model)")

    @intermediate_chunk_indices.setter
    def intermediate_chunk_indices(self, value: Any) -> None:
        """Megatron resets it every step."""

    def _update_intermediate_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: megatron's extraction of intermediate states is not used."""
