"""`StateMemory`: the recurrent states and rings of a context on the device, and the steps that address them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hybrid_prefix.layers.base import KINDS
from megatron_hybrid_prefix.layers.step import ChunkGrid, DecodeStep, PrefillStep
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.ops.triton_or_torch import ids_on_device
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.pool.slots import NO_SLOT

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.state.layout import ModelStates
    from megatron_hybrid_prefix.pool.layout import SlotLayout, StateLayout

_FIELDS = tuple(RingRows.__annotations__)
_SLOTS, _RINGS, _KEPT = map(_FIELDS.index, ("slots", "rings", "kept"))


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
    """The states of running requests and checkpoints, and the rings of running requests.

    Args:
        states: The model's states.
        memory: Where they are.
        max_requests: Maximum of running requests.
        live_states: Whether the cache gives slots to running requests. Otherwise each has one of the memory's own slots.
        block_tokens: Tokens per KV block.
        max_tokens: Maximum tokens of a step.
        step_tokens: Of a row that decodes.

    Attributes:
        layers: States of each recurrent layer of this stage by component name: (rows, *shape).
        checkpoints: What checkpoints have of each layer: the parts of each component (`SharedMemory.parts`), (1, rows, *shape).
        rings: The same of their rings: (max_requests, *shape).
        live: Slots of running requests.
        step: What the next step prefills.
        decodes: What it decodes.
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
        step_tokens: int = 1,
    ) -> None:
        self.memory, self._kinds = memory, states.kind_of_layer
        # Where the cache gives slots, all rows without a request use one slot: what they write there is never read.
        self.live = LiveSlots([0] * max_requests if live_states else range(max_requests), memory.row)
        device = memory.buffer.device
        rings = memory.ring_layout
        self.step = PrefillStep(
            quanta=states.quanta,
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            max_sequences=max_requests,
            device=device,
            is_open=rings.is_open,
            encodes=memory.encodes,
        )
        quanta = sorted({quantum.numerator for quantum in states.quanta}) if rings.is_open else ()
        grids = [ChunkGrid(chunk_tokens=quantum, block_tokens=block_tokens) for quantum in quanta]
        of_rows = {"max_requests": max_requests, "step_tokens": step_tokens}
        self.decodes = DecodeStep(rings.tokens, device=device, grids=grids, **of_rows)
        # Views are made once: every layer needs them in every step.
        self.layers, self.rings = (
            [self._views(tensors, layouts, number) for number in range(len(self._kinds))]
            for tensors, layouts in ((memory.states, states.slots.kinds), (memory.rings, memory.ring_layout.kinds))
        )
        self.checkpoints = [
            {name: [part[number : number + 1] for part in memory.parts(name)] for name in own}
            for number, own in zip(map(self._of_kind, range(len(self._kinds))), self.layers, strict=True)
        ]
        self._flushes = [
            _FlushedKind(kind.kind, memory, states.slots, max_requests) for kind in states.slots.kinds if kind.layers
        ]

    def _views(
        self, tensors: dict[str, torch.Tensor], layouts: Sequence[StateLayout], number: int
    ) -> dict[str, torch.Tensor]:
        """Those of a recurrent layer, by its number."""
        return {name: tensors[name][self._of_kind(number)] for name in _names(layouts, self._kinds[number])}

    def _of_kind(self, number: int) -> int:
        """Which layer of its kind a recurrent layer is."""
        return self._kinds[:number].count(self._kinds[number])

    def flush(self, live_indices: Sequence[int], ends: Sequence[int], kept: Sequence[int]) -> None:
        """Live states advance to ``ends``, in tokens of their requests, and are written to slots ``kept``, too, unless those are negative."""
        slots, encodes = [self.live.slot(index) for index in live_indices], self.memory.encodes
        rows, origins = [*map(self.memory.row, slots)], self.decodes.advance(live_indices, ends)
        targets = [NO_SLOT if slot < 0 or encodes else self.memory.row(slot) for slot in kept]
        self._flush(rows, live_indices, ends, origins, ends, targets)
        if encodes and max(kept) >= 0:
            self.memory.keep(slots, kept)

    def compile_flush(self) -> None:
        """Launch the kernels of `flush` for nothing, so that none is compiled while requests wait; and those between live states and checkpoints."""
        self._flush(*[[NO_SLOT]] * len(_FIELDS))
        for copy in (self.memory.keep, self.memory.restore) if self.memory.encodes else ():
            copy([NO_SLOT], [NO_SLOT])

    def _flush(self, *fields: Sequence[int]) -> None:
        """One launch for each component of a kind's states, whatever the number of layers."""
        rows = np.array(fields)
        # An even number: each field is aligned as Triton's specialisation looks at it, and one kernel compiled for all.
        rows = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)), constant_values=NO_SLOT)
        tables = [table for kind in self._flushes for table in kind.tables(rows)]
        if not tables:  # of a pipeline stage without recurrent layers
            return
        numbers = ids_on_device(np.concatenate(tables, axis=None).tolist(), self.memory.buffer.device)
        parts = iter(numbers.split([table.size for table in tables]))
        for kind in self._flushes:
            kind.launch(parts)


def _names(layouts: Sequence[StateLayout], kind: str) -> list[str]:
    """Of the components of a kind."""
    return [component.name for layout in layouts if layout.kind == kind for component in layout.components]


class _FlushedKind:
    """All layers of a kind for `LayerKind.flush`: a state, or a ring, of any layer is one of many in one tensor.

    Args:
        kind: Its name.
        memory: The states and rings.
        slots: The states of the model.
        max_requests: Rings of a layer.
    """

    def __init__(self, kind: str, memory: SharedMemory, slots: SlotLayout, max_requests: int) -> None:
        self._kind, self._max_requests = KINDS[kind], max_requests
        self._rings = {name: memory.rings[name].flatten(0, 1) for name in _names(memory.ring_layout.kinds, kind)}
        self._states: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, int, int]] = {}
        for name in _names(slots.kinds, kind):
            tensor = memory.states[name]
            (layers, rows, *shape), (of_layer, of_row, *strides) = tensor.shape, tensor.stride()
            unit = math.gcd(of_layer, of_row)  # between places, which overlap
            last = ((layers - 1) * of_layer + (rows - 1) * of_row) // unit
            self._states[name] = tensor.as_strided((last + 1, *shape), (unit, *strides))
            self._places[name] = layers, of_layer // unit, of_row // unit

    def tables(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """(fields, layers x rows) of each component, from fields of rows of one layer, those of `RingRows`."""
        for layers, of_layer, of_row in self._places.values():
            table, layer = np.repeat(rows[:, None], layers, 1), np.arange(layers)[:, None]
            for slots in (table[_SLOTS], table[_KEPT]):
                slots[:] = np.where(slots < 0, NO_SLOT, slots * of_row + layer * of_layer)
            table[_RINGS] += layer * self._max_requests
            yield table

    def launch(self, parts: Iterator[torch.Tensor]) -> None:
        """``parts``: the tables, on the device, flat."""
        rows = {name: RingRows(*next(parts).view(len(_FIELDS), -1)) for name in self._states}
        self._kind.flush(self._states, self._rings, rows)
