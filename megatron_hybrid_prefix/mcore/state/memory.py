"""`StateMemory`: the recurrent states of a context on the device, and the `PrefillStep` that addresses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.mcore.state.live_slots import LiveSlots
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.state.layout import ModelStates


class StateMemory:
    """The states of running requests and checkpoints, and the states after each drafted token.

    Args:
        states: The model's states.
        memory: Where they are.
        max_requests: Maximum of running requests.
        live_states: Whether the cache gives slots to running requests. Otherwise each has one of the memory's own slots.
        block_tokens: Tokens per KV block.
        max_tokens: Maximum tokens of a step.

    Attributes:
        memory: See Args.
        live: Slots of running requests.
        step: What the next step prefills.
    """

    def __init__(
        self,
        states: ModelStates,
        memory: SharedMemory,
        *,
        max_requests: int,
        live_states: bool,
        block_tokens: int,
        max_tokens: int,
    ) -> None:
        self.memory = memory
        # Where the cache gives slots, all rows without a request use one slot: what they write there is never read.
        self.live = LiveSlots([0] * max_requests if live_states else range(max_requests), memory.row)
        self.step = PrefillStep(
            quanta=states.quanta,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=max_requests,
            device=memory.buffer.device,
        )
        # Views are made once: every layer needs them in every step.
        self._of_layer, self._drafted_of_layer = (
            [] if not tensors else [self._views(states, tensors, number) for number in range(len(states.kind_of_layer))]
            for tensors in (memory.states, memory.drafted)
        )

    def of_layer(self, recurrent_layer: int, *, drafted: bool = False) -> dict[str, torch.Tensor]:
        """States of one recurrent layer of this stage, by component name: (rows, *shape).

        Args:
            recurrent_layer: Number of the recurrent layer on this stage, from 0.
            drafted: Return the states after each drafted token instead, (rows, drafts + 1, *shape).
        """
        return (self._drafted_of_layer if drafted else self._of_layer)[recurrent_layer]

    @staticmethod
    def _views(states: ModelStates, tensors: dict[str, torch.Tensor], recurrent_layer: int) -> dict[str, torch.Tensor]:
        layout, layer = states.place(recurrent_layer)
        return {component.name: tensors[component.name][layer] for component in layout.components}

    def roll_back(self, rows: torch.Tensor, forward_tokens: torch.Tensor) -> None:
        """Live states become those after a token of the last forward.

        Args:
            rows: (requests,) integer on the device: rows of the live states; negative: nothing.
            forward_tokens: (requests,) integer on the device: which token, from 0.
        """
        rows = rows.long()
        self.memory.copy_rows(torch.where(rows < 0, rows, self.memory.row_after(rows, forward_tokens)), rows)

    def copy_decoded(self, targets: list[int], live_slots: list[int], forward_tokens: list[int]) -> None:
        """Copy states of decoding requests to checkpoint slots.

        Args:
            targets: Checkpoint slots.
            live_slots: Live slots of the requests.
            forward_tokens: For each state: the token of the last forward, from 0, that it follows. Used with drafts only.
        """
        rows = [self.memory.row(slot) for slot in live_slots]
        if self.memory.drafted:
            # The live state follows the last accepted token; `drafted` has the states after each token.
            rows = [self.memory.row_after(row, token) for row, token in zip(rows, forward_tokens, strict=True)]
        self.memory.copy(rows, targets)
