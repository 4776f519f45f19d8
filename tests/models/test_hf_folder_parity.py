"""A folder that transformers saved, run by its name alone, gives transformers' answers (fp32, random weights).

Each model of `tests.harness.hf_families` with tied and untied embeddings, from one file and from several shards, with one rank,
and untied with two of every kind. And no weight is ignored, constant, or like another: what is wrong shows.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations, pairwise, product

import pytest
import torch

pytest.importorskip("transformers")

from megatron_hybrid_prefix.cli import convert
from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, open_folder, save_hf_folder
from megatron_hybrid_prefix.models.hf.family import FAMILIES
from tests.harness.engine_helpers import unequal
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import (
    CONFIGS,
    NEW_TOKENS,
    PromptLogits,
    answers_of_a_batch,
    assert_same_answer,
    logits_of_transformers,
    make_references,
    run_folders,
)
from tests.harness.hf_state_dict import copy_hf_weights
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness

pytestmark = pytest.mark.slow

FAR = 1e-2  # a hundred times what is allowed


def _asked(kind, *, tied):
    """What a folder is made of: several shards untied, one file and few prompts tied."""
    asked = asdict(MODELS[kind]) | {"new_tokens": NEW_TOKENS}
    if tied:
        asked["dimensions"] = asked["dimensions"] | {"tie_word_embeddings": True}
        return asked | {"prompt_lengths": (1, 64, 129), "seed": asked["seed"] + 1}
    return asked | {"prompt_lengths": (*asked["prompt_lengths"], 1000), "max_shard_size": "100KB"}


ASKED = {f"{kind}_tied" if tied else kind: _asked(kind, tied=tied) for kind in MODELS for tied in (False, True)}


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
        for name, weight in reference["state_dict"].items():
            assert weight.numel() == 1 or weight.std() > 0.01, f"{name} is a constant"


def test_logits_tokens_and_log_probs(platform, references, folder):
    reference = references[folder]
    model = build_hybrid_model(hf=folder, platform=platform)
    prompt_logits = PromptLogits(model)
    for case in reference["cases"]:
        gap = (prompt_logits(case["tokens"]) - case["logits"]).abs().max()
        assert gap <= 1e-4, f"prompt of {len(case['tokens'])} tokens"
    for number, request in answers_of_a_batch(model, reference).items():
        assert_same_answer(request, reference["cases"][number])
    if model.hybrid_config.yarn_factor is not None:  # rotations go on from what is kept
        served = EngineHarness(model, materialize_only_last_token_logits=False)
        for again, case in product((False, True), reference["cases"]):
            prompt = case["tokens"][: case["length"]]
            request = served.send(prompt, count=NEW_TOKENS, params={"skip_prompt_log_probs": False})
            assert_same_answer(request, case)
            assert request.num_cached_tokens == again * (len(prompt) - 1) // BLOCK * BLOCK


def test_transformers_reads_what_is_saved(platform, references):
    """The very values that it gave; also where norms multiply by 1 + weight, and with embeddings of each kind."""
    tokens = {}
    for folder, reference in references.items():
        model = build_hybrid_model(hf=folder, platform=platform)
        save_hf_folder(model, folder / "saved", dtype="float32")
        tokens[folder / "saved"] = reference["cases"][-1]["tokens"]
    for folder, found in logits_of_transformers(tokens).items():
        asked = ASKED[folder.parent.name]
        assert (found["class"], found["wrong"]) == (FAMILIES[asked["model_type"]].architecture, []), folder
        gap = (found["logits"] - references[folder.parent]["cases"][-1]["logits"]).abs().max()
        assert gap <= 1e-4, folder


# -- what is wrong shows ---------------------------------------------------------------------------------------------------


class Served:
    """A model, the weights that transformers gave it, and how far a prompt's logits are off with others."""

    def __init__(self, platform, references, kind):
        self.reference = next(reference for folder, reference in references.items() if folder.name == kind)
        self.config, self.model_type = CONFIGS[kind], MODELS[kind].model_type
        read, weights = FAMILIES[self.model_type].canonical, self.reference["state_dict"]
        self.weights = {name: weight for name, weight in weights.items() if read(name) is not None}
        self.model = build_hybrid_model(self.config, seed=9, platform=platform)
        self._logits = PromptLogits(self.model)
        self._case = next(case for case in self.reference["cases"] if case["length"] == 64)
        self.load(self.weights)

    def load(self, weights):
        copy_hf_weights(self.model, weights, self.config, self.model_type)

    def gap(self):
        return float((self._logits(self._case["tokens"]) - self._case["logits"]).abs().max())


@pytest.fixture(scope="module")
def served(platform, references):
    return cache(lambda kind: Served(platform, references, kind))


def test_weights_may_be_replaced_and_may_have_the_hubs_names(served):
    nemotron = served("nemotron_h")
    hub = {name.replace("model.", "backbone.", 1): value for name, value in nemotron.weights.items()}
    for weights in (nemotron.weights, hub | {"mtp.layers.0.norm.weight": torch.zeros(1)}):
        with torch.no_grad():
            for value in nemotron.model.parameters():
                value.zero_()
        answers_of_a_batch(nemotron.model, nemotron.reference)  # decodes, which leaves copies of these weights' A
        nemotron.load(weights)
        for number, request in answers_of_a_batch(nemotron.model, nemotron.reference).items():
            assert_same_answer(request, nemotron.reference["cases"][number])


@pytest.mark.parametrize("kind", MODELS)
def test_a_perturbation_of_any_weight_shows(served, kind):
    """Changing any one weight by a few percent breaks the parity."""
    model = served(kind)
    for name, weight in model.weights.items():
        wrong = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        model.load(model.weights | {name: wrong})
        assert model.gap() >= FAR, name


def _alike(weights):
    """Pairs of one shape: those of a layer, and of different layers those with none between them (all pairs are thousands)."""
    of_shape = {}
    for name, weight in weights.items():
        of_shape.setdefault(weight.shape, []).append(name)
    layer = {name: re.search(r"layers\.\d+\.|$", name)[0] for name in weights}
    neighbours = [pair for names in of_shape.values() for pair in pairwise(names)]
    pairs = [pair for names in of_shape.values() for pair in combinations(names, 2)]
    return dict.fromkeys([*neighbours, *(pair for pair in pairs if layer[pair[0]] == layer[pair[1]])])


@pytest.mark.parametrize("kind", MODELS)
def test_swapping_two_weights_of_equal_shape_shows(served, kind):
    """Also experts of a layer, and the halves of one; and a bias of a router is not ignored."""
    model = served(kind)
    weights = model.weights
    wrong = {(one, other): {one: weights[other], other: weights[one]} for one, other in _alike(weights)}
    assert len(wrong) > 20
    for name, stack in weights.items():
        if stack.dim() == 3 and stack.shape[0] == model.config.num_moe_experts:
            for other in (1, len(stack) // 2, len(stack) - 1):
                order = [other, *range(1, other), 0, *range(other + 1, len(stack))]
                wrong[name, other] = {name: stack[order]}
            wrong[name, "halves"] = {name: stack.roll(stack.shape[1] // 2, dims=1)}
        if name.endswith("e_score_correction_bias"):
            wrong[name, None] = {name: torch.zeros_like(stack)}
    for pair, swapped in wrong.items():
        model.load(weights | swapped)
        assert model.gap() >= FAR, pair


@pytest.mark.parametrize(
    ("kind", "changes"), [(kind, changes) for kind, model in MODELS.items() for changes in model.changes], ids=str
)
def test_another_dimension_shows(platform, served, kind, changes):
    reference = served(kind).reference
    model = build_hybrid_model(replace(CONFIGS[kind], **changes), seed=9, platform=platform)
    copy_hf_weights(model, reference["state_dict"], CONFIGS[kind], MODELS[kind].model_type)
    case = next(case for case in reference["cases"] if case["length"] == 129)
    assert (PromptLogits(model)(case["tokens"]) - case["logits"]).abs().max() >= FAR


# -- several ranks ---------------------------------------------------------------------------------------------------------

# (tp, pp, ep, etp), and the folders. Tied embeddings run without stages only, one group of Mamba heads on one rank. A family has
# no part in tying, nor in sharding what is tied.
TIED = "nemotron_h_experts_tied"
LAYOUTS = {
    (2, 1, 1, 2): [*(kind for kind, config in CONFIGS.items() if config.mamba_num_groups != 1), TIED],
    (1, 2, 1, 1): [kind for kind, config in CONFIGS.items() if config.count("*") > 1],
    (1, 1, 2, 1): [*(kind for kind, config in CONFIGS.items() if config.has_experts), TIED],
    (2, 1, 2, 1): [kind for kind, config in CONFIGS.items() if config.has_experts and config.mamba_num_groups != 1],
}


@pytest.mark.multi
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}-ep{}-etp{}".format(*layout))
def test_two_ranks(platform, references, tmp_path, layout):
    """Also checkpoints: what `convert` wrote on one rank is read by two, and the other way round."""
    asked = {folder.name: folder for folder in references}
    folders = [asked[name] for name in LAYOUTS[layout]]
    converted = set(CONFIGS) & set(LAYOUTS[layout])
    for name in converted:
        shutil.rmtree(asked[name] / "mcore-again", ignore_errors=True)
        if not (asked[name] / "mcore").is_dir():
            assert convert.main(["--hf", str(asked[name]), "--out", str(asked[name] / "mcore"), "--device", "cpu"]) == 0
    for rank in run_folders(tmp_path, layout, *folders):
        assert list(rank) == LAYOUTS[layout]
        for name, found in rank.items():
            assert found.get("logits_gap", 0.0) <= 1e-4 and found["log_probs_gap"] <= 1e-4, name
            assert found["values_read"] == found["values_held"], name
            assert found.get("unequal", []) == [], name
            assert "sharded" in found["not_saved"] and not (asked[name] / "part").exists(), name
    for name in converted:
        right = build_hybrid_model(hf=asked[name], platform=platform)
        model = build_hybrid_model(open_folder(asked[name]).config, seed=5, platform=platform)
        load_checkpoint(model, asked[name] / "mcore-again")
        assert unequal(model, right) == []
