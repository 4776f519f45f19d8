"""Layouts of one memory, for any sizes: what fits, what is lost, and that ranks with other layers agree."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.mcore.state import one_budget
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory, slot_bytes

GIB = 2**30
# Tokens of a block, and numbers in the two components of a state; 0: a stage without recurrent layers.
STAGES = st.tuples(st.integers(1, 40), st.integers(0, 900), st.integers(1, 90))


def block_of(tokens: int) -> BlockShape:
    return BlockShape(before=(2, 1), after=(tokens, 2, 16), dtype=torch.bfloat16)


def slots_of(matrix: int, window: int) -> SlotLayout:
    components = (
        StateComponent(name="matrix", shape=(max(1, matrix), 4), dtype="float32"),
        StateComponent(name="window", shape=(window,), dtype="bfloat16"),
    )
    return SlotLayout((StateLayout(kind="a", layers=2 if matrix else 0, components=components),))


def layouts(stages: Sequence[tuple[int, int]], budget_bytes: int, own_slots: int) -> list[PageLayout]:
    """The layout of each stage, by (bytes of a block, bytes of a state). Stages are asked until no value changes."""
    given_values: dict[tuple[str, int], int] = {}
    asked: list[str] = []

    def collective(name: str, choose: object) -> object:
        def agree(value: int, groups: object) -> int:
            asked.append(name)
            key = (name, asked.count(name))
            given_values[key] = choose(given_values.get(key, value), value)  # type: ignore[operator]
            return given_values[key]

        return agree

    found: list[PageLayout] = []
    with (
        patch.object(one_budget, "max_over_model_ranks", collective("max", max)),
        patch.object(one_budget, "min_over_model_ranks", collective("min", min)),
    ):
        for phase in range(3):  # pages are agreed on in the first, blocks in the second
            if phase == 1:
                given_values = {key: value for key, value in given_values.items() if key[0] == "max"}
            found = []
            for block_bytes, state_bytes in stages:
                asked.clear()
                found.append(
                    one_budget.agree_on_layout(
                        budget_bytes / GIB,
                        block_bytes=block_bytes,
                        state_bytes=state_bytes,
                        own_slots=own_slots,
                        groups=None,
                    )
                )
    return found


@given(
    stages=st.lists(STAGES, min_size=1, max_size=3),
    budget_bytes=st.integers(2**17, 2**22),  # most are enough
    own_slots=st.integers(0, 12),
)
@example(stages=[(4, 64, 8), (4, 70, 8)], budget_bytes=2**20, own_slots=1)
@example(stages=[(4, 66, 1), (4, 0, 1), (8, 99, 9)], budget_bytes=2**20, own_slots=1)
@example(stages=[(40, 3, 1)], budget_bytes=2**18, own_slots=8)
def test_any_sizes(stages: list[tuple[int, int, int]], budget_bytes: int, own_slots: int) -> None:
    """Blocks and slots of a page lie in it, aligned; nothing lies outside, and less than one block of the budget is lost."""
    blocks = [block_of(tokens) for tokens, _, _ in stages]
    slots = [slots_of(matrix, window) for _, matrix, window in stages]
    try:
        found = layouts(
            [(block.bytes, slot_bytes(slot)) for block, slot in zip(blocks, slots, strict=True)],
            budget_bytes,
            own_slots,
        )
    except ValueError as error:
        assert "too small" in str(error)  # the next test says when
        return
    assert len({(layout.total_blocks, layout.page_blocks, layout.pages) for layout in found}) == 1
    lost = []
    for layout, block, slot in zip(found, blocks, slots, strict=True):
        memory = SharedMemory(layout, block=block, slots=slot, own_slots=own_slots, device="cpu")
        size, step, page = memory.buffer.numel(), layout.block_bytes, layout.page_bytes
        assert size <= budget_bytes
        lost.append((budget_bytes - size) / step)
        assert layout.pages >= 1 and layout.total_blocks > layout.page_blocks
        assert step % ALIGNMENT_BYTES == 0 and block.bytes <= step
        plain_blocks = ceil_div(slot_bytes(slot), block.bytes)
        assert step == block.bytes or layout.page_blocks < plain_blocks  # padding saves a block in each page
        first = memory.kv.data_ptr() - memory.buffer.data_ptr()
        assert first == own_slots * page  # page p is slot own_slots + p
        assert memory.kv_rows.storage_offset() == first and memory.kv_rows.stride(1) == step
        assert first + layout.total_blocks * step + step == size  # the dummy block is the last
        for name, tensor in memory.states.tensors.items():
            assert tensor.shape[1] == own_slots + layout.pages
            assert tensor.stride(1) * tensor.element_size() == page
            start = tensor.storage_offset() * tensor.element_size()
            assert start % ALIGNMENT_BYTES == 0
            if tensor.numel():
                assert start + tensor[:, 0].numel() * tensor.element_size() <= page, name
    assert min(lost) < 1  # of the rank with the largest blocks


@given(sizes=STAGES, own_slots=st.integers(0, 12))
def test_the_least_budget_is_enough(sizes: tuple[int, int, int], own_slots: int) -> None:
    """The budget that the error names has room for one state and one block; one block less has not."""
    tokens, matrix, window = sizes
    stage = (block_of(tokens).bytes, slot_bytes(slots_of(matrix, window)))
    (large,) = layouts([stage], 2**26, own_slots)
    least = (own_slots * large.page_blocks + large.page_blocks + 2) * large.block_bytes
    (layout,) = layouts([stage], least, own_slots)
    assert layout.total_blocks == layout.page_blocks + 1
    with pytest.raises(ValueError, match=f"they need {least / 2**20:.2f} MiB"):
        layouts([stage], least - 1, own_slots)


@given(cache_bytes=st.integers(-1, 10**6), block_bytes=st.integers(1, 5000), state_bytes=st.integers(1, 20000))
def test_the_caches_own_layout(cache_bytes: int, block_bytes: int, state_bytes: int) -> None:
    try:
        layout = PageLayout.within(cache_bytes, block_bytes=block_bytes, state_bytes=state_bytes)
    except ValueError as error:
        least = int(str(error).split()[-2])
        layout = PageLayout.within(least, block_bytes=block_bytes, state_bytes=state_bytes)
        assert cache_bytes < least and layout.total_blocks == layout.page_blocks + 1
        cache_bytes = least
    assert layout.block_bytes >= block_bytes and cache_bytes - layout.total_blocks * layout.block_bytes >= 0
    assert cache_bytes - layout.total_blocks * layout.block_bytes < layout.block_bytes
    assert state_bytes <= layout.page_bytes and layout.pages * layout.page_blocks <= layout.total_blocks
    lost_of_page = 1 - (layout.page_blocks * block_bytes) / layout.page_bytes
    assert lost_of_page == 0 or layout.page_blocks < ceil_div(state_bytes, block_bytes)
    # What the cache and a replay make of a layout that is padded already is the same layout.
    again = PageLayout.within(cache_bytes, block_bytes=layout.block_bytes, state_bytes=state_bytes)
    assert again == layout
