"""Layouts of states, of pages, and of the memory that all ranks agree on: what fits, and what is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hybrid_prefix.lab.capacity import sizes_of_config
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.mcore.state import budget
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig, split_into_stages
from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
from megatron_hybrid_prefix.pool.shared_memory import slot_bytes
from megatron_hybrid_prefix.support.arithmetic import ceil_div

CONV = StateComponent(name="conv", shape=(5, 4), dtype="bfloat16")
SSM = StateComponent(name="ssm", shape=(2, 3, 4), dtype="float32")
BYTES = 5 * 4 * 2 + 2 * 3 * 4 * 4


def layout(layers=3, components=(CONV, SSM)):
    return StateLayout(kind="some", layers=layers, components=components)


def component(shape=(1,), dtype="float32"):
    return StateComponent(name="x", shape=shape, dtype=dtype)


def kept(dtype, **fields):
    return SlotLayout((layout(**fields),)).kept_in(dtype)


# -- a state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_are_those_of_the_tensor(dtype, size):
    tensor = torch.empty((3, 1, 7), dtype=getattr(torch, dtype))
    assert component(tensor.shape, dtype).bytes == tensor.numel() * tensor.element_size() == 21 * size


@pytest.mark.parametrize(
    ("message", "make", "arguments"),
    [
        *((r"'x': unknown dtype", component, {"dtype": dtype}) for dtype in ("int64", "float8", "", "torch.float32")),
        *((r"'x': shape .* has no elements", component, {"shape": s}) for s in ((), (0,), (3, 0), (3, -1))),
        ("state layout 'some'", layout, {"layers": -1}),
        *(("state layout 'some'", layout, {"components": parts}) for parts in ((), (CONV, CONV), (CONV, SSM, CONV))),
        (r"^checkpoint_dtype='int4': must be 'bfloat16' or 'int8', or None$", partial(kept, "int4"), {}),
        (r"^checkpoint_dtype='int8': layers of kind some have no matrices that accumulate$", partial(kept, "int8"), {}),
        (r"live_bytes=5: must be 0, or state", partial(PageLayout.of, block_bytes=4, state_bytes=8), {"live_bytes": 5}),
        *(
            (r"layer kinds \[.*\] have components", SlotLayout, {"kinds": kinds})
            for kinds in ((), (layout(), layout()))
        ),
    ],
)
def test_impossible_layouts_are_refused(message, make, arguments):
    """Kinds are told apart by the names of their components."""
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_slot_has_the_states_of_all_kinds():
    other = StateLayout(kind="other", layers=2, components=(StateComponent(name="sum", shape=(7,), dtype="float64"),))
    for slots, size in ((SlotLayout((layout(),)), 3 * BYTES), (SlotLayout((layout(), other)), 3 * BYTES + 2 * 7 * 8)):
        assert slots.slot_bytes == size
    assert SlotLayout((layout(layers=0),)).slot_bytes == 0


def test_a_checkpoint_has_exact_windows_and_codes_of_matrices():
    parts = CONV, *(replace(each, accumulates=True) for each in (SSM, component((7,))))
    found = {part.name: (part.shape, part.dtype) for _, part in kept("int8", components=parts)}
    assert found == {
        "conv": ((5, 4), "bfloat16"),
        "ssm_int8": ((2, 3, 4), "int8"),
        "ssm_row_scales": ((2, 3), "bfloat16"),
        "ssm_column_scales": ((2, 4), "bfloat16"),
        "x": ((7,), "float32"),
    }
    assert kept(None, components=parts) == SlotLayout((layout(components=parts),))
    assert [part.dtype for _, part in kept("bfloat16", components=parts)] == ["bfloat16"] * 3


# -- a page ------------------------------------------------------------------------------------------------------------


def sizes_of_rank(config: HybridModelConfig, tp: int, block_tokens: int) -> tuple[int, int]:
    """Bytes of a KV block and of a state, as `SharedMemory` places them."""
    sizes = sizes_of_config("some", config, tp=tp)
    return ceil_div(sizes.kv_block_bytes(block_tokens), ALIGNMENT_BYTES) * ALIGNMENT_BYTES, slot_bytes(sizes.layout)


def check_little_is_lost(block_bytes: int, state_bytes: int) -> None:
    found = PageLayout.of(block_bytes=block_bytes, state_bytes=state_bytes, alignment_bytes=ALIGNMENT_BYTES)
    assert found.block_bytes >= block_bytes and found.block_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= found.padding_bytes <= 0.1 * found.page_bytes, "lost of a page of states"
    assert found.block_bytes - block_bytes <= 0.04 * found.block_bytes, "lost of a KV block"


@given(block=st.integers(1, 2**14), blocks_of_state=st.floats(0.05, 100))
@example(block=10, blocks_of_state=1.8)
@example(block=2**14, blocks_of_state=0.05)
@example(block=2**14, blocks_of_state=1.0001)
def test_little_is_lost_for_any_sizes(block, blocks_of_state):
    check_little_is_lost(block * ALIGNMENT_BYTES, max(1, round(block * blocks_of_state)) * ALIGNMENT_BYTES)


@given(cache_bytes=st.integers(-1, 10**6), block_bytes=st.integers(1, 5000), state_bytes=st.integers(1, 20000))
def test_the_caches_own_layout(cache_bytes, block_bytes, state_bytes):
    try:
        found = Memory(cache_bytes, block_bytes, state_bytes).layout
    except ValueError as error:
        least = int(str(error).split()[-2])
        found = Memory(least, block_bytes, state_bytes).layout
        assert cache_bytes < least and found.total_blocks == found.page_blocks + 1
        cache_bytes = least
    assert found.block_bytes >= block_bytes and found.page_states * state_bytes <= found.page_bytes
    assert 0 <= cache_bytes - found.total_blocks * found.block_bytes < found.block_bytes
    assert found.pages * found.page_blocks <= found.total_blocks


@given(block=st.integers(1, 2**14), blocks_of_state=st.floats(0.05, 100), live_over=st.floats(1, 8))
@example(block=2**14, blocks_of_state=0.05, live_over=3.9999)
def test_little_is_lost_of_pages_of_two_sizes(block, blocks_of_state, live_over):
    state = max(1, round(block * blocks_of_state))
    live, size = ALIGNMENT_BYTES * round(live_over * state), ALIGNMENT_BYTES * state
    found = PageLayout.of(
        block_bytes=block * ALIGNMENT_BYTES, state_bytes=size, live_bytes=live, alignment_bytes=ALIGNMENT_BYTES
    )
    assert 0 <= found.padding_bytes <= 0.1 * found.page_bytes, "lost of a page of checkpoints"
    assert found.block_bytes - block * ALIGNMENT_BYTES <= 0.04 * found.block_bytes, "lost of a KV block"
    assert 0 <= found.page_bytes - found.page_live * live <= 0.25 * found.page_bytes, "lost of a page of live states"


@pytest.mark.parametrize("block_tokens", [64, 256])
@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_int8_fits_three_and_a_half_times_the_checkpoints(name, block_tokens):
    """In the same bytes, with scales and padding: of float32 states; and nearly twice those of bfloat16."""
    block = sizes_of_rank(PRESETS[name], 1, block_tokens)[0]
    for dtype, least in (("float32", 3.4), ("bfloat16", 1.75)):
        live = sizes_of_config("some", PRESETS[name]).layout.with_dtypes(state=dtype, window=None)
        sizes = {"block_bytes": block, "alignment_bytes": ALIGNMENT_BYTES}
        before = PageLayout.of(state_bytes=slot_bytes(live), **sizes)
        after = PageLayout.of(state_bytes=slot_bytes(live.kept_in("int8")), live_bytes=slot_bytes(live), **sizes)
        assert after.page_states / after.page_bytes >= least * before.page_states / before.page_bytes


# -- the memory of all ranks -------------------------------------------------------------------------------------------


Stage = tuple[int, int, RingLayout]
"""Bytes of a block and of a state, and what a request has beside it."""


def rings_of(entries: int) -> RingLayout:
    """Two layers with so many entries of 12 bytes; 0: none."""
    component = StateComponent(name="inputs", shape=(max(1, entries), 3), dtype="float32")
    return RingLayout(tokens=8, kinds=(StateLayout(kind="some", layers=2, components=(component,)),) if entries else ())


def agree(
    stages: Sequence[Stage], memory_bytes: int, max_requests: int, kept: Sequence[float]
) -> list[tuple[PageLayout, bool]]:
    """The layout of each stage, and whether live states are in it: a thread for each. ``kept``: a checkpoint's shares of a state."""
    said: list[Any] = [None] * len(stages)
    barrier = Barrier(len(stages), timeout=60)

    def gather(value: Any, stage: int) -> list[Any]:
        said[stage] = value
        barrier.wait()
        values = said.copy()
        barrier.wait()
        return values

    def run(stage: int) -> Any:
        fields = dict(zip(("block_bytes", "live_bytes", "rings"), stages[stage], strict=True))
        fields["state_bytes"] = math.ceil(kept[stage] * fields["live_bytes"])
        try:
            return budget.agree_on_budget(memory_bytes, max_requests=max_requests, option="x", groups=stage, **fields)
        except ValueError as error:
            return error

    with (
        patch.object(budget, "of_all_stages", gather),
        patch.object(budget, "min_over_model_ranks", lambda value, stage: min(gather(value, stage))),
        patch.object(
            budget, "max_over_model_ranks", lambda values, stage: list(map(max, *gather(values, stage), values))
        ),
        ThreadPoolExecutor(len(stages)) as threads,
    ):
        found = list(threads.map(run, range(len(stages))))
    if errors := [each for each in found if isinstance(each, ValueError)]:
        assert len(errors) == len(stages) and len(set(map(str, errors))) == 1, "some ranks would go on alone"
        raise errors[0]
    return found


def check_budgets(stages: Sequence[Stage], memory_bytes: int, max_requests: int, kept: Sequence[float] = ()) -> float:
    """Checks that stages agree and keep their budgets. Returns KV blocks, as a share of those beside a state for each request."""
    kept = kept or [1] * len(stages)
    found = agree(stages, memory_bytes, max_requests, kept)
    counts = {(page.total_blocks, page.page_blocks, page.page_states, live_states) for page, live_states in found}
    assert len(counts) == 1
    left = []
    for (block_bytes, state_bytes, rings), (page, live_states), share in zip(stages, found, kept, strict=True):
        own = own_bytes(state_bytes, rings, own_slots=1 if live_states else max_requests, requests=max_requests)
        assert page.block_bytes >= block_bytes and page.block_bytes % ALIGNMENT_BYTES == 0
        assert page.padding_bytes >= 0 and page.state_bytes == math.ceil((share if page.page_live else 1) * state_bytes)
        assert page.page_live * state_bytes <= page.page_bytes and page.live_bytes in (0, state_bytes)
        left.append((memory_bytes - own - (page.total_blocks + 1) * page.block_bytes) / page.block_bytes)
    assert 0 <= min(left) < 1  # of the tightest stage
    page, live_states = found[0]
    assert page.pages >= 1 or not live_states
    formula = min(
        (memory_bytes - own) // stage[0] for stage, own in zip(stages, every(stages, max_requests), strict=True)
    )
    return (page.total_blocks + 1) / max(1, formula)


def every(stages: Sequence[Stage], requests: int) -> list[int]:
    """Bytes of each stage for states and rings of so many requests."""
    return [own_bytes(state, rings, own_slots=requests, requests=requests) for _, state, rings in stages]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["tiny", "hybrid-4b", "gdn-4b", "nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_stages_of_models_agree_and_keep_their_kv(name, drafts):
    config = PRESETS[name]
    for pp, block_tokens, max_requests in ((1, 64, 4), (2, 64, 64), (2, 256, 4), (4, 256, 64)):
        if pp > config.count("*"):
            continue
        configs = [
            replace(config, layer_pattern=each) for each in split_into_stages(config.layer_pattern, pp).split("|")
        ]
        rings = [sizes_of_config("some", each).rings(block_tokens, drafts) for each in configs]
        stages = [(*sizes_of_rank(each, 1, block_tokens), of) for each, of in zip(configs, rings, strict=True)]
        states = max(every(stages, max_requests))
        for memory_bytes in (times * states + 100 * max(stages)[0] for times in (1, 2, 10)):
            assert check_budgets(stages, memory_bytes, max_requests) >= 0.97


@given(
    stages=st.lists(
        st.tuples(
            st.integers(256, 2**14), st.one_of(st.just(0), st.integers(1, 2**18)), st.sampled_from((1, 1, 0.5, 0.28))
        ),
        min_size=1,
        max_size=4,
    ),
    blocks=st.integers(40, 4000),
    entries=st.integers(0, 99),
    max_requests=st.integers(1, 200),
)
@example(stages=[(300, 0, 1), (256, 0, 1)], blocks=40, entries=0, max_requests=1)
@example(stages=[(300, 0, 1), (256, 9000, 1), (1000, 1, 1)], blocks=40, entries=99, max_requests=9)
@example(stages=[(256, 1028, 1), (256, 1026, 0.5)], blocks=40, entries=0, max_requests=1)
def test_any_stages_agree_and_keep_their_kv(stages, blocks, entries, max_requests):
    """Stages without recurrent layers have no rings. A stage's checkpoints may be smaller than its live states, or not."""
    sizes = [(b * ALIGNMENT_BYTES, s * ALIGNMENT_BYTES, rings_of(entries if s else 0)) for b, s, _ in stages]
    shares = [share for *_, share in stages]
    owns = zip(sizes, every(sizes, max_requests), strict=True)
    kept = check_budgets(sizes, max(own + blocks * block for (block, *_), own in owns), max_requests, shares)
    least = (1 - 0.04) / (1 + 1 / 256) - 1 / blocks  # blocks begin aligned, and whole ones count
    assert min(shares) < 1 or kept >= least


@given(
    sizes=st.tuples(st.integers(1, 2**12), st.integers(0, 2**14)),
    entries=st.integers(0, 99),
    max_requests=st.integers(1, 12),
)
def test_the_least_budget_is_enough(sizes, entries, max_requests):
    """The budget that the error names has room; a byte less has not, on any rank."""
    block_bytes, state_bytes = (size * ALIGNMENT_BYTES for size in sizes)
    stage = block_bytes, state_bytes, rings_of(entries)
    page = PageLayout.of(block_bytes=block_bytes, state_bytes=max(1, state_bytes), alignment_bytes=ALIGNMENT_BYTES)
    least = min(
        max_requests * state_bytes + 2 * page.block_bytes, state_bytes + (page.page_blocks + 2) * page.block_bytes
    )
    least += ceil_div(2 * max_requests * entries * 12, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    ((found, live_states),) = agree([stage], least, max_requests, [1])
    assert found.total_blocks == (page.page_blocks + 1 if live_states else 1)
    with pytest.raises(ValueError, match=rf"^x is too small: .* need {least / 2**20:.2f} MiB$"):
        agree([stage, (1, 0, rings_of(0))], least - 1, max_requests, [1, 1])


def test_one_rank_agrees_with_itself(platform):
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_hybrid_prefix.mcore.ranks.agreement import min_over_model_ranks

    for groups in (None, ProcessGroupCollection.use_mpu_process_groups()):
        assert [min_over_model_ranks(value, groups) for value in (0, 7)] == [0, 7]
