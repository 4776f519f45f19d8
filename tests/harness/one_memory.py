"""KV blocks and states as views of one buffer, as an engine has them whose budget they share; and views that are far apart.

Block k begins at byte ``k * block_bytes``, slot p at byte ``p * page_bytes``. A block holds keys, then values, layer by layer.
Tensors of states have a row for each `ALIGNMENT_BYTES`, as `SharedMemory` has them: rows overlap, and slot p is one of many.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES

FAR_PAGES, FAR_PAGE_BYTES = 216, 96 * 2**20
"""A buffer of 20.25 GiB: 5.4e9 elements of float32."""
PAGE_BLOCKS = 4
_NO_RESERVE = 0x4000  # Linux: memory is used when it is written, and the rest is not counted


class OneMemory:
    """One buffer, (bytes,) uint8, and the views of it. There are as many slots as pages, of a multiple of 1024 bytes.

    ``sparse``: the buffer is zero, and on the CPU memory that is not written takes no room. Else it is full of NaN.
    """

    def __init__(
        self, *, pages: int, page_bytes: int, device: str, sparse: bool = False, page_blocks: int = PAGE_BLOCKS
    ) -> None:
        self.pages, self.page_bytes, self.page_blocks = pages, page_bytes, page_blocks
        self.block_bytes = page_bytes // page_blocks
        if sparse and device == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self.buffer = torch.frombuffer(mmap.mmap(-1, pages * page_bytes, flags=flags), dtype=torch.uint8)
        else:
            self.buffer = torch.full((pages * page_bytes,), 0 if sparse else 0xFF, dtype=torch.uint8, device=device)

    def kv(self, layers: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Megatron's ``memory_buffer``: (2, layers, blocks, tokens, heads, dim)."""
        layer = tokens * heads * dim
        assert 2 * layers * layer * dtype.itemsize <= self.block_bytes
        stride = (layers * layer, layer, self.block_bytes // dtype.itemsize, heads * dim, dim, 1)
        blocks = self.pages * self.page_blocks
        return self.buffer.view(dtype).as_strided((2, layers, blocks, tokens, heads, dim), stride)

    def blocks(self) -> torch.Tensor:
        """Whole blocks: (1, blocks, block_bytes) uint8."""
        return self.buffer.view(1, -1, self.block_bytes)

    def states(self, layers: int, **components: tuple[tuple[int, ...], torch.dtype]) -> dict[str, torch.Tensor]:
        """By component name, (layers, rows, *shape); each component begins at a multiple of `ALIGNMENT_BYTES` of a slot."""
        tensors, offset_bytes = {}, 0
        for name, (shape, dtype) in components.items():
            one = torch.empty(layers, *shape, device="meta")
            stride = (one.stride(0), ALIGNMENT_BYTES // dtype.itemsize, *one.stride()[1:])
            tensors[name] = self.buffer.view(dtype).as_strided(
                (layers, (self.pages - 1) * self._rows_of_slot + 1, *shape), stride, offset_bytes // dtype.itemsize
            )
            offset_bytes += -(-one.numel() * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert offset_bytes <= self.page_bytes
        return tensors

    def drafted(self, states: torch.Tensor, max_requests: int, drafts: int) -> torch.Tensor:
        """(layers, rows, drafts + 1, *shape): at the row of slot s, token t, what is in slot max_requests + s * (drafts + 1) + t."""
        layers, _, *shape = states.shape
        layer, row, *inner = states.stride()
        return states.as_strided(
            (layers, (max_requests - 1) * self._rows_of_slot + 1, drafts + 1, *shape),
            (layer, row * (drafts + 1), row * self._rows_of_slot, *inner),
            states.storage_offset() + row * self._rows_of_slot * max_requests,
        )

    @property
    def _rows_of_slot(self) -> int:
        return self.page_bytes // ALIGNMENT_BYTES

    def rows(self, slots: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Rows of slots; what is negative stays so."""
        slots = torch.as_tensor(slots, device=self.buffer.device)
        return torch.where(slots < 0, slots, slots * self._rows_of_slot)

    def of_slots(self, states: torch.Tensor) -> torch.Tensor:
        """Of a tensor by rows, those of whole slots, which do not overlap."""
        return states[:, :: self._rows_of_slot]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, contiguous: NaN is equal to itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.clone(memory_format=torch.contiguous_format).view(integers[tensor.element_size()])


def check_same(
    memory: OneMemory,
    run: Callable[..., Any],
    views: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor] = {},
) -> None:
    """``run(at, **views, **states)`` gives and writes the bits that it does with contiguous tensors, and nothing else of the memory.

    It is called twice, and returns a tensor, several, or None; ``at(slots)`` is where slots are in the tensors that it gets. Where
    ``views`` overlap, the bits of the last one count; likewise ``states``, of which the contiguous tensors have a row for each slot.
    """
    whole = {**views, **{name: memory.of_slots(view) for name, view in states.items()}}
    plain = {name: bits(view).view(view.dtype) for name, view in whole.items()}
    found, expected = (
        run(memory.rows, **views, **states),
        run(lambda slots: torch.as_tensor(slots, device=memory.buffer.device), **plain),
    )
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert torch.equal(bits(one), bits(other)), "another result"
    sparse = memory.buffer.numel() >= FAR_PAGES * FAR_PAGE_BYTES
    written = {name: bits(view) for name, view in whole.items()} if sparse else {"": memory.buffer.clone()}
    for name, view in whole.items():
        view.copy_(plain[name])
    for name, before in written.items():
        assert torch.equal(before, bits(whole[name]) if name else memory.buffer), f"written: {name or 'memory'}"


def _tensors(result: Any) -> list[torch.Tensor]:
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
