"""A folder that transformers saved, run by its name alone, gives transformers' answers (fp32, random weights).

Each family with tied and untied embeddings, from one file and from several shards, with one rank, and two of every kind. And
no weight is ignored, constant, or like another: what is wrong shows.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch

pytest.importorskip("transformers")

from megatron_hybrid_prefix.cli import convert
from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, open_folder
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.hf_helpers import (
    BAMBA_ASKED,
    MODELS,
    NEMOTRON_H_ASKED,
    NEMOTRON_H_EXPERTS_ASKED,
    QWEN3_NEXT_ASKED,
    PromptLogits,
    answers_of_a_batch,
    assert_same_answer,
    make_references,
)
from tests.harness.hf_state_dict import copy_hf_weights
from tests.harness.workers.launch import run_ranks

pytestmark = pytest.mark.slow

FAR = 1e-2  # a hundred times what is allowed
LENGTHS = {"prompt_lengths": (1, 3, 64, 129)}
STAGES = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
SHARDS = {"max_shard_size": "100KB"}


def _tied(asked):
    return asked | {"model": asked["model"] | {"tie_word_embeddings": True}}


ASKED = {
    "bamba": BAMBA_ASKED | SHARDS,
    "bamba_tied": _tied(BAMBA_ASKED),
    "nemotron_h": NEMOTRON_H_ASKED | LENGTHS | SHARDS,
    "nemotron_h_tied": _tied(NEMOTRON_H_ASKED) | LENGTHS,
    "nemotron_h_experts": NEMOTRON_H_EXPERTS_ASKED | LENGTHS | SHARDS,
    "qwen3_next": QWEN3_NEXT_ASKED | LENGTHS,
    "qwen3_next_stages": QWEN3_NEXT_ASKED
    | {"model": QWEN3_NEXT_ASKED["model"] | {"layer_types": STAGES, "mlp_only_layers": []}}
    | LENGTHS
    | {"seed": 8},
    "qwen3_next_tied": _tied(QWEN3_NEXT_ASKED) | LENGTHS | SHARDS | {"seed": 9},  # see `router_margin`
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return make_references({root / name: asked for name, asked in ASKED.items()})


@pytest.fixture(params=ASKED)
def folder(request, references):
    return next(folder for folder in references if folder.name == request.param)


def test_the_references_are_worth_a_comparison(references):
    for folder, reference in references.items():
        files = list(folder.glob("*.safetensors"))
        assert len(files) > 2 if "max_shard_size" in ASKED[folder.name] else len(files) == 1
        for case in reference["cases"]:
            assert case["logits"].std() > 0.5
            assert len(set(case["tokens"][case["length"] :])) > 1
        assert (reference["router_margin"] or 1) >= 1e-4, "rounding may choose another expert"


def test_logits_tokens_and_log_probs(platform, references, folder):
    reference = references[folder]
    model = build_hybrid_model(hf=folder, platform=platform)
    prompt_logits = PromptLogits(model)
    for case in reference["cases"]:
        gap = (prompt_logits(case["tokens"]) - case["logits"]).abs().max()
        assert gap <= 1e-4, f"prompt of {len(case['tokens'])} tokens"
    for number, request in answers_of_a_batch(model, reference).items():
        assert_same_answer(request, reference["cases"][number])


# -- what is wrong shows ---------------------------------------------------------------------------------------------------


class Family:
    """A family's model, the weights that transformers gave it, and how far a prompt's logits are off with others."""

    def __init__(self, platform, references, name):
        self.reference = next(reference for folder, reference in references.items() if folder.name == name)
        self.config, self.weights = MODELS[name][0], self.reference["state_dict"]
        self.model = build_hybrid_model(self.config, seed=9, platform=platform)
        self._logits = PromptLogits(self.model)
        self._case = next(case for case in self.reference["cases"] if case["length"] == 64)
        self.load(self.weights)

    def load(self, weights):
        copy_hf_weights(self.model, weights, self.config)

    def gap(self):
        return float((self._logits(self._case["tokens"]) - self._case["logits"]).abs().max())


@pytest.fixture(scope="module")
def family(platform, references):
    return cache(lambda name: Family(platform, references, name))


def test_weights_may_be_replaced_and_may_have_the_hubs_names(family):
    nemotron = family("nemotron_h")
    hub = {name.replace("model.", "backbone.", 1): value for name, value in nemotron.weights.items()}
    for weights in (nemotron.weights, hub | {"mtp.layers.0.norm.weight": torch.zeros(1)}):
        with torch.no_grad():
            for value in nemotron.model.parameters():
                value.zero_()
        answers_of_a_batch(nemotron.model, nemotron.reference)  # decodes, which leaves copies of these weights' A
        nemotron.load(weights)
        for number, request in answers_of_a_batch(nemotron.model, nemotron.reference).items():
            assert_same_answer(request, nemotron.reference["cases"][number])


def test_a_perturbation_of_any_weight_shows(family):
    """Changing any one weight by a few percent breaks the parity."""
    nemotron = family("nemotron_h")
    for name, weight in nemotron.weights.items():
        wrong = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        nemotron.load(nemotron.weights | {name: wrong})
        assert nemotron.gap() >= FAR, name


@pytest.mark.parametrize(
    ("name", "stacks", "least"),
    [
        ("nemotron_h_experts", ("model.layers.2.mixer.experts.up_proj", "model.layers.5.mixer.experts.down_proj"), 60),
        ("qwen3_next", ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"), 150),
    ],
)
def test_swapping_any_two_weights_of_equal_shape_shows(family, name, stacks, least):
    """Also two experts of a layer, and one's gate and up projection; and the routers' bias is not ignored."""
    served = family(name)
    weights = served.weights
    wrong = {
        (one, other): {one: weights[other], other: weights[one]}
        for one, other in combinations(weights, 2)
        if weights[one].shape == weights[other].shape
    }
    for stacked in stacks:
        stack = weights[stacked]
        for other in range(1, len(stack)):
            order = [other, *range(1, other), 0, *range(other + 1, len(stack))]
            wrong[stacked, other] = {stacked: stack[order]}
        if "gate_up" in stacked:
            wrong[stacked, "gate and up"] = {stacked: stack.roll(stack.shape[1] // 2, dims=1)}
    for bias in weights:
        if bias.endswith("e_score_correction_bias"):
            wrong[bias, None] = {bias: torch.zeros_like(weights[bias])}
    assert len(wrong) > least
    for pair, swapped in wrong.items():
        served.load(weights | swapped)
        assert served.gap() >= FAR, pair


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nemotron_h_experts", {"moe_router_scaling": 1.0}),
        ("nemotron_h_experts", {"moe_router_groups": 0, "moe_router_topk_groups": 0}),
        ("nemotron_h_experts", {"moe_router_topk": 2}),
        ("qwen3_next", {"rotary_base": 10_000}),
        ("qwen3_next", {"rotary_fraction": 0.5}),
        ("qwen3_next", {"moe_router_topk": 2}),
        ("qwen3_next", {"layernorm_epsilon": 1e-3}),
    ],
    ids=str,
)
def test_another_dimension_shows(platform, family, name, changes):
    reference, config = family(name).reference, replace(MODELS[name][0], **changes)
    model = build_hybrid_model(config, seed=9, platform=platform)
    copy_hf_weights(model, reference["state_dict"], config)
    case = reference["cases"][-1]
    assert (PromptLogits(model)(case["tokens"]) - case["logits"]).abs().max() >= FAR


# -- several ranks ---------------------------------------------------------------------------------------------------------

# (tp, pp, ep), and the folders: every pipeline stage needs an attention layer, tied embeddings run without stages only.
LAYOUTS = {
    (2, 1, 1): list(ASKED),
    (1, 2, 1): ["bamba", "nemotron_h", "nemotron_h_experts", "qwen3_next_stages"],
    (1, 1, 2): ["nemotron_h_experts", "qwen3_next", "qwen3_next_tied"],
}
CONVERTED = ("bamba", "nemotron_h_experts", "qwen3_next_stages")


@pytest.mark.multi
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}-ep{}".format(*layout))
def test_two_ranks(platform, references, tmp_path, layout):
    """Also checkpoints: what `convert` wrote on one rank is read by two, and the other way round."""
    asked = {folder.name: folder for folder in references}
    folders = [asked[name] for name in LAYOUTS[layout]]
    for name in set(CONVERTED) & set(LAYOUTS[layout]):
        shutil.rmtree(asked[name] / "mcore-again", ignore_errors=True)
        if not (asked[name] / "mcore").is_dir():
            assert convert.main(["--hf", str(asked[name]), "--out", str(asked[name] / "mcore"), "--device", "cpu"]) == 0
    for rank in run_ranks("hf_folder.py", tmp_path / "found.json", *layout, *folders):
        assert list(rank) == LAYOUTS[layout]
        for name, found in rank.items():
            assert found.get("logits_gap", 0.0) <= 1e-4 and found["log_probs_gap"] <= 1e-4, name
            assert found["values_read"] == found["values_held"], name
            assert found.get("unequal", []) == [], name
    for name in set(CONVERTED) & set(LAYOUTS[layout]):
        right = build_hybrid_model(hf=asked[name], platform=platform)
        model = build_hybrid_model(open_folder(asked[name]).config, seed=5, platform=platform)
        load_checkpoint(model, asked[name] / "mcore-again")
        pairs = zip(parameters_by_global_name(model), parameters_by_global_name(right), strict=True)
        assert [other for (other, value), (_, wanted) in pairs if not torch.equal(value, wanted)] == []
