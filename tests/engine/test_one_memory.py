"""One memory for KV and states in the engine: its size, what moves, who waits, and mutants that answers must show.

(`test_prefix_fuzz.py` has random traffic, ``tests/core/test_shared_memory.py`` has the index.)
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine, build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, Pages
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.device import DeviceTier
from megatron_hybrid_prefix.transfers.mover import DeviceMover
from megatron_hybrid_prefix.upstream.blocks import block_counts
from tests.harness.engine_helpers import cache_gb_for, state_bytes
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.named_models import named
from tests.harness.selection import mostly_slow


def harness(model: Any, blocks: int, states: int, **fields: Any) -> EngineHarness:
    """An engine whose memory has room for so many KV blocks beside so many states."""
    sizes = {"block_tokens": BLOCK, "max_requests": 4, "speculative_tokens": fields.get("num_speculative_tokens", 0)}
    return EngineHarness(model, cache_gb=cache_gb_for(model, blocks, states=states, **sizes), **fields)


def conversations(served: EngineHarness) -> None:
    """Prompts of one and two blocks, so that pages get holes; their next turns, two at a time; others; and all of them again."""
    prompts = [tokens(1 + number % 2, 3, seed=50 + number) for number in range(6)]
    for prompt in prompts:
        served.send(prompt, count=1)
    for first in range(0, 6, 2):
        served.send(*(prompt + tokens(1, 2, seed=80 + first) for prompt in prompts[first : first + 2]), count=2)
    served.send(*(tokens(0, 40, seed=90 + number) for number in range(4)), count=1)
    for prompt in prompts:
        served.send([*prompt[:-1], 7], count=1)


# -- its size ----------------------------------------------------------------------------------------------------------

GIVEN = {
    "max_sequence_length": 512,
    "max_tokens": 512,
    "max_requests": 8,
    "block_size_tokens": BLOCK,
    "buffer_size_gb": 0.01,
}


def context_of(model: Any, prefix: dict[str, Any], **fields: Any) -> Any:
    return build_engine(model, HybridPrefixConfig(**prefix), **GIVEN | fields).context


@pytest.mark.parametrize(
    ("prefix", "gb"),
    [
        ({"cache_gb": 0.02}, 0.02),
        ({"cache_gb": 0.02, "mamba_gb": 0.003}, 0.02),
        ({"mamba_gb": 0.003}, 0.013),
        ({"mamba_gb": 0.0}, 0.01),
        ({}, 0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_memory_and_its_cap(tiny_mtp, prefix, gb, drafts):
    """All that was given is used, but less than a page. What is not set aside for requests may hold states up to the cap."""
    context = context_of(tiny_mtp, prefix, num_speculative_tokens=drafts)
    layout, stats = context.layout, context.prefix_stats()
    beside = (
        0 if "cache_gb" in prefix else context.rings.bytes(8, ALIGNMENT_BYTES)
    )  # megatron's budget knows of no rings
    assert 0 <= int(gb * 2**30) + beside - context.shared_memory.buffer.numel() < layout.block_bytes
    assert stats.bytes_budget == layout.total_blocks * layout.block_bytes
    capped = "mamba_gb" in prefix
    slots = int(prefix["mamba_gb"] * 2**30) // state_bytes(tiny_mtp) if capped else layout.slots
    assert stats.slots_total == slots and layout.slots > 1.5 * slots * capped
    assert context.max_requests == 8


SIZES = [
    {},
    *({"max_requests": count, "num_speculative_tokens": drafts} for count in (4, 64) for drafts in (0, 3)),
    {"max_requests": None},
    {"paused_buffer_size_gb": 0.004},
    {"paused_buffer_size_gb": 0.02, "max_requests": 64, "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("fields", SIZES, ids=str)
def test_as_many_requests_and_blocks_as_in_megatron(tiny_mtp, fields):
    """Beside megatron's engine without a cache: blocks may be a little larger, so that states fit a page.

    With ``cache_gb`` as many requests run, if nobody says how many, as have rings in a sixteenth of it.
    """
    fields = {"buffer_size_gb": 0.05, "max_tokens": 1024} | fields
    plain = build_upstream_engine(tiny_mtp, **GIVEN | fields).context
    for prefix in ({}, {"mamba_gb": 0.0}, {"mamba_gb": 0.003}):
        ours = context_of(tiny_mtp, prefix, **fields)
        assert ours.max_requests == plain.max_requests
        found, expected = (block_counts(each.kv_block_allocator) for each in (ours, plain))
        assert found.total >= 0.97 * expected.total and found.paused == expected.paused
    found = context_of(tiny_mtp, {"cache_gb": 0.05}, **fields)
    most = 0.05 * 2**30 / 16 // found.rings.bytes(1) // 4 * 4
    assert found.max_requests == (most if fields.get("max_requests", 0) is None else plain.max_requests)


# -- moves -------------------------------------------------------------------------------------------------------------


def test_blocks_that_move_keep_their_kv(tiny_large_states):
    served = harness(tiny_large_states, 12, states=7)
    conversations(served)
    served.check()
    stats, use = served.context.prefix_stats(), served.cache.memory_use()
    assert use.moved_blocks > 5 and stats.reused_tokens > 5 * BLOCK
    assert stats.evictions > 5 and stats.kv_evictions > 5
    served.check_drained()


def zeroed_before_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero(self: Any, live_indices: list[int]) -> None:
        self.states.memory.zero(sorted({self.states.live.slot(index) for index in live_indices}))
        self.moves.launch()

    monkeypatch.setattr(HybridPrefixContext, "zero_live_states", zero)


def copied_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, update = DeviceMover.launch, HybridPrefixContext.update_requests

    def update_requests(self: Any, *args: Any, **fields: Any) -> Any:
        launch(self.moves)
        return update(self, *args, **fields)

    monkeypatch.setattr(DeviceMover, "launch", lambda self, **options: None)
    monkeypatch.setattr(HybridPrefixContext, "update_requests", update_requests)


def held_blocks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables of running requests are stale afterwards."""

    def move(self: Any, moves: Any) -> None:
        for source, target in moves:
            self._node[source], self._node[target] = None, self._node[source]
            self._ref_counts[source], self._ref_counts[target] = 0, self._ref_counts[source]
            if self._node[target] is not None:
                self._node[target].block_id = target

    def list_page(self: Any, page: int) -> None:
        free = len(self._free_ids[page])
        if free:
            self._by_free.push(page, free)
        if page < len(self):
            self._unheld_by_free.push(page, free)

    monkeypatch.setattr(Pages, "_list", list_page)
    monkeypatch.setattr(Pages, "_is_unheld", Pages._has_free)
    monkeypatch.setattr(KVBlocks, "move", move)


def a_live_states_page_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    end, take = SlotPool.end_live, DeviceTier.take_live_slot

    def take_live_slot(self: Any) -> int | None:
        slot = take(self)
        end(self.slots, slot)
        return slot

    monkeypatch.setattr(DeviceTier, "take_live_slot", take_live_slot)
    monkeypatch.setattr(SlotPool, "end_live", lambda self, slot: None)


CORE = "megatron_hybrid_prefix.mcore."
move_blocks = SharedMemory.move_blocks
# Mutants that replace one thing, and others.
REPLACED = {
    "nothing is copied": (SharedMemory, "move_blocks", lambda self, moves: None),
    "the last move is lost": (SharedMemory, "move_blocks", lambda self, moves: move_blocks(self, moves[:-1])),
    # What they write there is only right for rows without a request.
    "all requests have one live slot": (f"{CORE}state.memory.LiveSlots.bind", lambda *arguments: None),
}
OTHERS = (zeroed_before_the_copies, copied_after_the_forward, held_blocks_move, a_live_states_page_is_given_away)
MUTANTS = REPLACED | {mutant.__name__: mutant for mutant in OTHERS}


@pytest.mark.parametrize("name", mostly_slow(MUTANTS, "zeroed_before_the_copies"))
def test_mutants_are_found(tiny_large_states, name, monkeypatch):
    """By the answers, or what the cache checks at each call; `check_integrity` would find some sooner."""
    monkeypatch.setattr(*REPLACED[name]) if name in REPLACED else MUTANTS[name](monkeypatch)
    monkeypatch.setattr(EngineHarness, "check_integrity", lambda self: None)
    with pytest.raises((AssertionError, CacheCorruptionError)):
        test_blocks_that_move_keep_their_kv(tiny_large_states)


@pytest.mark.parametrize("clears", [True, False])
def test_blocks_of_requests_hold_numbers(platform, clears, monkeypatch):
    """Half of a float32 state, read as bfloat16, may be NaN. Some attention kernels multiply all of a block, its unused end by zero."""
    model = build_hybrid_model(
        dataclasses.replace(named("tiny-large-states"), dtype="bfloat16"), seed=0, platform=platform
    )
    served = harness(model, 12, states=7, state_dtype="float32")
    show, found = HybridPrefixContext.transfer_bookkeeping_to_gpu, []

    def then_look(self: Any, *args: Any, **fields: Any) -> Any:
        result = show(self, *args, **fields)  # the forward is next
        rows = self.request_to_kv_block_ids[: self.total_request_count]
        blocks = sorted(set(rows[rows >= 0].tolist()))
        found.append(bool(self.memory_buffer[:, :, blocks].isfinite().all()))
        return result

    monkeypatch.setattr(HybridPrefixContext, "transfer_bookkeeping_to_gpu", then_look)
    if not clears:
        monkeypatch.setattr(SharedMemory, "clear_pages", lambda self, pages: None)
    conversations(served)
    assert served.cache.memory_use().pages_to_kv > 2 and len(found) > 10
    assert all(found) == clears


@pytest.mark.parametrize("memory", [{}, {"slots": None}])
def test_kv_memory_begins_with_zeros(tiny, memory, monkeypatch):
    """Whatever the allocator gives, or torch_memory_saver after a suspension: between two rollouts it was the training's."""
    allocate, empty = DynamicInferenceContext._allocate_memory_buffer, torch.empty

    def used(self: Any) -> None:
        allocate(self)
        self.memory_buffer.fill_(float("nan"))

    monkeypatch.setattr(DynamicInferenceContext, "_allocate_memory_buffer", used)
    monkeypatch.setattr("torch.empty", lambda *args, **fields: empty(*args, **fields).fill_(127))
    saver = SimpleNamespace(region=lambda *_, **__: contextlib.nullcontext(), pause=lambda tag: None)
    for name, value in (
        ("HAVE_TORCH_MEMORY_SAVER", True),
        ("torch_memory_saver", saver),
        ("device_memory_summary", str),
    ):
        monkeypatch.setattr(dynamic_context, name, value, raising=False)
    fields = {"kv_cache_management_mode": KVCacheManagementMode.RECOMPUTE, "static_kv_memory_pointers": True}
    served = EngineHarness(tiny, **fields, **memory)
    buffer = served.context.memory_buffer
    assert not buffer.any()
    saver.resume = lambda tag: buffer.fill_(float("nan"))
    prompt = tokens(1, 3, seed=1)
    served.send(prompt, count=2)
    served.engine.suspend()
    served.engine.resume()
    assert served.context.memory_buffer is buffer and not buffer.any()
    served.send(prompt, count=2)
    served.check()


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_a_request_that_fits_an_empty_memory_runs(tiny_large_states):
    """A state takes three blocks here. A hit would need three more, for the state that it starts from."""
    served = harness(tiny_large_states, 8, states=0)
    assert (served.context.layout.total_blocks, served.context.layout.page_blocks) == (8, 3)
    longest = tokens(5, -4, seed=1)
    served.send(longest[: BLOCK + 9])
    assert served.kept_states
    request = served.send(longest)
    found = request.sampling_params.cache_reuse
    assert (request.num_cached_tokens, found["reason"], found["state_tokens"]) == (0, "memory", BLOCK)
    served.finish()


def test_a_request_that_does_not_fit_beside_its_state_is_refused(tiny_large_states):
    served = harness(tiny_large_states, 8, states=0)
    refused = served.add(tokens(6, -4, seed=1))
    fits = served.add(tokens(5, -4, seed=2))
    served.run()
    assert served.finished[refused].failed() and not served.finished[fits].failed()
    served.check(fits)
    served.check_drained()


def test_a_state_beside_a_running_requests_gives_its_kv_away(tiny):
    """A page has five states here. One of a running request keeps all of it, and KV that is worth keeping lies elsewhere."""
    served = harness(tiny, 8, states=0)
    running = served.add(tokens(0, 2, seed=1), BLOCK - 4)
    for seed in (2, 3, 4):  # the last one needs three blocks, and one is free
        later = served.add(tokens(2, 5, seed=seed), 1)
        while later not in served.finished:
            served.step()
    assert running not in served.finished and served.cache.memory_use().state_pages == 1
    assert served.cache.stats().evictions > 0
    served.finish()
