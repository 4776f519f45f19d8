"""`StateMemory`: the recurrent states of a context on the device, and the `PrefillStep` that addresses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.state.layout import ModelStates


class LiveSlots:
    """Which slot holds the state of a running request.

    Megatron numbers the running requests: the *live index* of a request, below ``max_requests``, stays the same while its row
    moves. The cache gives a request a slot when it is admitted. Or the engine has slots of its own: then the index is the slot.

    Args:
        home_slots: For each live index, the slot that it has without a request, and with a request that got none.
        row_of: Row of a slot in the tensors of states (`SharedMemory.row`).
    """

    def __init__(self, home_slots: Sequence[int], row_of: Callable[[int], int]) -> None:
        self._row_of = row_of
        # Slots, and their rows. The last column is that of index -1.
        self._home = torch.tensor([[*home_slots, -1], [*map(row_of, home_slots), -1]], dtype=torch.int64)
        self._now = self._home.clone()
        self._slots, self._rows = self._now

    def rows(self, live_indices: torch.Tensor) -> torch.Tensor:
        """(rows,) int64 on the CPU: where the states with these live indices are; -1 (no request) stays -1."""
        return self._rows[live_indices.long()]

    def slot(self, live_index: int) -> int:
        """The slot of a live index."""
        return int(self._slots[live_index])

    def bind(self, live_index: int, slot: int | None) -> None:
        """A request was admitted. ``slot``: what the cache gave it, or None."""
        if slot is not None:
            self._slots[live_index], self._rows[live_index] = slot, self._row_of(slot)

    def release(self, live_indices: torch.Tensor) -> None:
        """The requests with these live indices end."""
        ended = live_indices.long()
        self._now[:, ended] = self._home[:, ended]

    def reset(self) -> None:
        """All requests end."""
        self._now.copy_(self._home)


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
        layers: States of each recurrent layer of this stage by component name: (rows, *shape).
        drafted_layers: The same of the states after each drafted token: (rows, drafts + 1, *shape).
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
        kinds, layouts = states.kind_of_layer, {layout.kind: layout for layout in states.slots.kinds}
        places = [(layouts[kind], kinds[:number].count(kind)) for number, kind in enumerate(kinds)]
        self.layers, self.drafted_layers = (
            [
                {each.name: tensors[each.name][layer] for each in layout.components}
                for layout, layer in places
                if tensors
            ]
            for tensors in (memory.states, memory.drafted)
        )

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
