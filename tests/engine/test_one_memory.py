"""One memory for KV and states in the engine: what moves, who waits, and mutants that answers must show.

(`test_prefix_fuzz.py` has random traffic in one memory, ``tests/core/test_shared_memory.py`` has the index.)
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
from megatron_hybrid_prefix.index.shared_blocks import SharedBlocks
from megatron_hybrid_prefix.index.shared_store import SharedStore
from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine
from megatron_hybrid_prefix.mcore.state.moves import Moves
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from tests.harness.engine_helpers import cache_gb_for
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


# -- moves -------------------------------------------------------------------------------------------------------------


def test_blocks_that_move_keep_their_kv_and_their_routing(tiny_large_states):
    served = harness(tiny_large_states, 12, states=8)
    routing, blocks = served.context.kv_block_allocator.block_routing, served.cache.blocks
    send = served.send

    def send_and_mark(*prompts: list[int], **fields: Any) -> Any:
        result = send(*prompts, **fields)
        for key in blocks.cached_keys():  # as the experts of each token, where they are recorded
            assert routing.setdefault(blocks.cached_block(key), key) == key
        return result

    served.send = send_and_mark
    conversations(served)
    served.check()
    stats, use = served.context.prefix_stats(), served.cache.memory_use()
    assert use.moved_blocks > 5 and stats.reused_tokens > 5 * BLOCK
    assert stats.evictions > 5 and stats.kv_evictions > 5
    assert {blocks.cached_block(key) for key in blocks.cached_keys()} <= routing.keys()
    served.check_drained()


def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemory, "move_blocks", lambda self, moves: None)


def the_last_move_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SharedMemory.move_blocks
    monkeypatch.setattr(SharedMemory, "move_blocks", lambda self, moves: real(self, moves[:-1]))


def zeroed_before_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero(self: Any, live_indices: list[int]) -> None:
        self.states.pool.zero(sorted({self.states.live.slot(index) for index in live_indices}))
        self.moves.launch()

    monkeypatch.setattr(HybridPrefixContext, "zero_live_states", zero)


def copied_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, update = Moves.launch, HybridPrefixContext.update_requests

    def update_requests(self: Any, *args: Any, **fields: Any) -> Any:
        launch(self.moves)
        return update(self, *args, **fields)

    monkeypatch.setattr(Moves, "launch", lambda self, **options: None)
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
        if self.is_whole(page):
            self._unheld_by_free.push(page, free)

    monkeypatch.setattr(Pages, "_list", list_page)
    monkeypatch.setattr(Pages, "_is_unheld", Pages._has_free)
    monkeypatch.setattr(SharedBlocks, "move", move)


def a_live_states_page_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    take = SharedStore.take_live_slot

    def take_live_slot(self: Any) -> int | None:
        slot = take(self)
        self.slots.end_live(slot)
        return slot

    def let_go(self: Any, live: Any) -> None:
        live.live_slot = None
        super(SharedStore, self).let_go(live)

    monkeypatch.setattr(SharedStore, "take_live_slot", take_live_slot)
    monkeypatch.setattr(SharedStore, "let_go", let_go)


def all_requests_have_one_live_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write there is only right for rows without a request."""
    monkeypatch.setattr("megatron_hybrid_prefix.mcore.state.memory.LiveSlots.bind", lambda *arguments: None)


def routing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_hybrid_prefix.mcore.context.blocks.HybridPrefixBlockAllocator.move_routing", lambda *arguments: None
    )


MUTANTS = [
    *(nothing_is_copied, the_last_move_is_lost, zeroed_before_the_copies, copied_after_the_forward),
    *(held_blocks_move, a_live_states_page_is_given_away, all_requests_have_one_live_slot, routing_stays),
]


@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, zeroed_before_the_copies), ids=lambda mutant: mutant.__name__)
def test_mutants_are_found(tiny_large_states, mutant, monkeypatch):
    """By the answers, the routing, or what the cache checks at each call; `check_integrity` would find some sooner."""
    mutant(monkeypatch)
    monkeypatch.setattr(EngineHarness, "check_integrity", lambda self: None)
    with pytest.raises((AssertionError, CacheCorruptionError)):
        test_blocks_that_move_keep_their_kv_and_their_routing(tiny_large_states)


@pytest.mark.parametrize("clears", [True, False])
def test_blocks_of_requests_hold_numbers(platform, clears, monkeypatch):
    """Half of a float32 state, read as bfloat16, may be NaN. Some attention kernels multiply all of a block, its unused end by zero."""
    model = build_hybrid_model(
        dataclasses.replace(named("tiny-large-states"), dtype="bfloat16"), seed=0, platform=platform
    )
    served = harness(model, 12, states=8, state_dtype="float32")
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


@pytest.mark.parametrize("memory", [{"cache_gb": 0.01}, {"mamba_gb": 0.001}, {"slots": None}])
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


def test_a_request_that_fits_an_empty_memory_runs(tiny):
    """A block and a state take a page each here. A hit would need one more, for the state that it starts from."""
    served = harness(tiny, 8, states=0)
    assert (served.context.layout.total_blocks, served.context.layout.page_blocks) == (8, 1)
    longest = tokens(7, -4, seed=1)
    served.send(longest[: 6 * BLOCK - 4])
    assert served.kept_states
    assert served.send(longest).num_cached_tokens == 0
    served.check()
    served.check_drained()


def test_a_request_that_does_not_fit_beside_its_state_is_refused(tiny):
    served = harness(tiny, 8, states=0)
    refused = served.add(tokens(8, -4, seed=1))
    fits = served.add(tokens(7, -4, seed=2))
    served.run()
    assert served.finished[refused].failed() and not served.finished[fits].failed()
    served.check(fits)
    served.check_drained()


def test_without_room_for_a_state_and_a_block_no_engine_is_built(tiny):
    with pytest.raises(ValueError, match=r"^cache_gb=1.2345678e-05 is too small: .* they need 0.25 MiB$"):
        EngineHarness(tiny, cache_gb=1.2345678e-5)
    with pytest.raises(ValueError, match=r"^cache_gb=0.0: must be above 0$"):
        HybridPrefixConfig(cache_gb=0.0)


def test_a_ratio_of_states_is_refused(tiny):
    with pytest.raises(
        ValueError, match=r"^mamba_memory_ratio=0.3 splits buffer_size_gb, and cache_gb=0.01 has no split"
    ):
        build_engine(tiny, HybridPrefixConfig(cache_gb=0.01), mamba_memory_ratio=0.3)
