"""`SlotLayer`: dynamic inference by slots for recurrent layers that megatron's engine cannot run itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from megatron_hybrid_prefix.layers.step import Parts, PrefillStep
from megatron_hybrid_prefix.layers.whole import whole_sequences
from megatron_hybrid_prefix.ops.rings import RingRows, keep_last, take_last
from megatron_hybrid_prefix.upstream.mixer import merge_rows, rows_after, rows_of_step


class SlotLayer:
    """Mixin before the class of a recurrent layer; the base of a `LayerKind`'s ``slot_class``.

    The layer is called as megatron calls its mixers: ``layer(hidden_states, inference_context=...)`` gives its output and a
    bias or None. In a step of an engine of this package it decodes the first rows, prefills the others, and puts both
    together; in a trainer's forward with a step's bits (`invariant_forward`) it prefills all; anywhere else it runs its own ``forward``.

    Attributes:
        slot_layer_number: Number of the layer on this pipeline stage, from 1; set by `use_slot_mixers`.
    """

    slot_layer_number: int

    def forward(self, hidden_states: torch.Tensor, *args: Any, inference_context: Any = None, **kwargs: Any) -> Any:
        """In a step of an engine of this package states are read and written by slot; see the class.

        Args:
            hidden_states: (tokens, 1, hidden), packed, decoded tokens first.
            *args: Of the layer's own ``forward``.
            inference_context: The engine's context.
            **kwargs: As ``args``.
        """
        step: PrefillStep | None = getattr(inference_context, "prefill_step", None)
        if (whole := whole_sequences(inference_context)) is not None:
            return whole.run(self, hidden_states, self._prefill)
        if step is None:
            # The class after this mixin has it.
            return super().forward(  # type: ignore[misc]
                hidden_states, *args, inference_context=inference_context, **kwargs
            )
        rows, states = rows_of_step(inference_context), inference_context.states_of_layer(self.slot_layer_number)
        ring = inference_context.ring_of_layer(self.slot_layer_number)
        inputs = self.slot_inputs(hidden_states)
        decoded = prefilled = None
        if rows.decodes:
            first = inputs[: rows.decodes * rows.decode_tokens].view(rows.decodes, rows.decode_tokens, -1)
            decoded = self.slot_decode_rows(first, states, ring, inference_context.decode_rows)
            decoded = decoded.flatten(0, 1).unsqueeze(1)
        if rows.prefills:
            later = rows_after(inputs, rows.counts) if rows.decodes else inputs
            both, kept = {**states, **ring} if step.is_open else states, states
            if step.encodes:
                kept = step.begin(states, inference_context.checkpoints_of_layer(self.slot_layer_number))
            prefilled = self.slot_prefill(later.squeeze(1), both, kept, step).unsqueeze(1)
            if step.encodes:
                step.keep(kept)
        if decoded is None or prefilled is None:
            return self.slot_outputs(prefilled if decoded is None else decoded)
        return self.slot_outputs(merge_rows(decoded, prefilled, rows.counts, rows.tokens))

    def _prefill(self, hidden_states: torch.Tensor, states: Parts, step: PrefillStep) -> Any:
        """All of it, of a step that leaves nothing open."""
        inputs = self.slot_inputs(hidden_states).squeeze(1)
        return self.slot_outputs(self.slot_prefill(inputs, states, states, step).unsqueeze(1))

    def supports_split_output_projection(self) -> bool:
        """Megatron's main may run a layer in two parts, around its `forward`. This one is run as a whole."""
        return False

    def slot_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The recurrence's input of each token: (tokens, 1, width). By default the hidden states."""
        return hidden_states

    def slot_outputs(self, outputs: torch.Tensor | None) -> Any:
        """The layer's output: by default ``outputs``, (tokens, 1, width), and no bias."""
        return outputs, None

    def slot_decode(self, inputs: torch.Tensor, states: Parts, slots: torch.Tensor) -> torch.Tensor:
        """One token of each row; its state is read and written in place. For kinds without a ring of their own.

        Args:
            inputs: (rows, width).
            states: This layer's, by component name: ``(slots, *shape)``.
            slots: (rows,) int64, the live slot of each row; negative: the row is padding.

        Returns:
            (rows, width out); what rows of padding hold does not matter.
        """
        raise NotImplementedError

    def slot_decode_rows(self, inputs: torch.Tensor, states: Parts, ring: Parts, rows: RingRows) -> torch.Tensor:
        """The next token of each row, and its drafts; by default one `slot_decode` after another, for `LayerKind.ring` as it is there.

        Args:
            inputs: (rows, tokens, width).
            states: As for `slot_decode`.
            ring: This layer's, by component name: ``(rings, *shape)``.
            rows: Which slots and rings, and their positions.

        Returns:
            (rows, tokens, width out); what rows of padding hold does not matter.
        """
        for name, after in ring.items():
            take_last(states[name.removesuffix("_after")], after, rows)
        outputs = []
        for token in range(inputs.shape[1]):
            outputs.append(self.slot_decode(inputs[:, token], states, rows.slots))
            for name, after in ring.items():
                keep_last(states[name.removesuffix("_after")], after, rows, token)
        return torch.stack(outputs, dim=1)

    @abstractmethod
    def slot_prefill(self, inputs: torch.Tensor, states: Parts, kept: Parts, step: PrefillStep) -> torch.Tensor:
        """All sequences of the step. Sources are read before anything is written.

        Args:
            inputs: (tokens, width), packed; rows after the last sequence are padding.
            states: This layer's, by component name: ``(slots, *shape)``; and its rings, where the step leaves chunks open.
            kept: Where the states after chunks go, likewise: ``states``, or others if checkpoints are kept in another form.
            step: Where each sequence starts from, where its states go, and its chunks: those of the kind's quantum.

        Returns:
            (tokens, width out); finite in rows of padding.
        """
