"""This package's engine and controller with megatron's own context or cache."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.layers.gated_delta_net import GatedDeltaNetBySlots
from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
from megatron_hybrid_prefix.mcore.entrypoints import build
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

MODES = ("legacy", "async")


def engine_over(context_class: type, model: Any, **fields: Any) -> HybridPrefixEngine:
    """Our engine and controller with a context of this class, without our cache."""
    config = build._checked_config(model, None, {"max_sequence_length": 1024} | fields)
    context = context_class(model_config=model.config, inference_config=config)
    return HybridPrefixEngine(build._controller(HybridPrefixController, model, context, None), context)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_over_megatrons_context(tiny, mode):
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    fields = {"async_sched_mode": mode, "enable_chunked_prefill": True, "max_tokens": 64}
    engine, finished = engine_over(DynamicInferenceContext, tiny, **fields), {}
    assert type(engine.context) is DynamicInferenceContext
    engine.add_request(1, random_tokens(150, seed=1), greedy(4))
    run_to_end(engine, finished)
    ours, right = build_engine(tiny, max_sequence_length=1024, **fields), {}
    ours.add_request(1, random_tokens(150, seed=1), greedy(4))
    run_to_end(ours, right)
    assert list(finished[1].generated_tokens) == list(right[1].generated_tokens)


@pytest.mark.parametrize(
    ("ours", "name"),
    [(SlotContext, "should_enable_mtp_kv_cache"), (GatedDeltaNetBySlots, "supports_split_output_projection")],
)
def test_what_main_could_do_by_itself_is_left_off(ours, name, monkeypatch):
    """KV of layers that draft, for which pages have no room; a layer in two parts, around its ``forward``."""
    theirs = next(base for base in ours.__mro__ if base.__module__.startswith("megatron."))
    monkeypatch.setattr(theirs, name, lambda *asked: True, raising=False)
    named = {"num_speculative_tokens": 2} if ours is SlotContext else {}  # megatron may name what it asks about
    assert getattr(theirs, name)(None) and not getattr(ours, name)(None, **named)


def test_megatrons_own_cache_of_a_model_without_recurrent_layers(platform):
    """On a prompt's second sighting it computes as few tokens as with megatron's engine."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    model = build_hybrid_model(get_preset("tiny", layer_pattern="*-*-"), seed=0, platform=platform)
    computed = {}
    for kind in (DynamicInferenceContext, SlotContext):
        engine = engine_over(kind, model, enable_prefix_caching=True, block_size_tokens=64)
        # With megatron's default nothing outlives its last request: a second one comes while the first runs.
        engine.add_request(1, random_tokens(300, seed=2), greedy(30))
        run_to_end(engine, {}, steps=2)
        before = engine.context.lifetime_prefill_token_count
        engine.add_request(2, random_tokens(300, seed=2), greedy(2))
        run_to_end(engine, {})
        computed[kind] = engine.context.lifetime_prefill_token_count - before
    assert computed[SlotContext] == computed[DynamicInferenceContext] < 300
