"""Models as Hugging Face folders: read again they have the same weights. transformers reads them in test_hf_folder_parity.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

from megatron.core.inference.utils import InferenceMode

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, open_folder, save_hf_folder
from megatron_hybrid_prefix.models.hf.family import FAMILIES
from megatron_hybrid_prefix.models.hf.mapping import PLUS_ONE, Finish, Rule, Source
from megatron_hybrid_prefix.models.hf_save import _write
from megatron_hybrid_prefix.models.hf_weights import EMBEDDING
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.engine_helpers import random_tokens
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, NEMOTRON_H, make_folder
from tests.harness.hf_state_dict import hf_shapes, read
from tests.harness.naive_model import NaiveHybridModel

TOKENS = random_tokens(100, seed=1, vocabulary=NEMOTRON_H.vocab_size)


def training_logits(model, rows):
    """(rows, tokens, vocabulary), from megatron's forward outside of inference."""
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    engine_is_active = InferenceMode.is_active()  # another test of this process left its engine
    InferenceMode.unset_active()
    try:
        return model(input_ids=rows, position_ids=positions, attention_mask=None)
    finally:
        if engine_is_active:
            InferenceMode.set_active()


@pytest.fixture(scope="module")
def trained(platform):
    """Three steps from random weights, and the losses."""
    model = build_hybrid_model(NEMOTRON_H, seed=3, platform=platform).requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, losses = torch.tensor(TOKENS).view(2, -1), []
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(3):
        logits = training_logits(model, rows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0] - 0.5
    assert [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])] == []
    return model


def test_the_training_forward_is_the_model(trained):
    naive = NaiveHybridModel(trained, NEMOTRON_H).logits(TOKENS)
    torch.testing.assert_close(training_logits(trained, torch.tensor([TOKENS]))[0].double(), naive, rtol=0, atol=1e-4)


def test_likewise_with_multipliers(tiny_granite_dense):
    naive = NaiveHybridModel(tiny_granite_dense, tiny_granite_dense.hybrid_config).logits(TOKENS)
    found = training_logits(tiny_granite_dense, torch.tensor([TOKENS]))[0].double()
    torch.testing.assert_close(found, naive, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_every_weight_comes_back(platform, tmp_path, kind, tied, dtype):
    """Norms that multiply by 1 + weight, orders of rows and stacks of experts included."""
    make_folder(tmp_path / "hf", kind, tied=tied)
    model = build_hybrid_model(hf=tmp_path / "hf", platform=platform)
    save_hf_folder(model, tmp_path / "again", dtype=dtype, generation={"eos_token_id": 5})
    folder, family = open_folder(tmp_path / "again"), FAMILIES[MODELS[kind].model_type]
    assert folder.model_type == family.name and folder.end_tokens == (5,)
    assert folder.config == replace(CONFIGS[kind], dtype=dtype, tie_embeddings=tied and family.ties)
    shapes = hf_shapes(CONFIGS[kind], family.name)
    if folder.config.tie_embeddings:
        del shapes["lm_head.weight"]
    assert {name: weight.shape for name, weight in folder.weights.items()} == shapes
    assert {weight.dtype for weight in folder.weights.values()} == {dtype}
    again = build_hybrid_model(replace(folder.config, dtype="float32"), hf=folder, platform=platform)
    found, rules = dict(parameters_by_global_name(again)), {rule.target: rule for rule in family.rules(CONFIGS[kind])}
    for name, weight in parameters_by_global_name(model):
        if dtype == "bfloat16":  # Hugging Face's weights are rounded, not ours
            finish = rules[name].finish or Finish(apply=torch.clone, undo=torch.clone)
            weight = finish.apply(finish.undo(weight).bfloat16().float())
        assert torch.equal(found.pop(name), weight), name
    if tied and not family.ties:
        assert torch.equal(found.pop("output_layer.weight"), dict(parameters_by_global_name(again))[EMBEDDING])
    assert not found


def test_matrices_go_back_to_their_stack():
    """In any order, with rows in another order and values that are finished."""
    stack, weights = torch.rand(3, 4, 2), {}
    for number in reversed(range(3)):
        source = Source(name="experts", shape=(3, 4, 2), at=number)
        order = np.array([2, 0, 3, 1])
        rule = Rule(target="t", sources=(source,), order=order, finish=PLUS_ONE)
        _write(rule, read(rule, {"experts": stack}), torch.float32, weights)
    torch.testing.assert_close(weights["experts"], stack)


def test_the_family_is_the_folders_or_the_one_that_is_asked_for(platform, tmp_path):
    make_folder(tmp_path / "hf", "qwen3_next")
    model = build_hybrid_model(hf=tmp_path / "hf", platform=platform)
    with pytest.raises(ValueError, match=r"^bamba: rms_norm_eps is 1e-06"):
        save_hf_folder(model, tmp_path / "bamba", model_type="bamba")
    save_hf_folder(model, tmp_path / "again")
    assert open_folder(tmp_path / "again").model_type == "qwen3_next"


def test_a_model_of_two_families_is_saved_as_either(platform, tmp_path):
    """Qwen3-Next with experts in each layer is Qwen3.5 with experts. The width of an MLP, which no layer has, is lost."""
    model = build_hybrid_model("tiny-qwen3-next", seed=4, platform=platform)
    for model_type, name in ((None, "qwen3_next"), ("qwen3_5_moe", "qwen3_5_moe_text")):
        save_hf_folder(model, tmp_path / name, dtype="float32", model_type=model_type)
        assert open_folder(tmp_path / name).model_type == name
        again = build_hybrid_model(hf=tmp_path / name, platform=platform)
        for (name, weight), (_, right) in zip(
            parameters_by_global_name(again), parameters_by_global_name(model), strict=True
        ):
            torch.testing.assert_close(weight, right, rtol=0, atol=1e-6, msg=name)


def test_what_cannot_be_saved(platform, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(trained, "hybrid_config", replace(NEMOTRON_H, qk_norm=True))
    with pytest.raises(ValueError, match=r"^nemotron_h has qk_norm=False \(not True\)$"):
        save_hf_folder(trained, tmp_path, model_type="nemotron_h")
    monkeypatch.setattr(trained, "hybrid_config", replace(NEMOTRON_H, ffn_hidden_size=64))
    with pytest.raises(ValueError, match=r"linear_fc1\.weight has shape .*sharded"):
        save_hf_folder(trained, tmp_path)
    assert list(tmp_path.iterdir()) == []
    config = get_preset("tiny-qwen3-next", mtp_num_layers=1, mtp_layer_pattern="*E")
    model = build_hybrid_model(config, seed=0, platform=platform)
    with pytest.raises(ValueError, match=r"nearest: qwen3_next has mtp_num_layers=0 \(not 1\), mtp_layer_p"):
        save_hf_folder(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
