"""Fields of megatron's `InferenceConfig` that RL trainers set: each works, or is refused in one line."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.engines import dynamic_engine
from megatron.core.inference.sampling import flashinfer_sampling

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.sampling import SamplingOptions
from tests.engine.test_row_sampling import naive_probabilities, row
from tests.harness.engine_helpers import assert_matches, random_tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.rl import BLOCK, Rollouts, rl_engine, sampling

PERSIST, OFFLOAD, RECOMPUTE = KVCacheManagementMode
KEEPS = HybridPrefixConfig(keep_on_resume=True)
BITS = HybridPrefixConfig(cache_gb=0.02, exact="bits")
PROMPT = random_tokens(2 * BLOCK + 30, seed=3)


class Saver:
    """Stands for torch_memory_saver: what it pauses is lost, unless it was told to back it up."""

    lost: Sequence[torch.Tensor] = ()

    def region(self, tag: str, enable_cpu_backup: bool) -> Any:
        self.backs_up = enable_cpu_backup
        return nullcontext()

    def pause(self, tag: str) -> None:
        self.backup = [tensor.clone() for tensor in self.lost]
        for tensor in self.lost:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, in any float type

    def resume(self, tag: str) -> None:
        if self.backs_up:
            for tensor, before in zip(self.lost, self.backup, strict=True):
                tensor.copy_(before)


def with_saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    saver = Saver()
    monkeypatch.setattr(dynamic_context, "HAVE_TORCH_MEMORY_SAVER", True)
    monkeypatch.setattr(dynamic_context, "torch_memory_saver", saver, raising=False)
    monkeypatch.setattr(dynamic_context, "device_memory_summary", str, raising=False)
    return saver


def with_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. (Unified memory stays in place while the engine is suspended.)"""
    monkeypatch.setattr(dynamic_context, "create_unified_mempool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())


def with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's functions that sample without filters."""

    def sample(probabilities: torch.Tensor, deterministic: bool, generator: torch.Generator) -> torch.Tensor:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    def as_it_is(probabilities: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return probabilities

    functions = {"sampling_from_probs": sample, "top_k_renorm_probs": as_it_is, "top_p_renorm_probs": as_it_is}
    fake = SimpleNamespace(sampling=SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer_sampling, "flashinfer", fake)


class Writer(list[dict[str, Any]]):
    """Stands for the module wandb."""

    __name__, run = "wandb", None

    def log(self, metrics: dict[str, Any], commit: bool) -> None:
        self.append(metrics)

    def define_metric(self, name: str, step_metric: str) -> None:
        """Nothing to define."""


def with_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_engine, "HAVE_WANDB", True)
    monkeypatch.setattr(dynamic_engine, "wandb", Writer(), raising=False)


def managed(mode: KVCacheManagementMode, *, static: bool, level: int = 0) -> dict[str, Any]:
    return {"kv_cache_management_mode": mode, "static_kv_memory_pointers": static, "unified_memory_level": level}


def shown(value: Any) -> str:
    """Of a parameter; the same in each process."""
    return getattr(value, "__name__", str(value))


# What the machine has, the fields, and whether what is cached is there after a suspension that keeps it.
WORK = [
    (None, managed(PERSIST, static=False), True),
    (None, managed(PERSIST, static=True), True),
    (None, managed(OFFLOAD, static=False), True),
    (with_saver, managed(OFFLOAD, static=True), True),
    (None, managed(RECOMPUTE, static=False), False),
    (with_saver, managed(RECOMPUTE, static=True), False),
    (with_saver, managed(RECOMPUTE, static=True) | {"checkpoint_dtype": "int8"}, False),
    (None, managed(PERSIST, static=False, level=1), True),  # megatron warns, and goes on without
    (with_unified_memory, managed(PERSIST, static=True, level=1) | {"paused_buffer_size_gb": 0.01}, True),
    (with_unified_memory, managed(RECOMPUTE, static=True, level=1), False),
    (None, {"sampling_backend": "flashinfer"}, True),  # likewise
    (with_flashinfer, {"sampling_backend": "flashinfer"}, True),
    (with_wandb, {"logging_step_interval": 1, "metrics_writer": Writer()}, True),
    (None, {"max_requests": 32, "mamba_memory_ratio": 0.1, "num_cuda_graphs": -1}, True),
]


@pytest.mark.parametrize(("machine", "fields", "stays"), WORK, ids=shown)
@pytest.mark.filterwarnings("ignore:sampling_backend='flashinfer':UserWarning", "ignore:Unified memory:UserWarning")
def test_a_field_works(model, machine, fields, stays, monkeypatch):
    saver = machine and machine(monkeypatch)
    kept_in = fields.get("checkpoint_dtype")
    others = {name: value for name, value in fields.items() if name != "checkpoint_dtype"}
    rollouts = Rollouts(rl_engine(model, replace(KEEPS, checkpoint_dtype=kept_in), **others))
    captures, buffer, states = [], rollouts.engine.context.shared_memory.buffer, rollouts.engine.context.states
    if saver is not None:  # all that is made with the states, but for what is on the host
        made = {**vars(states.step), **states.step._tensors, **vars(states.decodes), **states.decodes._tensors}
        saver.lost = [buffer, *(x for name, x in made.items() if isinstance(x, torch.Tensor) and name != "_pinned")]
    monkeypatch.setattr(rollouts.engine, "create_cuda_graphs", lambda: captures.append(1))
    sent = [rollouts.send(PROMPT)]
    rollouts.run()
    rollouts.engine.suspend()
    rollouts.engine.resume()
    if fields.get("static_kv_memory_pointers"):  # graphs that were captured go on reading this memory
        assert not captures and rollouts.engine.context.shared_memory.buffer is buffer
    for _ in range(2):
        sent.append(rollouts.send(PROMPT))
        rollouts.run()
    answers = [rollouts.finished[number] for number in sent]
    assert [answer.num_cached_tokens for answer in answers] == [0, 2 * BLOCK * stays, 2 * BLOCK]
    reference = NaiveHybridModel(model, model.hybrid_config)
    for answer in answers:
        assert_matches(reference, answer, 0.1 if kept_in else 1e-5, sampled=True)
    if machine is with_wandb:
        assert fields["metrics_writer"][-1]["inference/prefix_cache_hits"] == 2
    if machine is with_flashinfer:
        assert type(rollouts.engine.controller._sampling._backend).__name__ == "FlashInferSampling"
    if machine is with_unified_memory:
        assert rollouts.engine.context.unified_memory_level == 1


NEEDS_A_SAVER = "^Static KV memory pointers require UVM or torch_memory_saver when not persisted"
REFUSED = [
    (None, managed(OFFLOAD, static=True), NEEDS_A_SAVER),
    (None, managed(RECOMPUTE, static=True), NEEDS_A_SAVER),
    (
        with_unified_memory,
        managed(OFFLOAD, static=True, level=1),
        "^kv_cache_management_mode='offload' does not go with unified_memory_level=1: .*; use 'persist'$",
    ),
    (None, {"use_flashinfer_fused_rope": True}, "^flashinfer is not installed$"),
    (None, {"num_speculative_tokens": 1}, "^logprobs_mode='processed_logprobs' is not yet supported with speculative"),
]


@pytest.mark.parametrize(("machine", "fields", "said"), REFUSED, ids=shown)
def test_a_field_is_refused(model, machine, fields, said, monkeypatch):
    if machine is not None:
        machine(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=said) as error:
        rl_engine(model, KEEPS, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prefix", [None, HybridPrefixConfig(cache_gb=0.02)])
def test_a_ratio_of_one_memory_says_nothing(model, prefix, caplog):
    with caplog.at_level(logging.INFO, logger="megatron_hybrid_prefix"):
        given, none = (rl_engine(model, prefix, mamba_memory_ratio=ratio).context for ratio in (0.1, None))
    said = [record.message for record in caplog.records if "ratio" in record.message]
    assert said == ["mamba_memory_ratio=0.1 is ignored: KV and states share one memory"]
    assert (given.max_requests, given.layout) == (none.max_requests, none.layout)


@pytest.mark.parametrize(
    ("name", "cached"), [("tiny", True), ("tiny_gdn", True), ("tiny_gdn", False), ("tiny_mixed", True)]
)
def test_dtypes_that_are_assigned_later(request, name, cached):
    """They hold for layers of every kind, and megatron counts their bytes; the settings of the cache come first."""
    model = request.getfixturevalue(name)

    def types(prefix: HybridPrefixConfig | None = None, **assigned: torch.dtype) -> tuple[set[torch.dtype], ...]:
        rollouts = Rollouts(rl_engine(model, prefix, assigned, enable_prefix_caching=cached))
        sent = [rollouts.send(PROMPT), rollouts.send(PROMPT)]
        rollouts.run()
        assert all(torch.tensor(rollouts.finished[each].generated_log_probs).isfinite().all() for each in sent)
        context = rollouts.engine.context
        counted = context.config.mamba_inference_state_config
        layer_bytes = sum(
            math.prod(getattr(counted, f"{part}_shape")) * getattr(counted, f"{part}_dtype").itemsize
            for part in ("conv_states", "ssm_states")
        )
        assert layer_bytes == context.state_layout.slot_bytes / len(context.model_states.kind_of_layer)
        states = context.shared_memory.states.items()
        return tuple(
            {part.dtype for name, part in states if name.endswith("conv") == window} for window in (False, True)
        )

    bf16, fp32 = torch.bfloat16, torch.float32
    assert types() == ({fp32}, {fp32})
    assert types(ssm_states_dtype=bf16) == ({bf16}, {fp32})
    assert types(ssm_states_dtype=bf16, conv_states_dtype=bf16) == ({bf16}, {bf16})
    if cached:
        assert types(HybridPrefixConfig(state_dtype="float32"), ssm_states_dtype=bf16) == ({fp32}, {fp32})


# -- log-probs ---------------------------------------------------------------------------------------------------------


def test_bits_of_processed_log_probs_where_they_are_the_raw_ones(model):
    """A seeded sample, cold, on a hit and beside another request, in both modes: the same bits."""
    found = []
    for mode in ("processed_logprobs", "raw_logprobs"):
        rollouts = Rollouts(rl_engine(model, BITS, logprobs_mode=mode))
        for count in (1, 1, 2):
            for _ in range(count):
                params = sampling()
                params.add_attributes({"sampling_options": {"seed": 5}})
                rollouts.engine.add_request(rollouts.next_id, PROMPT, params)
                rollouts.next_id += 1
            rollouts.run()
        assert rollouts.finished[1].num_cached_tokens == 2 * BLOCK
        found += [(each.generated_tokens, each.generated_log_probs) for each in rollouts.finished.values()]
    assert len(found) == 8 and all(each == found[0] for each in found)


OTHERS = [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 1}, {"temperature": 1.5, "top_p": 0.5}]


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_bits_of_other_processed_log_probs(model, mode):
    """Greedy, or seeded: alone in an engine that reuses nothing, cold among others with the same options and others, and on a hit."""
    asked = [changed | {"seed": seed} for changed in OTHERS for seed in (1, 2)]
    found = []
    for alone in (True, False, False):
        rollouts = Rollouts(rl_engine(model, replace(BITS, mamba_gb=0.0) if alone else BITS, async_sched_mode=mode))
        for again in (False, True):
            for options in asked:
                params = sampling()
                params.add_attributes({"sampling_options": options})
                rollouts.engine.add_request(rollouts.next_id, PROMPT[: len(PROMPT) - again], params)
                rollouts.next_id += 1
                if alone:
                    rollouts.run()
            rollouts.run()
        found.append(
            [(each.generated_tokens, each.generated_log_probs) for _, each in sorted(rollouts.finished.items())]
        )
    assert len(found[0]) == 2 * len(asked) and found[1] == found[0] == found[2]
    assert {log_prob for _, log_probs in found[0] for log_prob in log_probs} > {0.0}


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_processed_log_probs_of_options_that_megatron_lacks(model, mode):
    """The worker sets top_k and top_p together, which megatron's sampling on PyTorch cannot."""
    options = [
        SamplingOptions(top_k=5, top_p=0.5),
        SamplingOptions(seed=5, temperature=0.7),
        SamplingOptions(frequency_penalty=1.5, min_p=0.01),
        SamplingOptions(top_k=1, logit_bias=((7, 9.0),)),
    ]
    rollouts = Rollouts(rl_engine(model, async_sched_mode=mode))
    for number, each in enumerate([None, *options]):
        params = sampling()
        if number == 1:
            params = sampling(top_k=each.top_k, top_p=each.top_p)
        elif each is not None:
            params.add_attributes({"sampling_options": each.as_dict()})
        rollouts.engine.add_request(number, PROMPT, params)
    rollouts.run()
    reference = NaiveHybridModel(model, model.hybrid_config)
    assert_matches(reference, rollouts.finished[0], sampled=True)
    for number, each in enumerate(options, 1):
        answer = list(rollouts.finished[number].generated_tokens)
        logits = reference.logits(PROMPT + answer)[len(PROMPT) - 1 : -1]
        for position, (of_token, token) in enumerate(zip(logits, answer, strict=True)):
            likely = naive_probabilities(of_token.tolist(), row(each, PROMPT, answer[:position]))
            expected = 0.0 if each.top_k == 1 else torch.tensor(likely[token], dtype=torch.float64).log().item()
            assert rollouts.finished[number].generated_log_probs[position] == pytest.approx(expected, abs=1e-4)
