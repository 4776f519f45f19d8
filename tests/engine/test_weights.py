"""Weights that change though nobody says so: they are noticed, and states of old ones are never served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.quantization.mxfp8_tensor import MXFP8Tensor
from megatron.core.transformer.moe.router import TopKRouter

from megatron_hybrid_prefix.mcore.state.weights import WeightSamples
from megatron_hybrid_prefix.ops.samples import SampledSums
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens
from tests.harness.refits import WAYS, assign_data, copy_in_place

PROMPT = tokens(2, 30, seed=1)
ON_HOST = {"slots": 4, "blocks": 20, "host_gb": 0.02}


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way", "mode", "cache"),
    [
        *(("tiny", way, "legacy", {}) for way in WAYS),
        ("tiny-gdn", "data.copy_", "async", {}),
        ("tiny-moe", "AdamW", "legacy", {}),
        ("tiny", "data.copy_", "async", ON_HOST),
    ],
)
def test_an_idle_engine_notices_at_the_next_request(own_models, name, way, mode, cache, caplog):
    model, trained = own_models(name)
    served = EngineHarness(model, async_sched_mode=mode, **cache)
    prompts = [PROMPT, *(tokens(2, 30 + seed, seed=seed) for seed in range(2, 14) if cache)]
    served.send(*prompts)
    assert served.send(PROMPT).num_cached_tokens == 2 * BLOCK
    first = served.next_id + 1
    WAYS[way](model, trained)
    assert [served.send(prompt).num_cached_tokens for prompt in prompts] == [0] * len(prompts)
    assert served.send(prompts[-1]).num_cached_tokens == 2 * BLOCK
    served.check(*range(first, served.next_id + 1))
    assert served.context.prefix_stats().invalidations == 1
    (said,) = [record.message for record in caplog.records if "nobody announced" in record.message]
    assert "tensors differ, first " in said and "engine.invalidate()" in said
    served.check_drained()


@pytest.mark.parametrize("announced", ["before", "after"])
def test_a_change_that_is_announced_too_drops_nothing_twice(own_models, announced, caplog):
    """Also where a trainer announces it before it writes."""
    model, trained = own_models("tiny")
    served = EngineHarness(model)
    served.send(PROMPT)
    if announced == "before":
        served.engine.invalidate()
    assign_data(model, trained)
    if announced == "after":
        served.engine.invalidate()
    assert [served.send(PROMPT).num_cached_tokens for _ in range(2)] == [0, 2 * BLOCK]
    served.check(2, 3)
    assert not caplog.records


def test_weights_written_before_the_first_request_are_those_of_the_engine(own_models, caplog):
    model, trained = own_models("tiny")
    served = EngineHarness(model)
    copy_in_place(model, trained)
    assert [served.send(PROMPT).num_cached_tokens for _ in range(2)] == [0, 2 * BLOCK]
    served.check()
    assert not caplog.records


def test_it_looks_once_per_idle_time_and_never_while_suspended(own_models, monkeypatch):
    """Trainers unmap weights between suspend and resume."""
    model, _ = own_models("tiny")
    served = EngineHarness(model, keep_on_resume=True)
    looks = []
    original = WeightSamples.changed
    monkeypatch.setattr(
        WeightSamples, "changed", lambda self, **how: looks.append(served.engine.state) or original(self, **how)
    )
    served.send(PROMPT, tokens(1, 9, seed=2))
    assert len(looks) == 1
    served.add(PROMPT, 9)
    served.step(2)
    served.send(tokens(1, 20, seed=3))
    assert len(looks) == 2
    served.engine.suspend()
    with monkeypatch.context() as unmapped:
        fail = raising(AssertionError("reads weights of a suspended engine"))
        unmapped.setattr(SampledSums, "__call__", fail)
        unmapped.setattr("megatron_hybrid_prefix.mcore.engine.engine.invalidate_layers", fail)
        served.engine._generation_epoch = 3
        served.engine.invalidate()
        served.add(PROMPT)
        served.engine.reset()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    served.engine.resume()
    assert looks == [EngineState.RUNNING] * 2 + [EngineState.SUSPENDED]  # a collective, so also where it was announced
    served.send(PROMPT)
    served.check(served.next_id)


@pytest.mark.parametrize(("left", "mode"), [("refused", "async"), ("aborted", "legacy"), ("aborted", "async")])
def test_an_engine_that_has_only_requests_to_return_is_idle(own_models, left, mode):
    """A step has still to take them out."""
    model, trained = own_models("tiny")
    served = EngineHarness(model, async_sched_mode=mode)
    served.send(PROMPT)
    if left == "refused":
        with pytest.warns(UserWarning, match="failed to be added"):
            served.add(tokens(100, 0, seed=5))
    else:
        running = served.add(tokens(1, 40, seed=2), BLOCK)
        served.step(4)
        served.engine.abort_request(running)
    copy_in_place(model, trained)
    assert served.send(PROMPT).num_cached_tokens == 0
    served.check(served.next_id)


@pytest.mark.parametrize(("state", "expected"), [("PAUSED", 1), ("RUNNING", 0)])
def test_a_paused_engine_looks_when_it_goes_on(own_models, state, expected, monkeypatch):
    """Its requests were not finished, so it was not idle."""
    model, trained = own_models("tiny")
    served = EngineHarness(model)
    served.send(PROMPT)
    running = served.add(tokens(1, 40, seed=2), 9)
    served.step(2)
    engine = served.engine
    engine.state = EngineState[state]
    copy_in_place(model, trained)

    def signal(self):
        if self.state == EngineState.PAUSED:
            self.state = EngineState.UNPAUSING
        return 0

    monkeypatch.setattr("megatron.core.inference.engines.DynamicInferenceEngine.schedule_requests", signal)
    for _ in range(3):
        engine.schedule_requests()
    assert served.context.prefix_stats().invalidations == expected
    engine.state = EngineState.RUNNING
    served.run()
    assert len(served.finished[running].generated_tokens) == 9
    assert served.send(PROMPT).num_cached_tokens == 0
    served.check(served.next_id)


def test_expert_ranks_look_together_when_the_first_of_them_has_work(model, monkeypatch):
    """Not each at its own first request: others may be in a forward, which waits for all."""
    served, looks, peers = EngineHarness(model), [], iter([0, 0, 3, 2, 0, 1])
    engine = served.engine

    async def all_reduce_max(*values: int, async_op: bool) -> tuple[int, int]:
        return next(peers), values[1]

    engine.use_coordinator, engine.ep_world_size, engine._last_ep_consensus = True, 2, (0, False)
    engine.expert_parallel_zmq_communicator = SimpleNamespace(all_reduce_max=all_reduce_max)
    monkeypatch.setattr(WeightSamples, "changed", lambda self, *, experts: looks.append(experts))
    for _ in range(6):
        engine._last_ep_consensus = asyncio.run(engine._ep_establish_consensus(0, False))
    assert looks == [True, True]
    served.add(PROMPT)
    engine.schedule_waiting_requests()
    assert looks == [True, True] and served.context.total_request_count == 1
    engine.use_coordinator, engine.ep_world_size = False, 1
    served.run()


# -- what is sampled ---------------------------------------------------------------------------------------------------


class PrivateParts(torch.Tensor):
    """A quantised weight in the way of Transformer Engine: its parts are private attributes."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        made._data, made._scale_inv, made.main_grad = data, scale, torch.zeros(4)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(function))


class Annotated(torch.nn.Parameter):
    """An ordinary weight with a private tensor."""

    _master = torch.zeros(3)


class NamedParts(PrivateParts):
    """In the way of PyTorch: it names its parts."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_scale_inv"], None


class Weights(torch.nn.Module):
    """One tensor of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 48))
        self.tied = self.weight
        self.bias = torch.nn.Parameter(torch.randn(3))
        self.none = None
        self.transposed = torch.nn.Parameter(torch.randn(7, 5).T)
        self.wholes = [torch.randn(6, 10)]
        self.part = torch.nn.Parameter(self.wholes[0][:, :4])
        self.register_buffer("expert_bias", torch.zeros(8))
        self.register_buffer("frequencies", torch.randn(5), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("local_tokens_per_expert", torch.zeros(8), persistent=False)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 4))
        self.annotated = Annotated(torch.randn(9))
        self.annotated._master = torch.zeros(3)
        self.private = torch.nn.Parameter(PrivateParts(torch.randn(9), torch.ones(2)), requires_grad=False)
        self.named = torch.nn.Parameter(NamedParts(torch.randn(9), torch.ones(2)), requires_grad=False)
        self.quantised = MXFP8Tensor(torch.randn(4, 32).to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8))
        self.steps = torch.zeros(3)  # no weight


CHANGES: dict[str, Callable[[Weights], object]] = {
    "parameter": lambda made: made.weight.data[5].add_(1),
    "replaced": lambda made: setattr(made, "bias", torch.nn.Parameter(made.bias.data + 1)),
    "transposed": lambda made: made.transposed.data[-1, -1].add_(1),
    "part of a tensor": lambda made: made.part.data[-1, -1].add_(1),
    "buffer": lambda made: made.expert_bias[3].add_(1),
    "other buffer": lambda made: made.frequencies[4].add_(1),
    "data": lambda made: made.private._data[3].add_(1),
    "scale": lambda made: made.private._scale_inv[1].mul_(2),
    "named data": lambda made: made.named._data[3].add_(1),
    "named scale": lambda made: made.named._scale_inv[1].mul_(2),
    "mxfp8 data": lambda made: made.quantised.data.view(torch.uint8)[2].add_(1),
    "mxfp8 scale": lambda made: made.quantised.scale[0].add_(1),
    "other mxfp8": lambda made: setattr(
        made, "quantised", MXFP8Tensor(made.quantised.data.clone(), made.quantised.scale + 1)
    ),
    "quantised": lambda made: (made.__delattr__("weight"), setattr(made, "weight", made.quantised)),
    "removed": lambda made: setattr(made, "bias", None),
    "added": lambda made: setattr(made, "late", torch.zeros(3)),
    "tied": lambda made: setattr(made, "tied", torch.nn.Parameter(made.weight.data + 1)),
    "module replaced": lambda made: made.inner.__setitem__(0, torch.nn.Linear(3, 4)),
    "module added": lambda made: setattr(made, "outer", torch.nn.Linear(3, 4)),
    "annotated": lambda made: made.annotated.data.add_(1),
}
NO_CHANGES: dict[str, Callable[[Weights], object]] = {
    "nothing": lambda made: None,
    "equal values elsewhere": lambda made: setattr(made.weight, "data", made.weight.data.clone()),
    "gradient": lambda made: (made.private.main_grad.add_(1), setattr(made.bias, "grad", torch.ones(3))),
    "other attribute": lambda made: made.steps.add_(1),
    "counter of training": lambda made: made.local_tokens_per_expert.add_(1),
    "equal values at an odd address": lambda made: setattr(
        made.bias, "data", torch.cat([torch.zeros(1), made.bias.data])[1:]
    ),
    "what lies between": lambda made: made.wholes[0][:, 4:].add_(1),
}


@pytest.mark.parametrize("change", CHANGES | NO_CHANGES)
def test_each_tensor_is_looked_at_and_nothing_else_is(change):
    made = Weights()
    samples = WeightSamples(made)
    (CHANGES | NO_CHANGES)[change](made)
    assert bool(samples.changed(experts=False)) == (change in CHANGES)
    samples.take()
    assert samples.changed(experts=False) is None


def test_a_cast_of_the_model_and_what_its_router_makes_of_it_are_no_news(own_models):
    """Megatron casts a router's bias back in its next forward."""
    model, _ = own_models("tiny-moe")
    router = next(module for module in model.modules() if isinstance(module, TopKRouter))
    vars(router).pop("expert_bias", None)
    router.register_buffer("expert_bias", torch.randn(router.config.num_moe_experts).to(torch.bfloat16))
    samples = WeightSamples(model)
    router._maintain_float32_expert_bias()
    assert samples.changed(experts=False) is None


def test_each_step_of_adamw_in_bf16_is_noticed():
    """At a learning rate of 1e-6 about one weight in 25 changes: 1,000 of 1,000."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(128, 256, generator=generator) * 0.02).to(torch.bfloat16))
    samples = WeightSamples(torch.nn.ParameterList([weight]))
    optimizer = torch.optim.AdamW([weight], lr=1e-6)
    changed = []
    for step in range(1000):
        before = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=generator).to(torch.bfloat16)
        optimizer.step()
        changed.append((weight != before).float().mean().item())
        assert samples.changed(experts=False), step
        samples.take()
    assert max(changed) < 0.1


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("change", "kinds"), [(copy_in_place, ["a kind"]), (assign_data, [])])
def test_graphs_that_read_old_weights_are_left(own_models, change, kinds, resumes, caplog):
    model, trained = own_models("tiny")
    served = EngineHarness(model)
    served.send(PROMPT)
    engine, context = served.engine, served.context
    engine._captured_at, context.cuda_graph_batch_dimensions_list = engine._weights_at(), ["a kind"]
    if resumes:
        engine.suspend()
    change(model, trained)
    engine.invalidate()
    if resumes:
        engine.resume()
    assert context.cuda_graph_batch_dimensions_list == kinds
    assert sum("without graphs" in message for message in caplog.messages) == (not kinds)
    context.cuda_graph_batch_dimensions_list = []
    assert served.send(PROMPT).num_cached_tokens == 0
    served.check(served.next_id)
