"""Routes of experts (router replay): a request has those of its whole sequence, whatever of it was computed before, and by whom."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.context.blocks import HybridPrefixBlockAllocator
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from tests.harness.engine_helpers import cache_gb_for, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, IdTokenizer, tokens
from tests.harness.selection import mostly_slow, nightly_rows
from tests.harness.shared_tiers import written

HOST_GB = 0.05
# Two layers with experts; and experts in the layers that draft, too, whose routes are not of the sequence.
MODELS = {"tiny-moe": 0, "tiny-nemotron-3": 2}


@pytest.fixture(scope="module", params=mostly_slow(MODELS, "tiny-nemotron-3"))
def routed(request, platform) -> tuple[Any, int]:
    return routed_model(request.param), MODELS[request.param]


def routed_model(name: str) -> Any:
    return build_hybrid_model(name, seed=0, moe_enable_routing_replay=True)


def cold_routes(cold: EngineHarness, request: Any) -> np.ndarray:
    """Those of a prefill of the whole sequence without a cache, which megatron itself keeps; the last token was never put in."""
    sequence = request.prompt_tokens.tolist() + list(request.generated_tokens)
    return cold.send(sequence[:-1], count=1).routing_indices


def traffic(model: Any, drafts: int, seed: int) -> tuple[EngineHarness, dict[str, int]]:
    """Prompts with shared starts, next turns, and long answers, in a memory that has too little room for them."""
    dice = random.Random(seed)
    memory = cache_gb_for(model, 12, states=6, block_tokens=BLOCK, max_requests=4, speculative_tokens=drafts)
    fields = {"host_gb": HOST_GB, "enable_chunked_prefill": True, "max_tokens": 2 * BLOCK}
    served = EngineHarness(model, cache_gb=memory, num_speculative_tokens=drafts, **fields)
    starts = [tokens(dice.randint(1, 4), dice.randint(0, 9), seed=1000 * seed + number) for number in range(4)]
    for _ in range(6):
        for _ in range(dice.randint(1, 4)):
            prompt = dice.choice(starts) + random_tokens(dice.randint(1, 40), seed=dice.randrange(2**20))
            served.add(prompt, dice.choice((2, 20, 150)), cache_write=dice.random() < 0.9)
        served.run()
        for request in list(served.finished.values())[-2:]:  # next turns
            starts.append((request.prompt_tokens.tolist() + list(request.generated_tokens))[: 6 * BLOCK])
    stats, preempted = served.context.prefix_stats(), sum(len(each.requests) > 1 for each in served.records.values())
    seen = {"skipped": stats.reused_tokens_device, "loaded": stats.tiers["host"].loads, "preempted": preempted}
    seen |= {"evicted": stats.kv_evictions}
    return served, seen


def check_routes(served: EngineHarness, cold: EngineHarness) -> None:
    for request in served.finished.values():
        assert np.array_equal(request.routing_indices, cold_routes(cold, request))


@pytest.mark.parametrize(("seed",), [(3,), *nightly_rows([(0,), (1,), (2,)])])
def test_routes_of_random_traffic_are_those_of_cold_runs(routed, seed):
    """Bit by bit: hits, loads, chunks, answers, preempted requests, with and without drafts."""
    served, seen = traffic(*routed, seed)
    assert min(seen.values()) > 0 or not routed[1] or seed != 3, seen
    check_routes(served, EngineHarness(routed[0], slots=None))
    served.finish()


def of_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    routes_of = HybridPrefixBlockAllocator.routes_of
    monkeypatch.setattr(HybridPrefixBlockAllocator, "routes_of", lambda self, blocks: routes_of(self, blocks.roll(1)))


def left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By moves, and by copies to the host."""
    init = SharedMemory.__init__

    def only_kv(self: SharedMemory, *args: Any, block: Any, **fields: Any) -> None:
        init(self, *args, block=block, **fields)
        self.kv_rows = self.kv_rows[..., : block.kv_bytes]

    monkeypatch.setattr(SharedMemory, "__init__", only_kv)


@pytest.mark.parametrize("mutant", [of_another_block, left_behind])
def test_mutants_are_found(platform, mutant, monkeypatch):
    model = routed_model("tiny-moe")
    cold = EngineHarness(model, slots=None)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_routes(traffic(model, 0, 1)[0], cold)


def test_stop_words_forks_and_full_hits(platform):
    """A request that a stop word ends has routes of the tokens that are left. Forks and a prompt of whole blocks share blocks."""
    model, prompt = routed_model("tiny-moe"), tokens(3, 0, seed=1)
    served = EngineHarness(model, tokenizer=IdTokenizer())
    answer = served.send(prompt, count=9).generated_tokens
    served.add(prompt, 9, params={"stop_words": [f"{answer[3]} {answer[4]}"]})
    served.send(*3 * [prompt], count=70)
    assert len(served.finished[2].generated_tokens) < 9 and served.finished[3].num_cached_tokens == 2 * BLOCK
    check_routes(served, EngineHarness(model, slots=None))


def test_other_engines_have_the_routes_from_a_shared_tier_and_none_without(platform, tmp_path, monkeypatch):
    """Entries of an engine that records no routes are of another name: what has no routes is computed."""
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", 32 * "s")
    models = [build_hybrid_model("tiny-moe", seed=0, moe_enable_routing_replay=records) for records in (False, True)]
    cold = EngineHarness(models[1], slots=None)
    for records, cached_blocks in ((0, 0), (1, 0), (0, 3), (1, 3)):
        served = EngineHarness(models[records], host_gb=HOST_GB, shared=f"file://{tmp_path}?gb=1&min_tokens={BLOCK}")
        request = served.send(tokens(3, 9, seed=1))
        assert request.num_cached_tokens == cached_blocks * BLOCK
        assert not records or np.array_equal(request.routing_indices, cold_routes(cold, request))
        written(served)
        served.finish()


@pytest.mark.parametrize("prefix", [None, HybridPrefixConfig()])
def test_a_model_without_experts_has_no_routes(platform, prefix):
    model = build_hybrid_model("tiny", seed=0, moe_enable_routing_replay=True)
    with pytest.raises(ValueError, match=r"^moe_enable_routing_replay=True: .*: the model has no experts; use False$"):
        build_engine(model, prefix)


def test_a_step_without_routes_is_refused(platform, monkeypatch):
    """Zeros would look like routes."""
    served = EngineHarness(routed_model("tiny-moe"))
    monkeypatch.setattr(served.engine.controller, "_router_record_bookkeeping", lambda: None)
    served.add(tokens(1, 9, seed=1))
    with pytest.raises(RuntimeError, match="a router did not record"):
        served.step()
