"""`StateMemory`: the recurrent states of a context on the device, and the `PrefillStep` that addresses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.pool.device import StatePool

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.state.layout import ModelStates


class StateMemory:
    """Live states and checkpoints in one tensor per component, and the states after each drafted token.

    Args:
        states: The model's states.
        live_slots: Maximum of running requests.
        checkpoint_slots: Slots of the cache.
        drafts: Tokens drafted for speculative decoding.
        block_tokens: Tokens per KV block.
        max_tokens: Maximum tokens of a step.
        device: Device of the model.

    Raises:
        ValueError: ``drafts`` is above 0 and a layer kind does not support speculative decoding.

    Attributes:
        pool: The slots: live slots, then checkpoints.
        step: What the next step prefills.
        drafted: By component name, (layers, live slots, drafts + 1, *shape): states after each token of the last forward;
            empty without drafts.
    """

    def __init__(
        self,
        states: ModelStates,
        *,
        live_slots: int,
        checkpoint_slots: int,
        drafts: int,
        block_tokens: int,
        max_tokens: int,
        device: torch.device | int,
    ) -> None:
        if drafts and states.without_drafts:
            raise ValueError(
                f"num_speculative_tokens={drafts}: layers of kind {', '.join(states.without_drafts)} do not support "
                "speculative decoding"
            )
        self.pool = StatePool(states.slots, live_slots=live_slots, checkpoint_slots=checkpoint_slots, device=device)
        self.step = PrefillStep(
            quanta=states.quanta,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=live_slots,
            device=device,
        )
        self.drafted: dict[str, torch.Tensor] = {}
        if drafts:
            for layout, component in states.slots:
                shape = (layout.layers, live_slots, drafts + 1, *component.shape)
                dtype = getattr(torch, component.dtype)
                self.drafted[component.name] = torch.empty(shape, dtype=dtype, device=device)
        # Views are made once: every layer needs them in every step.
        self._of_layer, self._drafted_of_layer = (
            [] if not tensors else [self._views(states, tensors, number) for number in range(len(states.kind_of_layer))]
            for tensors in (self.pool.tensors, self.drafted)
        )

    def of_layer(self, recurrent_layer: int, *, drafted: bool = False) -> dict[str, torch.Tensor]:
        """States of one recurrent layer of this stage, by component name: (slots, *shape).

        Args:
            recurrent_layer: Number of the recurrent layer on this stage, from 0.
            drafted: Return the states after each drafted token instead, (live slots, drafts + 1, *shape).
        """
        return (self._drafted_of_layer if drafted else self._of_layer)[recurrent_layer]

    @staticmethod
    def _views(states: ModelStates, tensors: dict[str, torch.Tensor], recurrent_layer: int) -> dict[str, torch.Tensor]:
        layout, layer = states.place(recurrent_layer)
        return {component.name: tensors[component.name][layer] for component in layout.components}

    def roll_back(self, live_slots: torch.Tensor, forward_tokens: torch.Tensor) -> None:
        """Live states become those after a token of the last forward.

        Args:
            live_slots: (rows,) int64 on the device; negative: nothing.
            forward_tokens: (rows,) integer on the device: which token, from 0.
        """
        width = next(iter(self.drafted.values())).shape[2]
        live_slots = live_slots.long()
        sources = live_slots * width + forward_tokens  # negative where the slot is
        for name, after in self.drafted.items():
            copy_slots(after.flatten(1, 2), self.pool.tensors[name], sources, live_slots)

    def copy_decoded(self, targets: list[int], live_slots: list[int], forward_tokens: list[int]) -> None:
        """Copy states of decoding requests to checkpoint slots.

        Args:
            targets: Checkpoint slots.
            live_slots: Live slots of the requests.
            forward_tokens: For each state: the token of the last forward, from 0, that it follows. Used with drafts only.
        """
        if not self.drafted:
            self.pool.copy(live_slots, targets)
            return
        # The live state follows the last accepted token; `drafted` has the states after each token.
        width = next(iter(self.drafted.values())).shape[2]
        sources = [slot * width + token for slot, token in zip(live_slots, forward_tokens, strict=True)]
        self.pool.copy_from({name: t.flatten(1, 2) for name, t in self.drafted.items()}, sources, targets)
