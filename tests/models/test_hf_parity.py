"""Megatron's engine with the weights of a Hugging Face Nemotron-H gives Hugging Face's answers (fp32, random weights)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.hf_helpers import NEMOTRON_H as CONFIG
from tests.harness.hf_helpers import (
    NEMOTRON_H_ASKED,
    PromptLogits,
    answers_of_a_batch,
    assert_same_answer,
    make_reference,
)
from tests.harness.hf_state_dict import copy_hf_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("hf"), NEMOTRON_H_ASKED)


@pytest.fixture(scope="module")
def model(platform, reference):
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    engine = build_engine(model)
    engine.add_request(0, [1, 2, 3], greedy(3))
    run_to_end(engine, {})  # decodes, which leaves copies of the first weights' A
    copy_hf_weights(model, reference["state_dict"], CONFIG)
    return model


def test_the_reference_has_logits_with_a_spread(reference):
    for case in reference["cases"]:
        assert case["logits"].std() > 1.0
        assert len(set(case["tokens"][case["length"] :])) > 2 or case["length"] < 3


def test_logits_of_every_prompt_position(model, reference):
    prompt_logits = PromptLogits(model)
    for case in reference["cases"]:
        logits = prompt_logits(case["tokens"])
        assert (logits - case["logits"]).abs().max() <= 1e-4, f"prompt of {len(case['tokens'])} tokens"


def test_generation_and_prompt_log_probs_of_a_batch(model, reference):
    for number, request in answers_of_a_batch(model, reference).items():
        assert_same_answer(request, reference["cases"][number])


def test_a_perturbation_of_any_weight_shows(platform, reference):
    """Changing any one weight by a few percent breaks the parity. So no weight is ignored, or constant."""
    model = build_hybrid_model(CONFIG, seed=9, platform=platform)
    prompt_logits = PromptLogits(model)
    case = next(case for case in reference["cases"] if case["length"] == 64)
    for name, weight in reference["state_dict"].items():
        wrong = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        copy_hf_weights(model, reference["state_dict"] | {name: wrong}, CONFIG)
        assert (prompt_logits(case["tokens"]) - case["logits"]).abs().max() >= 1e-2, name


def test_a_wrong_state_dict_is_one_clear_line_and_changes_nothing(model, reference):
    good = reference["state_dict"]
    before = {name: value.clone() for name, value in model.named_parameters()}
    for bad, message in (
        (good | {"backbone.norm_f.bias": torch.zeros(1)}, "unknown weight model.norm_f.bias"),
        ({name: value for name, value in good.items() if not name.endswith("dt_bias")}, "lacks weight .*dt_bias and 2"),
        (good | {"model.layers.0.mixer.in_proj.bias": torch.zeros(1)}, "unknown weight .*in_proj.bias"),
        (good | {"lm_head.weight": good["lm_head.weight"][1:]}, "lm_head.weight has shape"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            copy_hf_weights(model, bad, CONFIG)
        assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_names_of_the_hub_and_multi_token_prediction(model, reference, platform):
    hub = {name.replace("model.", "backbone.", 1): value for name, value in reference["state_dict"].items()}
    other = build_hybrid_model(CONFIG, seed=10, platform=platform)
    copy_hf_weights(other, hub | {"mtp.layers.0.norm.weight": torch.zeros(1)}, CONFIG)
    for (name, value), (_, right) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(value, right), name


def test_only_models_like_nemotron_h(model, reference):
    with pytest.raises(ValueError, match="squared ReLU and no position embedding"):
        copy_hf_weights(model, reference["state_dict"], replace(CONFIG, rotary_base=10000))
