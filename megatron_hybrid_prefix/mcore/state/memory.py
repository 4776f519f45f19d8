"""`StateMemory`: the recurrent states of a context on the device, and the `PrefillStep` that addresses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.mcore.state.live_slots import LiveSlots
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.pool.device import StatePool, StateSlots
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

_Ints = TypeVar("_Ints", int, torch.Tensor)

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.state.layout import ModelStates


class StateMemory:
    """The states of running requests and checkpoints, and the states after each drafted token.

    With ``shared`` the slots lie in that memory. The cache gives slots to running requests. With drafts, each running request
    has slots that are set aside for it instead: for its state, and after that for its states after each token::

        | pages | state of live index 0, 1, .. | after the first token, live index 0, 1, .. | after the second | ..

    Args:
        states: The model's states.
        max_requests: Maximum of running requests.
        checkpoint_slots: Slots of the cache; not used with ``shared``.
        drafts: Tokens drafted for speculative decoding.
        block_tokens: Tokens per KV block.
        max_tokens: Maximum tokens of a step.
        device: Device of the model.
        shared: The memory that states share with KV blocks, with `own_slots` slots of the engine; None: tensors of their own.

    Raises:
        ValueError: ``drafts`` is above 0 and a layer kind does not support speculative decoding.

    Attributes:
        pool: The slots.
        live: Slots of running requests.
        step: What the next step prefills.
        drafted: By component name, (layers, slots, drafts + 1, *shape): at a request's slot, its states after each token of
            the last forward; empty without drafts.
    """

    def __init__(
        self,
        states: ModelStates,
        *,
        max_requests: int,
        checkpoint_slots: int,
        drafts: int,
        block_tokens: int,
        max_tokens: int,
        device: torch.device | int,
        shared: SharedMemory | None = None,
    ) -> None:
        if drafts and states.without_drafts:
            raise ValueError(
                f"num_speculative_tokens={drafts}: layers of kind {', '.join(states.without_drafts)} do not support "
                "speculative decoding"
            )
        self.pool: StateSlots
        if shared is None:
            self.pool = StatePool(
                states.slots, live_slots=max_requests, checkpoint_slots=checkpoint_slots, device=device
            )
            self.live = LiveSlots(range(max_requests))
        else:
            self.pool = shared.states
            # Without drafts, all rows without a request use one slot: what they write there is never read.
            self.live = LiveSlots(range(max_requests) if drafts else [0] * max_requests)
        self.step = PrefillStep(
            quanta=states.quanta,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=max_requests,
            device=device,
        )
        self.drafted: dict[str, torch.Tensor] = {}
        # The state after token t of the request in slot s is in slot t * a + s * b + c of `_after`.
        self._after: dict[str, torch.Tensor] = {}
        self._place_of_draft = (1, drafts + 1, 0) if shared is None else (max_requests, 1, max_requests)
        if drafts and shared is None:
            for layout, component in states.slots:
                shape = (layout.layers, max_requests, drafts + 1, *component.shape)
                dtype = getattr(torch, component.dtype)
                drafted = self.drafted[component.name] = torch.empty(shape, dtype=dtype, device=device)
                self._after[component.name] = drafted.flatten(1, 2)
        elif drafts:
            self._after = self.pool.tensors
            self.drafted = {name: _drafted(part, max_requests, drafts) for name, part in self._after.items()}
        # Views are made once: every layer needs them in every step.
        self._of_layer, self._drafted_of_layer = (
            [] if not tensors else [self._views(states, tensors, number) for number in range(len(states.kind_of_layer))]
            for tensors in (self.pool.tensors, self.drafted)
        )

    def of_layer(self, recurrent_layer: int, *, drafted: bool = False) -> dict[str, torch.Tensor]:
        """States of one recurrent layer of this stage, by component name: (slots, *shape).

        Args:
            recurrent_layer: Number of the recurrent layer on this stage, from 0.
            drafted: Return the states after each drafted token instead, (slots, drafts + 1, *shape).
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
        live_slots = live_slots.long()
        sources = torch.where(live_slots < 0, live_slots, self._places(live_slots, forward_tokens))
        for name, after in self._after.items():
            copy_slots(after, self.pool.tensors[name], sources, live_slots)

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
        sources = [self._places(slot, token) for slot, token in zip(live_slots, forward_tokens, strict=True)]
        self.pool.copy_from(self._after, sources, targets)

    def _places(self, slots: _Ints, tokens: _Ints) -> _Ints:
        of_token, of_slot, first = self._place_of_draft
        return tokens * of_token + slots * of_slot + first


def own_slots(*, max_requests: int, drafts: int) -> int:
    """Slots of a `SharedMemory` that its `StateMemory` keeps for itself."""
    return max_requests * (drafts + 2) if drafts else 1


def _drafted(states: torch.Tensor, max_requests: int, drafts: int) -> torch.Tensor:
    """(layers, slots, drafts + 1, *shape) over (layers, slots, *shape): at [:, s, t], slot s + max_requests * (t + 1)."""
    layer, slot, *inner = states.stride()
    layers, slots, *shape = states.shape
    return states.as_strided(
        (layers, slots - max_requests * (drafts + 1), drafts + 1, *shape),
        (layer, slot, max_requests * slot, *inner),
        states.storage_offset() + max_requests * slot,
    )
