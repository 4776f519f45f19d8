"""`SharedMemory`: one buffer on the device that KV blocks and recurrent states share, and the views of it.

`PageLayout` (``pages.py``) says which bytes belong to which block and slot. Here they become tensors::

    | engine's own slots 0 .. n - 1 | page 0: block 0, 1, .. or slot n | page 1 | .. | rest: blocks, dummy block |

The engine's own slots are never given to the cache: rows without a request use them. Behind the last whole page there are
only blocks, and the last of them is megatron's dummy block. So all of the budget but less than one block is used.

KV blocks are block-major: a block of all attention layers is contiguous. So are slots: all layers, component by component.
Behind a block there may be padding, which belongs to nobody (`padded_block_bytes`).
The views never change, so addresses do not either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.slot_copies import copy_slots, ids_on_device
from megatron_hybrid_prefix.pool.device import StateSlots
from megatron_hybrid_prefix.pool.layout import SlotLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Shape of the KV of a block on this rank, as megatron's buffer has it.

    Attributes:
        before: Dimensions before the blocks: (2, attention layers), or (attention layers,) for a compressed KV cache.
        after: Dimensions after them: (tokens, heads, channels), or (tokens, width).
        dtype: Type of keys and values.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a block, aligned."""
        return _aligned(math.prod(self.before) * math.prod(self.after) * self.dtype.itemsize)


def slot_bytes(layout: SlotLayout) -> int:
    """Bytes of a slot, aligned; 0 on a pipeline stage without recurrent layers."""
    return sum(_component_bytes(layout))


class SharedMemory:
    """See the module. The memory is zeros at first: see `PageClear`.

    Args:
        layout: Blocks, and blocks in a page. `PageLayout.of_buffer` gives a layout whose buffer fits a budget.
        block: Shape of a block.
        slots: Content of a slot.
        own_slots: Slots before the pages that the engine keeps for itself.
        device: Device of the buffer.

    Raises:
        ValueError: A slot does not fit a page, or a block does not fit the distance of blocks.

    Attributes:
        buffer: (bytes,) uint8.
        kv: (*block.before, blocks with the dummy block, *block.after).
        states: The engine's slots, and those of all pages.
        first_page_slot: Slot of the first page. Those before it are the engine's.
        kv_rows: (1, blocks with the dummy block, bytes of a block) uint8: whole blocks.
        state_rows: (1, slots, bytes of a slot) uint8: whole slots.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        block: BlockShape,
        slots: SlotLayout,
        own_slots: int,
        device: torch.device | int | str,
    ) -> None:
        step_bytes, page_bytes, own_bytes = layout.block_bytes, layout.page_bytes, slot_bytes(slots)
        if own_bytes > page_bytes:
            raise ValueError(f"a state of {own_bytes} bytes does not fit a page of {page_bytes}")
        if block.bytes > step_bytes:
            raise ValueError(f"blocks of {block.bytes} bytes do not fit a distance of {step_bytes}")
        blocks = layout.total_blocks + 1
        self.first_page_slot, slot_count = own_slots, own_slots + layout.pages
        pages_bytes = own_slots * page_bytes  # where the first page begins
        self.buffer = torch.zeros(pages_bytes + blocks * step_bytes, dtype=torch.uint8, device=device)
        self.kv = _view(self.buffer, block.dtype, pages_bytes, block.before, (blocks, step_bytes), block.after)
        self.kv_rows = self.buffer.as_strided((1, blocks, block.bytes), (0, step_bytes, 1), pages_bytes)
        self.state_rows = self.buffer.as_strided((1, slot_count, own_bytes), (0, page_bytes, 1))
        tensors, offset = {}, 0
        for (of_kind, component), count_bytes in zip(slots, _component_bytes(slots), strict=True):
            dtype = getattr(torch, component.dtype)
            tensors[component.name] = _view(
                self.buffer, dtype, offset, (of_kind.layers,), (slot_count, page_bytes), component.shape
            )
            offset += count_bytes
        self.states = StateSlots(slots, tensors)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Fill whole pages with zeros."""
        page_bytes = self.state_rows.stride(1)
        for page in pages:
            start = (self.first_page_slot + page) * page_bytes
            self.buffer[start : start + page_bytes].zero_()

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, one after another: (from block, to block)."""
        for batch in _independent(moves):
            sources, targets = (ids_on_device(ids, self.buffer.device) for ids in zip(*batch, strict=True))
            copy_slots(self.kv_rows, self.kv_rows, sources, targets)


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
    return [_aligned(of_kind.layers * component.bytes) for of_kind, component in layout]


def _aligned(count_bytes: int) -> int:
    return ceil_div(count_bytes, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
