"""KV blocks and states of a `SharedMemory`, as an engine has them whose budget they share; and of one whose entries are far apart.

A state takes a whole page. So block k begins at byte ``k * block_bytes``, slot p at byte ``p * page_bytes``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory, slot_bytes

FAR_PAGES, FAR_PAGE_BYTES = 216, 96 * 2**20
"""A buffer of 20.25 GiB: 5.4e9 elements of float32."""
PAGE_BLOCKS = 4
LAYERS = 3
_NO_RESERVE = 0x4000  # Linux: memory is used when it is written, and the rest is not counted


class OneMemory:
    """One buffer of `FAR_PAGES` pages and a KV block, (bytes,) uint8, and views of it.

    ``sparse``: the buffer is zero, and on the CPU memory that is not written takes no room. Else it is full of NaN.
    """

    def __init__(self, *, page_bytes: int, device: str, sparse: bool = False) -> None:
        self.page_bytes = page_bytes
        size = FAR_PAGES * page_bytes + page_bytes // PAGE_BLOCKS
        if sparse and device == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self.buffer = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
        else:
            self.buffer = torch.full((size,), 0 if sparse else 0xFF, dtype=torch.uint8, device=device)

    def shared(
        self,
        *components: StateComponent,
        block: tuple[int, ...] = (4, 2, 8),
        dtype: torch.dtype = torch.bfloat16,
    ) -> SharedMemory:
        """KV of ``block``, (tokens, heads, channels), and states; no rings."""
        some = StateLayout(kind="some", layers=LAYERS, components=components)
        rest = ((self.page_bytes - slot_bytes(SlotLayout((some,)))) // 4,)
        rest_of_page = StateComponent(name="rest", shape=rest, dtype="float32")
        slots = SlotLayout((some, StateLayout(kind="rest", layers=1, components=(rest_of_page,))))
        layout = PageLayout(
            block_bytes=self.page_bytes // PAGE_BLOCKS,
            state_bytes=self.page_bytes,
            page_blocks=PAGE_BLOCKS,
            page_states=1,
            total_blocks=FAR_PAGES * PAGE_BLOCKS,
        )
        with mock.patch.object(torch, "zeros", lambda count, **_: self.buffer.narrow(0, 0, count)):
            made = SharedMemory(
                slots,
                own_slots=0,
                rings=RingLayout(tokens=1),
                requests=0,
                layout=layout,
                block=BlockShape(before=(2, LAYERS), after=block, dtype=dtype),
                device=self.buffer.device,
            )
        assert len(made.buffer) == len(self.buffer) and made.row(1) == self.rows([1])[0]
        del made.states["rest"]
        return made

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
