"""What is chosen on a GPU where a caller leaves it open: how steps are scheduled, and what CUDA graphs capture."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.batch_dimensions_utils import CUDAGraphBatchDimensionBuilder, InferenceBatchDimensions
from megatron.core.transformer.enums import InferenceCudaGraphScope

from megatron_hybrid_prefix.layers.kinds import KINDS
from megatron_hybrid_prefix.mcore.entrypoints import defaults
from megatron_hybrid_prefix.models import build, get_preset
from megatron_hybrid_prefix.upstream.graphs import sizes_of_prefills
from tests.harness.lifecycle_helpers import EngineHarness


class OnGpu:
    """A model that says that it is on a GPU, and was built for CUDA graphs of the whole forward."""

    def __init__(self, model: Any, **config: Any) -> None:
        fields = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": InferenceCudaGraphScope.block} | config
        self._model, self.config = model, SimpleNamespace(**(vars(model.config) | fields))

    def parameters(self) -> Any:
        return iter([SimpleNamespace(device=torch.device("cuda"))])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


GRAPHS = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 2048}
BEST = {"async_sched_mode": "async"} | GRAPHS


@pytest.mark.parametrize(
    ("config", "given", "chosen", "said"),
    [
        ({}, {}, BEST, "asynchronous scheduling, CUDA graphs of the whole forward"),
        (
            {},
            {"materialize_only_last_token_logits": False},
            {"async_sched_mode": "async", "num_cuda_graphs": -1},
            "asynchronous scheduling, CUDA graphs",
        ),
        ({}, {"async_sched_mode": "legacy", "num_cuda_graphs": 3}, {}, None),
        ({}, {"async_sched_mode": "legacy", "num_cuda_graphs": None}, {}, None),
        ({}, {"num_cuda_graphs": 3}, {"async_sched_mode": "async"}, "asynchronous scheduling"),
        (
            {},
            {"num_cuda_graphs": -1, "async_sched_mode": "legacy"},
            {"cuda_graph_max_tokens": 2048},
            "CUDA graphs of the whole forward",
        ),
        (
            {},
            {"cuda_graph_max_tokens": 512, "async_sched_mode": "legacy"},
            {"num_cuda_graphs": -1},
            "CUDA graphs of the whole",
        ),
        ({"inference_cuda_graph_scope": InferenceCudaGraphScope.layer}, {}, BEST, "CUDA graphs of layers"),
        ({"cuda_graph_impl": "none"}, {}, {"async_sched_mode": "async"}, "asynchronous scheduling"),
        (
            {"moe_enable_routing_replay": True},
            {},
            BEST | {"async_sched_mode": "legacy"},
            "legacy scheduling: megatron records",
        ),
        (
            {"sequence_parallel": True},
            {"num_speculative_tokens": 2},
            {"async_sched_mode": "async"},
            "no CUDA graphs: with sequence_parallel",
        ),
    ],
)
def test_the_fastest_is_chosen_and_said(model, config, given, chosen, said, capsys):
    found = defaults.fastest_fields(OnGpu(model, **config), given)
    assert {name: getattr(value, "value", value) for name, value in found.items()} == chosen
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (said is not None) and (said is None or said in lines[0])


def test_what_cannot_be_captured_is_not(model, monkeypatch, capsys):
    """Layers of a kind that waits for the device; graphs of another engine of the same model."""
    with monkeypatch.context() as patched:
        patched.setattr(type(KINDS["mamba2"]), "cuda_graphs", False)
        assert "num_cuda_graphs" not in defaults.fastest_fields(OnGpu(model), {})
    assert "no CUDA graphs: they cannot capture layers of kind mamba2" in capsys.readouterr().err
    monkeypatch.setattr(defaults, "has_graphs", lambda model: True)
    assert "num_cuda_graphs" not in defaults.fastest_fields(OnGpu(model), {})
    assert "those of another engine" in capsys.readouterr().err


def test_nothing_is_chosen_on_a_cpu(model):
    assert EngineHarness(model).context.config.async_sched_mode.value == "legacy"
    assert defaults.fastest_fields(model, {}) == {}


WHOLE = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}


@pytest.mark.parametrize(
    ("preset", "device", "given", "fields", "said"),
    [
        ("tiny", "cpu", {}, {}, None),
        ("tiny", "cuda", {}, WHOLE, None),
        ("tiny", "cuda", {"cuda_graph_impl": "local"}, WHOLE, None),
        ("tiny", "cuda", {"cuda_graph_impl": "none"}, {}, None),
        ("tiny-moe", "cuda", {}, {}, "no CUDA graphs: CUDA graphs with experts need bfloat16"),
    ],
)
def test_a_model_is_built_for_graphs(preset, device, given, fields, said, platform, capsys):
    of = dataclasses.replace(platform, device=torch.device(device))
    config = get_preset(preset)
    assert build._graph_fields(config, "local", of, given) == fields
    err = capsys.readouterr().err
    assert (said or "") in err and bool(err) == (said is not None)


@pytest.mark.parametrize("longest", [64, 128, 300, 512, 2048, 5000])
def test_a_step_is_padded_by_a_third_at_most(longest):
    sizes = sizes_of_prefills(longest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == longest
    for tokens in range(1, longest + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded <= max(256, tokens * 4 / 3 + 1), (tokens, padded)


@pytest.mark.parametrize("fields", [{}, {"cuda_graph_all_prefills": True}, {"max_requests": 3}])
def test_kinds_of_step_left_to_megatron_are_finer(model, fields):
    """Every step of the sizes has a kind, which megatron takes; the kinds of decodes are megatron's."""
    own = EngineHarness(model, **(fields | {"num_cuda_graphs": -1, "max_tokens": 1024})).context
    megatrons = {kind for kind in own.cuda_graph_batch_dimensions_list if not kind.prefill_req_count}
    longest = 1024 if fields.get("cuda_graph_all_prefills") else 512
    for tokens in range(4, longest + 1, 7):
        for prompts in (1, 2):
            real = InferenceBatchDimensions(tokens, prompts, 0)
            kind = CUDAGraphBatchDimensionBuilder.match_graph_config(
                real, own.cuda_graph_batch_dimensions_list, strict=True
            )
            assert kind is not None and kind.token_count <= max(256, tokens * 4 / 3 + 1)
    assert megatrons and all(kind.decode_req_count <= own.max_requests for kind in megatrons)
    fixed = EngineHarness(model, **(fields | {"num_cuda_graphs": 4, "max_tokens": 1024})).context
    plain = EngineHarness(
        model, **(fields | {"num_cuda_graphs": -1, "max_tokens": 1024, "cuda_graph_mixed_prefill_count": 0})
    ).context
    assert 300 not in {kind.token_count for kind in fixed.cuda_graph_batch_dimensions_list}
    assert not any(kind.prefill_req_count for kind in plain.cuda_graph_batch_dimensions_list)
