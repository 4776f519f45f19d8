"""`SharedMemory`: one buffer on the device for KV blocks and recurrent states, and the views of it.

`PageLayout` (``pages.py``) says which bytes belong to which block and slot. Here they become tensors::

    | engine's own slots | rings of running requests | page 0: block 0, 1, .. or slots | page 1 | .. | rest: blocks, dummy block |

The engine's own slots are never given to the cache: rows without a request use them.
After the last whole page there are only blocks, and the last of them is megatron's dummy block. So all of the budget but less
than one block is used.

KV blocks are block-major: a block of all attention layers is contiguous. So are states: all layers, component by component. Where checkpoints
are kept in fewer bytes they have components of their own, and a page has live states or checkpoints.
A state takes its own bytes, wherever it lies. Kernels find it by its *row*: the number of `ALIGNMENT_BYTES` before it. So
tensors of states have a row for each multiple of `ALIGNMENT_BYTES`, and rows overlap; `SharedMemory.row` gives that of a slot.
Without KV here, a row is a state, and equals its slot. The views never change, so addresses do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.ops.state_codes import keep_slots, restore_slots
from megatron_hybrid_prefix.ops.triton_or_torch import ids_on_device
from megatron_hybrid_prefix.pool.layout import CODES, RingLayout, SlotLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
from megatron_hybrid_prefix.support.arithmetic import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Shape of the KV of a block on this rank, as megatron's buffer has it.

    Attributes:
        before: Dimensions before the blocks: (2, attention layers), or (attention layers,) for a compressed KV cache.
        after: Dimensions after them: (tokens, heads, channels), or (tokens, width).
        dtype: Type of keys and values.
        routes: (tokens, layers with experts, experts of a token) behind them: which experts the tokens went through. Or nothing.
        routes_dtype: Type of the experts' numbers.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: torch.dtype
    routes: tuple[int, ...] = (0,)
    routes_dtype: torch.dtype = torch.int16

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values, aligned."""
        return round_up(math.prod(self.before) * math.prod(self.after) * self.dtype.itemsize, ALIGNMENT_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of a block, aligned."""
        return self.kv_bytes + round_up(math.prod(self.routes) * self.routes_dtype.itemsize, ALIGNMENT_BYTES)


def slot_bytes(layout: SlotLayout) -> int:
    """Bytes of a state, aligned; 0 on a pipeline stage without recurrent layers."""
    return sum(_component_bytes(layout))


class SharedMemory:
    """See the module. The memory is zeros at first: see `PageClear`.

    Args:
        slots: Content of a slot.
        own_slots: Slots before the pages that the engine keeps for itself.
        rings: What a request's rings are.
        requests: Maximum of running requests: each has rings.
        layout: Blocks and pages, as on all ranks; None: megatron has the KV, and there are only the engine's own slots.
        block: Shape of a block, with ``layout``.
        kept: Content of a checkpoint's slot, with ``layout.page_live``; None: as of ``slots``.
        device: Device of the buffer.

    Attributes:
        buffer: (bytes,) uint8.
        kv: (*block.before, blocks with the dummy block, *block.after); not without ``layout``.
        routes: (blocks with the dummy block, *block.routes); not without ``layout``. They are part of a block, so they go where it goes.
        states: Live states by component name, (layers of its kind, rows, *component shape).
        checkpoints: Checkpoints, likewise; these tensors if they are as live states are.
        rings: By component name of a ring, (layers of its kind, requests, *component shape).
        ring_layout: What they are.
        first_page_slot: Slot of the first page. Those before it are the engine's.
        kv_rows: (1, blocks with the dummy block, bytes of a block) uint8: whole blocks; not without ``layout``.
        encodes: Whether checkpoints are kept in another form than live states.
        kept: Content of a checkpoint's slot.
        state_rows: (1, rows, bytes of a checkpoint) uint8: whole checkpoints.
        live_rows: (1, rows, bytes of a live state) uint8.
    """

    kv: torch.Tensor
    routes: torch.Tensor
    kv_rows: torch.Tensor

    def __init__(
        self,
        slots: SlotLayout,
        *,
        own_slots: int,
        rings: RingLayout,
        requests: int,
        layout: PageLayout | None = None,
        block: BlockShape | None = None,
        kept: SlotLayout | None = None,
        device: torch.device | int | str,
    ) -> None:
        self.layout, self.first_page_slot = layout, own_slots
        self._state_bytes = state_bytes = slot_bytes(slots)
        self._row_bytes = max(1, state_bytes) if layout is None else ALIGNMENT_BYTES
        self.ring_layout = rings
        pages_bytes = own_bytes(state_bytes, rings, own_slots=own_slots, requests=requests)
        self._pages_bytes = pages_bytes  # where the first page begins
        blocks = step_bytes = self._pages = self._page_bytes = 0
        self._places = [0]  # bytes before each slot of a page
        if layout is not None:
            assert block is not None and (kept is not None) == bool(layout.page_live)
            blocks, step_bytes = layout.total_blocks + 1, layout.block_bytes
            self._pages, self._page_bytes = layout.pages, layout.page_bytes
            sizes = ((layout.page_live, state_bytes), (layout.page_states, slot_bytes(kept or slots)))
            assert max(count * size for count, size in sizes) <= layout.page_bytes and block.bytes <= step_bytes
            self._places = [number * size for count, size in sizes for number in range(count)]
        self.buffer = torch.zeros(pages_bytes + blocks * step_bytes, dtype=torch.uint8, device=device)
        if block is not None:
            self.kv = _view(self.buffer, block.dtype, pages_bytes, block.before, (blocks, step_bytes), block.after)
            begin = pages_bytes + block.kv_bytes
            self.routes = _view(self.buffer, block.routes_dtype, begin, (), (blocks, step_bytes), block.routes)
            self.kv_rows = self.buffer.as_strided((1, blocks, block.bytes), (0, step_bytes, 1), pages_bytes)
        self.states, self.live_rows = self._states(slots)
        self.encodes, self.kept = kept is not None, kept or slots
        self.checkpoints, self.state_rows = (self.states, self.live_rows) if kept is None else self._states(kept)
        self.rings: dict[str, torch.Tensor] = {}
        offset = own_slots * state_bytes
        for of_kind, component in ((of, each) for of in rings.kinds for each in of.components):
            size, dtype = of_kind.layers * requests * component.bytes, getattr(torch, component.dtype)
            shape = of_kind.layers, requests, *component.shape
            self.rings[component.name] = self.buffer[offset : offset + size].view(dtype).view(shape)
            offset += round_up(size, ALIGNMENT_BYTES)

    def _states(self, slots: SlotLayout) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Views of states of this layout in any row: of each component, and of whole states."""
        size = slot_bytes(slots)
        entries = (len(self.buffer) - size) // self._row_bytes + 1, self._row_bytes
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for (of_kind, component), count_bytes in zip(slots, _component_bytes(slots), strict=True):
            dtype, layers = getattr(torch, component.dtype), (of_kind.layers,)
            views[component.name] = _view(self.buffer, dtype, offset, layers, entries, component.shape)
            offset += count_bytes
        return views, self.buffer.as_strided((1, entries[0], size), (0, self._row_bytes, 1))

    def row(self, slot: int) -> int:
        """The row of a slot. Raises ValueError if there is no such slot."""
        own = self.first_page_slot
        if 0 <= slot < own:
            return slot * self._state_bytes // self._row_bytes
        page, place = divmod(slot - own, len(self._places))
        if not 0 <= page < self._pages:
            raise ValueError(f"slot {slot} does not exist: there are {own + self._pages * len(self._places)}")
        return (self._pages_bytes + page * self._page_bytes + self._places[place]) // ALIGNMENT_BYTES

    def is_encoded(self, slot: int) -> bool:
        """Whether the slot has a checkpoint in another form than live states."""
        layout, number = self.layout, slot - self.first_page_slot
        return self.encodes and layout is not None and number >= 0 and number % layout.page_slots >= layout.page_live

    def state(self, slot: int) -> dict[str, torch.Tensor]:
        """The state in a slot, by component name: (layers of its kind, *shape), a view; of a checkpoint as it is kept."""
        tensors = self.checkpoints if self.is_encoded(slot) else self.states
        return {name: tensor[:, self.row(slot)] for name, tensor in tensors.items()}

    # -- states --------------------------------------------------------------------------------------------------------

    def zero(self, slots: Iterable[int]) -> None:
        """Zero the live states in ``slots``: zero is the state before the first token.

        Raises:
            ValueError: A slot does not exist. Nothing is written.
        """
        rows = self._on_device(map(self.row, slots))
        for tensor in self.states.values():
            tensor[:, rows] = tensor.new_zeros(())  # a number would be sent to the GPU, and waited for

    def keep(self, live_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Write live states to checkpoints; nothing where a slot is negative."""
        sources, targets = map(self._rows, (live_slots, slots))
        for name, states in self.states.items():
            keep_slots(states, self.parts(name), sources, targets)

    def restore(self, slots: Sequence[int], live_slots: Sequence[int]) -> None:
        """Write checkpoints to live states; nothing where a slot is negative."""
        sources, targets = map(self._rows, (slots, live_slots))
        for name, states in self.states.items():
            restore_slots(self.parts(name), states, sources, targets)

    def _rows(self, slots: Sequence[int]) -> torch.Tensor:
        """On the device; negative ones stay."""
        return self._on_device(slot if slot < 0 else self.row(slot) for slot in slots)

    def parts(self, name: str) -> list[torch.Tensor]:
        """What checkpoints have of a component, (layers of its kind, rows, *shape): itself, or its codes."""
        names = [name] if name in self.checkpoints else [f"{name}_{code}" for code in CODES]
        return [self.checkpoints[each] for each in names]

    # -- pages ---------------------------------------------------------------------------------------------------------

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Fill whole pages with zeros."""
        assert self.layout is not None
        page_bytes = self.layout.page_bytes
        for page in pages:
            start = self._pages_bytes + page * page_bytes
            self.buffer[start : start + page_bytes].zero_()

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, one after another: (from block, to block)."""
        self._move(self.kv_rows, moves)

    def move_states(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole checkpoints, one after another: (from slot, to slot)."""
        self._move(self.state_rows, [(self.row(source), self.row(target)) for source, target in moves])

    def _move(self, rows: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
        for batch in _independent(moves):
            sources, targets = (self._on_device(ids) for ids in zip(*batch, strict=True))
            copy_slots(rows, rows, sources, targets)

    def _on_device(self, ids: Iterable[int]) -> torch.Tensor:
        return ids_on_device(ids, self.buffer.device)


def _independent(moves: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Consecutive batches of moves, in which no block is written that another move of the batch reads or writes."""
    batches: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in moves:
        if not batches or source in written or target in written or target in read:
            batches.append([])
            read, written = set(), set()
        batches[-1].append((source, target))
        read.add(source)
        written.add(target)
    return batches


def _view(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    offset_bytes: int,
    before: Sequence[int],
    entries: tuple[int, int],
    after: Sequence[int],
) -> torch.Tensor:
    """(*before, entries, *after) over the buffer; ``entries``: how many, and the bytes from one to the next."""
    count, entry_bytes = entries
    inner = [*before, *after]
    strides = [math.prod(inner[dim + 1 :]) for dim in range(len(inner))]
    strides.insert(len(before), entry_bytes // dtype.itemsize)
    return buffer.view(dtype).as_strided((*before, count, *after), strides, offset_bytes // dtype.itemsize)


def _component_bytes(layout: SlotLayout) -> list[int]:
    return [round_up(of_kind.layers * component.bytes, ALIGNMENT_BYTES) for of_kind, component in layout]
