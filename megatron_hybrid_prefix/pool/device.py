"""`StatePool`: the memory of recurrent states, live ones and checkpoints alike, one tensor per component.

Slot ids: ``[0, live_slots)`` are the states of running requests (the engine's ids), checkpoints follow. A forward may
so read a sequence's initial state from any slot, and write to any slot, without a copy between two pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_hybrid_prefix.ops.slot_copies import copy_slots, ids_on_device
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateLayout


class StatePool:
    """Uninitialised memory for ``live_slots + checkpoint_slots`` states.

    Args:
        layout: What a slot holds: the states of one kind of layers, or of several.
        live_slots: Slots of running requests.
        checkpoint_slots: Slots of kept states.
        device: Where.

    Attributes:
        tensors: By component name, (layers of its kind, slots, *component shape).
    """

    def __init__(
        self,
        layout: StateLayout | SlotLayout,
        *,
        live_slots: int,
        checkpoint_slots: int,
        device: torch.device | int | str,
    ) -> None:
        self.layout = SlotLayout((layout,)) if isinstance(layout, StateLayout) else layout
        self.live_slots = live_slots
        self.checkpoint_slots = checkpoint_slots
        self.tensors: dict[str, torch.Tensor] = {
            component.name: torch.empty(
                (of_kind.layers, live_slots + checkpoint_slots, *component.shape),
                dtype=getattr(torch, component.dtype),
                device=device,
            )
            for of_kind, component in self.layout
        }

    def zero(self, slots: Sequence[int]) -> None:
        """Sets the states in ``slots`` to zero, the state before the first token.

        Raises:
            ValueError: There is no such slot; nothing is written.
        """
        self._check(slots)
        on_device = self._on_device(slots)
        for tensor in self.tensors.values():
            tensor[:, on_device] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies states bit by bit.

        Raises:
            ValueError: There is no such slot, or no source to a target, or two of them, or a target is the source of
                another copy; nothing is written.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        if len(set(targets)) < len(targets):
            raise ValueError(f"targets {list(targets)}: one slot twice")
        self._check(sources)
        self._check(targets)
        overwritten = {source for source, target in zip(sources, targets, strict=True) if source != target}
        if overwritten & set(targets):
            raise ValueError(f"slots {sorted(overwritten & set(targets))} are both copied and written")
        source_slots, target_slots = self._on_device(sources), self._on_device(targets)
        for tensor in self.tensors.values():
            copy_slots(tensor, tensor, source_slots, target_slots)

    def copy_from(self, others: Mapping[str, torch.Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies states of another memory into slots, bit by bit.

        Args:
            others: By component name, (layers, states, *component shape).
            sources: Which of those states.
            targets: Slots.

        Raises:
            ValueError: There is no such slot or state, or no source to a target, or two of them; nothing is written.
        """
        if len(sources) != len(targets) or len(set(targets)) < len(targets):
            raise ValueError(f"sources {list(sources)} and targets {list(targets)}: not one to each")
        self._check(targets)
        for name in self.tensors:
            if not all(0 <= source < others[name].shape[1] for source in sources):
                raise ValueError(f"states {list(sources)}: there are {others[name].shape[1]} of component {name!r}")
        source_slots, target_slots = self._on_device(sources), self._on_device(targets)
        for name, tensor in self.tensors.items():
            copy_slots(others[name], tensor, source_slots, target_slots)

    def _on_device(self, slots: Sequence[int]) -> torch.Tensor:
        return ids_on_device(slots, next(iter(self.tensors.values())).device)

    def _check(self, slots: Sequence[int]) -> None:
        # As an index, -1 ("no slot") would silently mean the last one.
        for slot in slots:
            if not 0 <= slot < self.live_slots + self.checkpoint_slots:
                raise ValueError(f"slot {slot} is none of {self.live_slots} live and {self.checkpoint_slots} others")
