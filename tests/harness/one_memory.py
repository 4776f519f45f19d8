"""KV blocks and states as views of one buffer, as an engine has them whose budget they share; and views that are far apart.

Block k begins at byte ``k * block_bytes``, slot p at byte ``p * page_bytes``. A block holds keys, then values, layer by layer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch

FAR_PAGES, FAR_PAGE_BYTES = 216, 96 * 2**20
"""A buffer of 20.25 GiB: 5.4e9 elements of float32."""
PAGE_BLOCKS = 4
_NO_RESERVE = 0x4000  # Linux: memory is used when it is written, and the rest is not counted


class OneMemory:
    """One buffer, and the views of it.

    Args:
        pages: Pages, which is the number of slots.
        page_bytes: Bytes of a page, a multiple of 1024.
        device: Its device.
        sparse: The buffer is zero, and on the CPU memory that is not written takes no room. Else it is full of NaN.
        page_blocks: KV blocks in a page.

    Attributes:
        buffer: (bytes,) uint8.
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
        """By component name, (layers, slots, *shape); each component begins at a multiple of 256 bytes of a slot."""
        tensors, offset_bytes = {}, 0
        for name, (shape, dtype) in components.items():
            one = torch.empty(layers, *shape, device="meta")
            stride = (one.stride(0), self.page_bytes // dtype.itemsize, *one.stride()[1:])
            tensors[name] = self.buffer.view(dtype).as_strided(
                (layers, self.pages, *shape), stride, offset_bytes // dtype.itemsize
            )
            offset_bytes += -(-one.numel() * dtype.itemsize // 256) * 256
        assert offset_bytes <= self.page_bytes
        return tensors

    @staticmethod
    def drafted(states: torch.Tensor, max_requests: int, drafts: int) -> torch.Tensor:
        """(layers, slots, drafts + 1, *shape): at [:, s, t] the states in slot s + max_requests * (t + 1)."""
        layers, slots, *shape = states.shape
        layer, slot, *inner = states.stride()
        return states.as_strided(
            (layers, slots - max_requests * (drafts + 1), drafts + 1, *shape),
            (layer, slot, max_requests * slot, *inner),
            states.storage_offset() + max_requests * slot,
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, contiguous: NaN is equal to itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.clone(memory_format=torch.contiguous_format).view(integers[tensor.element_size()])


def check_same(memory: OneMemory, run: Callable[..., Any], views: Mapping[str, torch.Tensor]) -> None:
    """``run(**views)`` gives and writes the bits that it does with contiguous tensors, and nothing else of the memory.

    Args:
        memory: Of the views.
        run: Returns a tensor, several, or None. Called twice.
        views: May overlap; where they do, the bits of the last one count.
    """
    plain = {name: bits(view).view(view.dtype) for name, view in views.items()}
    found, expected = run(**views), run(**plain)
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert torch.equal(bits(one), bits(other)), "another result"
    sparse = memory.buffer.numel() >= FAR_PAGES * FAR_PAGE_BYTES
    written = {name: bits(view) for name, view in views.items()} if sparse else {"": memory.buffer.clone()}
    for name, view in views.items():
        view.copy_(plain[name])
    for name, before in written.items():
        assert torch.equal(before, bits(views[name]) if name else memory.buffer), f"written: {name or 'memory'}"


def _tensors(result: Any) -> list[torch.Tensor]:
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
