"""Megatron's engine on a Hugging Face Qwen3-Next's weights says what Hugging Face says (fp32, random weights)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

pytest.importorskip("transformers")

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.hf_helpers import QWEN3_NEXT as CONFIG
from tests.harness.hf_helpers import (
    QWEN3_NEXT_ASKED,
    PromptLogits,
    answers_of_a_batch,
    assert_same_answer,
    make_reference,
)
from tests.harness.hf_state_dict import copy_hf_weights
from tests.harness.workers.launch import run_ranks

pytestmark = pytest.mark.slow
FAR = 1e-2  # a hundred times what is allowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def reference(folder):
    return make_reference(folder, QWEN3_NEXT_ASKED)


@pytest.fixture(scope="module")
def model(platform, reference):
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    copy_hf_weights(model, reference["state_dict"], CONFIG)
    return model


def gap(logits, case):
    return float((logits - case["logits"]).abs().max())


def test_the_reference_is_worth_a_comparison(reference):
    for case in reference["cases"]:
        assert case["logits"].std() > 1.0
        assert len(set(case["tokens"][case["length"] :])) > 2
    for name, weight in reference["state_dict"].items():
        assert weight.unique().numel() > 0.99 * weight.numel(), name
    assert reference["router_margin"] >= 1e-4, "rounding may choose another expert"


def test_logits_of_every_prompt_position(model, reference):
    prompt_logits = PromptLogits(model)
    for case in reference["cases"]:
        assert gap(prompt_logits(case["tokens"]), case) <= 1e-4, f"prompt of {len(case['tokens'])} tokens"


def test_generation_and_prompt_log_probs_of_a_batch(model, reference):
    for number, request in answers_of_a_batch(model, reference).items():
        assert_same_answer(request, reference["cases"][number])


@pytest.mark.multi
def test_two_tensor_parallel_ranks_read_their_shards_of_the_file(reference, folder, tmp_path):
    for rank in run_ranks("hf_qwen3_next.py", tmp_path / "found.json", folder):
        assert rank["logits_gap"] <= 1e-4 and rank["log_probs_gap"] <= 1e-4
        assert rank["values_read"] == rank["values_held"]


def test_swapping_any_two_weights_of_equal_shape_shows(platform, reference):
    """Also two experts of a layer, and one's gate and up projection; so none of them is ignored, or like another."""
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    prompt_logits, weights = PromptLogits(model), reference["state_dict"]
    case = next(case for case in reference["cases"] if case["length"] == 64)
    pairs = [(one, other) for one, other in combinations(weights, 2) if weights[one].shape == weights[other].shape]
    swapped = [weights | {one: weights[other], other: weights[one]} for one, other in pairs]
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        stack = weights[name]
        for one, other in combinations(range(CONFIG.num_moe_experts), 2):
            order = list(range(CONFIG.num_moe_experts))
            order[one], order[other] = other, one
            pairs.append((f"{name}[{one}]", f"[{other}]"))
            swapped.append(weights | {name: stack[order]})
        if "gate_up" in name:
            pairs.append((f"{name}: gate", "up"))
            swapped.append(weights | {name: stack.roll(stack.shape[1] // 2, dims=1)})
    assert len(pairs) > 200
    for pair, wrong in zip(pairs, swapped, strict=True):
        copy_hf_weights(model, wrong, CONFIG)
        assert gap(prompt_logits(case["tokens"]), case) >= FAR, pair


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_base": 10_000},
        {"rotary_fraction": 0.5},
        {"moe_router_topk": 2},
        {"layernorm_epsilon": 1e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_dimension_shows(platform, reference, changes):
    config = replace(CONFIG, **changes)
    model = build_hybrid_model(config, seed=9, platform=platform)
    copy_hf_weights(model, reference["state_dict"], config)
    case = reference["cases"][-1]
    assert gap(PromptLogits(model)(case["tokens"]), case) >= FAR


def test_a_wrong_state_dict_is_one_clear_line_and_changes_nothing(model, reference):
    good = reference["state_dict"]
    before = {name: value.clone() for name, value in model.named_parameters()}
    lacking = {name: value for name, value in good.items() if not name.endswith("q_norm.weight")}
    experts = "model.layers.0.mlp.experts.down_proj"
    for bad, message in (
        (good | {"model.norm.bias": torch.zeros(1)}, "unknown weight model.norm.bias"),
        (lacking, "lacks weight model.layers.3.self_attn.q_norm.weight"),
        (good | {experts: good[experts][1:]}, rf"{experts} has shape \(7, 64, 40\), .* require \(8, 64, 40\)"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            copy_hf_weights(model, bad, CONFIG)
        assert "\n" not in str(error.value)
    copy_hf_weights(model, good | {"mtp.norm.weight": torch.zeros(1)}, CONFIG)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
