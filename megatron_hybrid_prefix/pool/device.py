"""`StateSlots`: the recurrent states by slot, live states and checkpoints in one tensor per component.

So a forward reads a sequence's initial state from any slot, and writes to any slot, without a copy between two pools.
`StatePool` has memory of fixed sizes: slots ``[0, live_slots)`` hold the states of running requests, checkpoint slots follow.
In a `SharedMemory` (``shared_memory.py``) the slots lie among KV blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_hybrid_prefix.ops.slot_copies import copy_slots, ids_on_device
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateLayout


class StateSlots:
    """Slots of recurrent states: operations on whole slots.

    Args:
        layout: What a slot holds.
        tensors: By component name, (layers of its kind, slots, *component shape), strided over layers and slots.

    Attributes:
        layout: See Args.
        tensors: See Args.
        total_slots: Number of slots.
    """

    def __init__(self, layout: SlotLayout, tensors: dict[str, torch.Tensor]) -> None:
        self.layout, self.tensors = layout, tensors
        self.total_slots = next(iter(tensors.values())).shape[1]

    def zero(self, slots: Sequence[int]) -> None:
        """Zero the states in ``slots``: zero is the state before the first token.

        Raises:
            ValueError: A slot does not exist. Nothing is written.
        """
        self._check(slots)
        on_device = self._on_device(slots)
        for tensor in self.tensors.values():
            tensor[:, on_device] = tensor.new_zeros(())  # a number would be sent to the GPU, and waited for

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states bit by bit, from ``sources[i]`` to ``targets[i]``.

        Raises:
            ValueError: A slot does not exist, the lengths differ, a target occurs twice, or a target is the source of
                another copy. Nothing is written.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        if len(set(targets)) < len(targets):
            raise ValueError(f"targets {list(targets)}: a slot occurs twice")
        self._check(sources)
        self._check(targets)
        overwritten = {source for source, target in zip(sources, targets, strict=True) if source != target}
        if overwritten & set(targets):
            raise ValueError(f"slots {sorted(overwritten & set(targets))} are both copied and written")
        source_slots, target_slots = self._on_device(sources), self._on_device(targets)
        for tensor in self.tensors.values():
            copy_slots(tensor, tensor, source_slots, target_slots)

    def copy_from(self, others: Mapping[str, torch.Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states of other tensors into slots, bit by bit.

        Args:
            others: By component name, (layers, states, *component shape).
            sources: Indices of the states in ``others``.
            targets: Slots, one for each source.

        Raises:
            ValueError: A slot or state does not exist, the lengths differ, or a target occurs twice. Nothing is written.
        """
        if len(sources) != len(targets) or len(set(targets)) < len(targets):
            raise ValueError(
                f"sources {list(sources)} and targets {list(targets)}: must be as many, and no target twice"
            )
        self._check(targets)
        for name in self.tensors:
            if not all(0 <= source < others[name].shape[1] for source in sources):
                raise ValueError(f"states {list(sources)}: component {name!r} has {others[name].shape[1]}")
        source_slots, target_slots = self._on_device(sources), self._on_device(targets)
        for name, tensor in self.tensors.items():
            copy_slots(others[name], tensor, source_slots, target_slots)

    def _on_device(self, slots: Sequence[int]) -> torch.Tensor:
        return ids_on_device(slots, next(iter(self.tensors.values())).device)

    def _check(self, slots: Sequence[int]) -> None:
        # Torch would take -1 (NO_SLOT) as the last slot.
        for slot in slots:
            if not 0 <= slot < self.total_slots:
                raise ValueError(f"slot {slot} does not exist: there are {self.total_slots}")


class StatePool(StateSlots):
    """Uninitialised memory for ``live_slots + checkpoint_slots`` states.

    Args:
        layout: What a slot holds: the states of one kind of layers, or of several.
        live_slots: Slots of running requests.
        checkpoint_slots: Slots of checkpoints.
        device: Device of the tensors.
    """

    def __init__(
        self,
        layout: StateLayout | SlotLayout,
        *,
        live_slots: int,
        checkpoint_slots: int,
        device: torch.device | int | str,
    ) -> None:
        layout = SlotLayout((layout,)) if isinstance(layout, StateLayout) else layout
        self.live_slots = live_slots
        self.checkpoint_slots = checkpoint_slots
        tensors = {
            component.name: torch.empty(
                (of_kind.layers, live_slots + checkpoint_slots, *component.shape),
                dtype=getattr(torch, component.dtype),
                device=device,
            )
            for of_kind, component in layout
        }
        super().__init__(layout, tensors)
