"""Reports about requests and the cache: cached tokens, counters, logs, budgets, mixers."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.engines import dynamic_engine
from megatron.core.inference.utils import InferenceMode
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
from megatron_hybrid_prefix.mcore import restore_mixers, use_slot_mixers
from megatron_hybrid_prefix.mcore.runner import run_batch
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.serve.metrics import engine_snapshot
from megatron_hybrid_prefix.upstream.blocks import block_counts
from tests.harness.engine_helpers import cache_gb_for, greedy
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens

# -- what was skipped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_cached_tokens_counters_and_statistics_agree(model, chunked):
    served = EngineHarness(model, enable_chunked_prefill=chunked, max_tokens=(2 if chunked else 16) * BLOCK)
    shared = tokens(3, 0, seed=1)
    sent = [
        (tokens(0, 9, seed=2), 0, "below_one_block"),
        (shared + tokens(2, 20, seed=3), 0, "no_such_prefix"),
        (shared + tokens(0, 20, seed=4), 0, "states_gone"),
        (shared + tokens(0, 21, seed=5), 3 * BLOCK, None),
        (shared + tokens(2, 20, seed=3), 5 * BLOCK, None),
        # A token has to be computed, so not from the state after 5 blocks.
        (shared + tokens(2, 0, seed=3), 3 * BLOCK, "states_gone"),
    ]
    computed = []
    for prompt, expected, reason in sent:
        before = served.context.lifetime_prefill_token_count
        request = served.send(prompt)
        computed.append(served.context.lifetime_prefill_token_count - before)
        assert (request.num_cached_tokens, computed[-1]) == (expected, len(prompt) - expected)
        assert request.sampling_params.cache_reuse["reason"] == reason
    served.check()
    engine, stats = served.engine, served.context.prefix_stats().as_dict()
    skipped = sum(expected for _, expected, _ in sent)
    hits = sum(expected > 0 for _, expected, _ in sent)
    assert Counter(stats["not_reused"]) == Counter(reason for *_, reason in sent if reason)
    assert engine._prefix_cache_hits == hits
    assert engine._prefix_cache_blocks_matched == skipped // BLOCK
    assert engine._prefill_tokens_computed == stats["computed_prompt_tokens"] == sum(computed)
    assert engine._prefill_tokens_skipped == stats["reused_tokens"] == stats["reused_tokens_device"] == skipped
    assert stats["prompt_tokens"] == sum(len(prompt) for prompt, *_ in sent)
    assert stats["slots_used"] == served.kept_states and stats["slots_total"] == 32
    assert stats["checkpoints_published"] == sum(stats["checkpoints_by_reason"].values()) == served.kept_states
    layout = served.context.layout
    assert stats["bytes_budget"] == layout.total_blocks * layout.block_bytes
    assert stats["fallbacks"] == {}
    served.check_drained()


def test_console_and_metrics_say_what_was_skipped(model, caplog, monkeypatch):
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(dynamic_engine, "HAVE_WANDB", True)
    served = EngineHarness(model, logging_step_interval=1)
    # Set afterwards: with a writer megatron 0.19's constructor asks the context for one, which has none.
    served.engine.metrics_writer = SimpleNamespace(__name__="wandb", log=lambda metrics, commit: logged.append(metrics))
    served.engine.inference_step_offset = 0
    prompt = tokens(2, 20, seed=1)
    with caplog.at_level(logging.INFO):
        served.send(prompt)
        assert "hits" not in caplog.text and "inference/prefix_cache_hits" not in logged[-1]
        served.send(prompt)
        served.send(tokens(1, 0, seed=1) + tokens(0, 5, seed=2))  # KV without a state
    lines = [record.getMessage() for record in caplog.records if "prefill (cumul)" in record.getMessage()]
    assert len(lines) == len(logged) >= 12
    total, skipped = 2 * len(prompt) + BLOCK + 5, 2 * BLOCK
    share = 100 * skipped / total
    assert "prefix cache (cumul): 1 hits, 2 blocks matched" in lines[-1]
    assert f"prefill (cumul): computed {total - skipped}, skipped {skipped} ({share:.1f}% skipped)" in lines[-1]
    count = block_counts(served.context.kv_block_allocator).total
    assert f"prefix cache util: KV 2/{count} blocks cached (2 evictable)" in lines[-1]
    assert logged[-1]["inference/prefix_cache_hits"] == 1
    assert logged[-1]["inference/prefix_cache_blocks_matched"] == 2
    assert logged[-1]["inference/total_blocks"] == count - 1
    assert max(metrics["inference/active_unique_blocks"] for metrics in logged) == 3
    assert served.context.prefix_stats().reused_tokens == skipped
    served.check()


def test_counters_start_again_with_the_engine(model):
    """A request whose step never finished must not count as a hit later."""
    served = EngineHarness(model)
    prompt = tokens(2, 20, seed=1)
    served.send(prompt)
    served.add(prompt)
    served.engine.schedule_waiting_requests()
    served.engine.reset()
    served.send(tokens(1, 5, seed=2))
    engine = served.engine
    assert (engine._prefix_cache_hits, engine._prefix_cache_blocks_matched) == (0, 0)
    assert (engine._prefill_tokens_computed, engine._prefill_tokens_skipped) == (BLOCK + 5, 0)


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 2])
def test_memory_report_says_what_memory_is_for(tiny_mtp, drafts):
    served = EngineHarness(tiny_mtp, slots=5, max_requests=4, blocks=20, num_speculative_tokens=drafts)
    report = served.context.memory_report().splitlines()
    assert report[0] == "recurrent states: 0.023 MiB each, SSM in float32"
    blocks = served.context.layout.total_blocks
    assert report[1].endswith(
        f" for KV and states: {blocks} KV blocks of 0.062 MiB, or {blocks // 2} pages of 2 blocks for 5 states"
    )
    rings = f"{0.129 if drafts else 0.088} MiB set aside for 4 rings"
    capped = "  mamba_gb=0.000114441: at most 5 states cached, 0.117 MiB"
    assert report[2:] == [f"  decodes: states are written every 8 tokens, {rings}", capped]


def test_bytes_used_with_one_budget_are_those_of_pages(model):
    """Blocks behind the last whole page belong to no state."""
    cache_gb = cache_gb_for(model, 7, block_tokens=16, max_requests=4, states=3)
    served = EngineHarness(model, cache_gb=cache_gb, mamba_gb=None, block_size_tokens=16, decode_checkpoints=False)
    layout = served.context.layout
    assert layout.total_blocks % layout.page_blocks
    served.send(tokens(1, 20, seed=1), count=1)
    found = {(name, *labels.values()): value for _, name, value, labels in engine_snapshot(served.engine)}
    checkpoints, running = (found["memory_bytes", owner] for owner in ("checkpoints", "states_running"))
    assert found["bytes_used",] == checkpoints + running > 0


def test_the_policy_is_logged_once_at_the_start(model, caplog):
    with caplog.at_level(logging.INFO):
        served = EngineHarness(model, slots=5, retention_interval_tokens=2 * BLOCK, decode_checkpoints=False)
    (line,) = [record.message for record in caplog.records if "prefix cache: " in record.message]
    assert "at most 5 states cached" in line
    assert served.context.policy_report() in line
    assert served.context.policy_report() == (
        f"prefix cache: blocks of {BLOCK} tokens, SSM chunks of 128; intervals every {2 * BLOCK} tokens, decode off; "
        "eviction recompute_cost; hits equal misses up to rounding"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slots": 0}, "mamba_gb=0 has no room for a cached state"),
        ({"block_size_tokens": 1024}, "block_size_tokens=1024 is not less than max_sequence_length=1024"),
    ],
)
def test_settings_that_make_hits_impossible_are_warned_of(model, caplog, fields, said):
    with caplog.at_level(logging.WARNING):
        EngineHarness(model, **fields)
    assert sum(said in record.message for record in caplog.records) == 1


def test_prompts_that_are_all_shorter_than_a_block_are_warned_of_once(model, caplog):
    served, other = EngineHarness(model), EngineHarness(model)
    other.send(tokens(1, 1, seed=0), count=1)
    with caplog.at_level(logging.WARNING):
        for number in range(80):
            served.send(tokens(0, 5 + number % BLOCK // 2, seed=number), count=1)
            other.send(tokens(0, 5, seed=number), count=1)
    assert sum("none fills a block" in record.message for record in caplog.records) == 1


def test_a_request_reports_tokens_lost_without_a_state(model):
    served = EngineHarness(model, slots=1)
    prompt = tokens(3, 5, seed=1)
    served.send(prompt)
    served.send(tokens(1, 5, seed=2))  # takes the slot
    (result,) = run_batch(served.engine, [prompt], greedy(3))
    assert (result.reused_tokens, result.computed_tokens) == (0, len(prompt))
    lost = {"seen_tokens": 3 * BLOCK, "kv_tokens": 3 * BLOCK, "state_tokens": 0, "resume_tokens": 0}
    assert result.reuse == lost | {"reason": "states_gone"}
    assert served.context.prefix_stats().lost_tokens_no_state == 3 * BLOCK
    (again,) = run_batch(served.engine, [prompt], greedy(3))
    assert again.reuse == {"reason": None} | dict.fromkeys(lost, 3 * BLOCK)


# -- mixers ------------------------------------------------------------------------------------------------------------


def mixers_of(model: Any) -> list[Any]:
    """The engine's Mamba mixers."""
    return [module for module in model.modules() if isinstance(module, MambaMixer)]


def test_a_built_model_is_served_and_given_back(model):
    mixers = mixers_of(model)
    assert {type(mixer) for mixer in mixers} == {MambaMixer}
    names = [name for name, _ in model.named_parameters()]
    prompt = tokens(2, 20, seed=1)

    ours = EngineHarness(model)
    assert all(isinstance(mixer, HybridPrefixMambaMixer) for mixer in mixers)
    assert use_slot_mixers(model) == 0  # done already
    # Two engines around one model, one with caching off, in turns.
    off = EngineHarness(model, slots=None)
    for _ in range(2):
        for served in (ours, off):
            served.send(prompt)
            served.check()
    assert (ours.finished[2].num_cached_tokens, off.finished[2].num_cached_tokens) == (2 * BLOCK, 0)

    assert restore_mixers(model) == len(mixers)
    assert restore_mixers(model) == 0
    assert {type(mixer) for mixer in mixers} == {MambaMixer}
    assert [name for name, _ in model.named_parameters()] == names
    after = EngineHarness(model, slots=None)
    after.send(prompt)
    after.send(prompt + tokens(1, 3, seed=2))
    after.check()
    assert after.finished[1].generated_log_probs == off.finished[1].generated_log_probs  # bit by bit
    again = EngineHarness(model)
    assert [again.send(prompt).num_cached_tokens for _ in range(2)] == [0, 2 * BLOCK]
    again.check()


def test_forward_of_training_is_unchanged(platform, monkeypatch):
    """Outputs and gradients, bit by bit."""
    monkeypatch.setattr(InferenceMode, "is_active", lambda: False)
    model = build_hybrid_model("tiny", seed=5, platform=platform).requires_grad_()
    mixer = mixers_of(model)[0]
    hidden = torch.randn(150, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(1))

    def run() -> tuple[torch.Tensor, ...]:
        x = hidden.clone().requires_grad_()
        out, _ = mixer(x)
        out.square().sum().backward()
        gradients = [parameter.grad for parameter in mixer.parameters()]
        mixer.zero_grad(set_to_none=True)
        return (out.detach(), x.grad, *gradients)

    before = run()
    assert use_slot_mixers(model) > 0
    after = run()
    assert len(before) == len(after) > 5
    for one, other in zip(before, after, strict=True):
        assert float(one.abs().sum()) > 0
        assert torch.equal(one, other)
    monkeypatch.undo()
    served = EngineHarness(model)
    served.send(tokens(1, 9, seed=1))
    served.check()
