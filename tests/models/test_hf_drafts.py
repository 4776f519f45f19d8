"""Heads of a folder that draft (``mtp.``). transformers leaves them out, so they are compared with formulas, and by acceptance."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import combinations

import pytest
import torch

pytest.importorskip("safetensors")

from megatron.core.inference.utils import InferenceMode
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.cli import convert
from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, open_folder, save_hf_folder
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end, unequal
from tests.harness.hf_drafts import draft_logits
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import (
    NEW_TOKENS,
    config_json,
    load_reference,
    logits_of_transformers,
    make_references,
    run_folders,
)
from tests.harness.hf_state_dict import copy_hf_weights, hf_shapes

ONE = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
TWO = ONE | {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": False}
TOKENS = random_tokens(24, seed=5, vocabulary=272)  # all experts are chosen
FAR = 1e-2


def lively(data):
    """Weights of a folder with this ``config.json``, of which each shows."""
    generator, weights = torch.Generator().manual_seed(3), {}
    for name, shape in hf_shapes(dimensions_of(data, "c")).items():
        if len(shape) == 1:
            low, high = (0.5, 1.5) if "norm" in name else (-0.3, 0.3)
            weights[name] = torch.rand(shape, generator=generator) * (high - low) + low
        else:
            std = 1.0 if "embeddings" in name else shape[-1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def write(folder, data, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(weights, folder / "model.safetensors")
    return folder


class Heads:
    """A model of a folder, and how far its drafts are off those of the formulas."""

    def __init__(self, folder, platform, said=ONE):
        self.data = config_json("nemotron_3") | said
        self.weights = lively(self.data)
        self.model = build_hybrid_model(hf=write(folder, self.data, self.weights), platform=platform)
        self.hidden = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(4))

    def drafted(self, hidden, tokens, depth=0):
        InferenceMode.set_active()
        with torch.inference_mode():
            positions = torch.arange(len(tokens))[None]
            given = hidden.float()[:, None], torch.tensor([tokens]), positions
            said, logits = self.model.compute_mtp_single_step(*given, depth=depth)
        return said[:, 0], logits[:, 0]

    def gap(self):
        right = draft_logits(self.weights, self.data, self.hidden, TOKENS)[1]
        return float((self.drafted(self.hidden, TOKENS)[1] - right).abs().max())


@pytest.fixture(scope="module")
def heads(platform, tmp_path_factory):
    return Heads(tmp_path_factory.mktemp("heads") / "model", platform)


def test_a_draft_is_what_the_formulas_say_and_so_is_the_next(heads):
    config = heads.model.hybrid_config
    assert (config.mtp_num_layers, config.mtp_layer_pattern, config.mtp_use_repeated_layer) == (1, "*E", True)
    hidden, ours = heads.hidden, heads.hidden
    for tokens in (TOKENS, TOKENS[::-1]):
        hidden, right = draft_logits(heads.weights, heads.data, hidden, tokens)
        ours, logits = heads.drafted(ours, tokens)
        assert right.std() > 0.5
        torch.testing.assert_close(logits.double(), right, rtol=0, atol=1e-4)


def test_heads_of_two_depths_are_those_of_the_formulas(platform, tmp_path):
    two = Heads(tmp_path / "model", platform, TWO)
    for depth in (0, 1):
        right = draft_logits(two.weights, two.data, two.hidden, TOKENS, depth)[1]
        torch.testing.assert_close(two.drafted(two.hidden, TOKENS, depth)[1].double(), right, rtol=0, atol=1e-4)


def test_swapping_any_two_weights_of_equal_shape_shows(heads):
    names = [name for name in heads.weights if name.startswith("mtp.")]
    wrong = [
        {one: heads.weights[other], other: heads.weights[one]}
        for one, other in combinations(names, 2)
        if heads.weights[one].shape == heads.weights[other].shape and (".experts." not in other or ".experts.0." in one)
    ]
    wrong.append({(bias := "mtp.layers.1.mixer.gate.e_score_correction_bias"): heads.weights[bias].roll(1)})
    assert len(wrong) > 40
    for swapped in wrong:
        copy_hf_weights(heads.model, heads.weights | swapped, heads.model.hybrid_config)
        assert heads.gap() >= FAR, list(swapped)
    copy_hf_weights(heads.model, heads.weights, heads.model.hybrid_config)
    assert heads.gap() <= 1e-4


# -- acceptance ------------------------------------------------------------------------------------------------------------


def steps(model, drafts):
    """Tokens of an answer, and how many steps it took."""
    engine = build_engine(model, num_speculative_tokens=drafts, max_sequence_length=256, max_requests=4)
    engine.add_request(0, TOKENS, greedy(25))
    finished, count = {}, 0
    while engine.has_unfinished_requests():
        run_to_end(engine, finished, steps=1)
        count += 1
    return list(finished[0].generated_tokens), count


def test_drafts_of_a_head_that_knows_the_model_are_accepted(platform, tmp_path):
    """A model whose next token follows from the last one alone, and a head that reads it, or the one before."""
    data = config_json("nemotron_3") | ONE
    weights = lively(data)
    for name, value in weights.items():
        if name.endswith(
            ("out_proj.weight", "o_proj.weight", "fc2_latent_proj.weight", "shared_experts.down_proj.weight")
        ):
            value.zero_()
    same, nothing = torch.eye(64), torch.zeros(64, 64)
    weights["mtp.layers.1.final_layernorm.weight"] = weights["model.norm_f.weight"].clone()
    weights |= {f"mtp.layers.0.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm")}
    answers, counts = [], []
    for name, projection in (("token", [same, nothing]), ("hidden", [nothing, same])):
        weights["mtp.layers.0.eh_proj.weight"] = torch.cat(projection, dim=1)
        model = build_hybrid_model(hf=write(tmp_path / name, data, weights), platform=platform)
        for drafts in (0, 3):
            answer, count = steps(model, drafts)
            answers.append(answer)
            counts.append(count)
    assert all(answer == answers[0] for answer in answers) and len(set(answers[0])) > 10
    assert (counts[0], counts[2]) == (25, 25)  # without drafts
    assert counts[1] == 1 + 24 // 4 and counts[3] > 20


# -- folders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stored", "found"),
    [
        ({}, ONE, (0, "", False)),
        (ONE, {}, (0, "", False)),
        (ONE, ONE, (1, "*E", True)),
        (TWO, TWO, (2, "*E", False)),
        (TWO | {"mtp_use_repeated_layer": True}, TWO, (2, "*E", False)),
        (TWO | {"mtp_use_repeated_layer": True}, ONE, (2, "*E", True)),
    ],
)
def test_heads_are_those_that_the_config_says_and_the_files_have(platform, tmp_path, said, stored, found):
    weights = lively(config_json("nemotron_3") | stored)
    folder = open_folder(write(tmp_path / "model", config_json("nemotron_3") | said, weights))
    config = folder.config
    assert (config.mtp_num_layers, config.mtp_layer_pattern, config.mtp_use_repeated_layer) == found
    model = build_hybrid_model(hf=folder, platform=platform)
    assert len(getattr(getattr(model, "mtp", None), "layers", [])) == config.mtp_heads
    without = replace(config, mtp_num_layers=0, mtp_layer_pattern="", mtp_use_repeated_layer=False)
    assert not hasattr(build_hybrid_model(without, hf=folder, platform=platform), "mtp")
    for file in folder.path.glob("*.safetensors"):
        file.unlink()
    said = dimensions_of(config_json("nemotron_3") | said, "c")
    assert open_folder(folder.path).config.mtp_num_layers == said.mtp_num_layers, "plan needs config.json only"


NORM = "mtp.layers.1.norm.weight"


@pytest.mark.parametrize(
    ("said", "changes", "message"),
    [
        (ONE, {NORM: None}, f"lacks weight {NORM}$"),
        (ONE, {NORM: torch.ones(63)}, rf"^{NORM} in .*model\.safetensors has shape \(63,\), .* require \(64,\)$"),
        (ONE, {"mtp.layers.0.scale": torch.ones(1)}, r"has an unknown weight mtp\.layers\.0\.scale in .*safetensors$"),
        (TWO, {}, r"lacks weight mtp\.layers\.2\.eh_proj\.weight and \d+ more$"),
    ],
)
def test_a_weight_that_is_wrong_is_named(platform, tmp_path, said, changes, message):
    weights = lively(config_json("nemotron_3") | ONE) | changes
    weights = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        build_hybrid_model(hf=write(tmp_path / "model", config_json("nemotron_3") | said, weights), platform=platform)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("said", [ONE, TWO], ids=["one", "two"])
def test_saved_heads_come_back(platform, tmp_path, said):
    data = config_json("nemotron_3") | said
    weights = lively(data)
    model = build_hybrid_model(hf=write(tmp_path / "model", data, weights), platform=platform)
    save_hf_folder(model, tmp_path / "again", dtype="float32")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert open_folder(tmp_path / "again").config == model.hybrid_config
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A folder of transformers, to which heads are added."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf") / "nemotron_3"
    asked = asdict(MODELS["nemotron_3"]) | {"new_tokens": NEW_TOKENS, "prompt_lengths": (1, 64, 129)}
    make_references({folder: asked})
    data = json.loads((folder / "config.json").read_text())
    assert data["num_nextn_predict_layers"] == 0
    drafts = {name: value for name, value in lively(config_json("nemotron_3") | ONE).items() if name.startswith("mtp.")}
    kept = load_file(folder / "model.safetensors")
    return write(
        folder, data | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}, kept | drafts
    )


@pytest.mark.slow
def test_transformers_reads_a_folder_that_was_saved_with_heads(platform, reference, tmp_path):
    save_hf_folder(build_hybrid_model(hf=reference, platform=platform), tmp_path, dtype="float32")
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    case = load_reference(reference)["cases"][-1]
    found = logits_of_transformers({tmp_path: case["tokens"]})[tmp_path]
    assert found["wrong"] == [] and (found["logits"] - case["logits"]).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "layout", [(2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)], ids=lambda layout: "tp{}-pp{}-ep{}-etp{}".format(*layout)
)
def test_two_ranks(platform, reference, tmp_path, layout):
    """The model says what transformers says, and each rank has its part of the heads; also in checkpoints."""
    once = not (reference / "mcore").is_dir()
    if once:
        assert convert.main(["--hf", str(reference), "--out", str(reference / "mcore"), "--device", "cpu"]) == 0
    for rank in run_folders(tmp_path, layout, reference):
        found = rank["nemotron_3"]
        assert found.get("logits_gap", 0.0) <= 1e-4 and found["log_probs_gap"] <= 1e-4
        assert found["values_read"] == found["values_held"] and found["unequal"] == []
    right = build_hybrid_model(hf=reference, platform=platform)
    model = build_hybrid_model(open_folder(reference).config, seed=5, platform=platform)
    load_checkpoint(model, reference / "mcore-again")
    (reference / "mcore-again").rename(tmp_path / "mcore-again")
    assert any(name.startswith("mtp.") for name, _ in parameters_by_global_name(model))
    assert unequal(model, right) == []
