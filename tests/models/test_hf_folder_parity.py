"""A folder that transformers saved, run by its name alone, gives transformers' answers (fp32, random weights).

Each family with tied and untied embeddings, from one file and from several shards, with one and two tensor-parallel ranks.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.hf_helpers import (
    NEMOTRON_H_ASKED,
    QWEN3_NEXT_ASKED,
    PromptLogits,
    answers_of_a_batch,
    assert_same_answer,
    make_references,
)
from tests.harness.workers.launch import run_ranks

pytestmark = pytest.mark.slow

LENGTHS = {"prompt_lengths": (1, 3, 64, 129)}
SHARDS = {"max_shard_size": "100KB"}


def _tied(asked):
    return asked | {"model": asked["model"] | {"tie_word_embeddings": True}}


ASKED = {
    "nemotron_h": NEMOTRON_H_ASKED | LENGTHS | SHARDS,
    "nemotron_h_tied": _tied(NEMOTRON_H_ASKED) | LENGTHS,
    "qwen3_next": QWEN3_NEXT_ASKED | LENGTHS,
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


@pytest.mark.multi
def test_two_tensor_parallel_ranks(references, tmp_path):
    for rank in run_ranks("hf_folder.py", tmp_path / "found.json", *references):
        assert set(rank) == set(ASKED)
        for name, found in rank.items():
            assert found["logits_gap"] <= 1e-4 and found["log_probs_gap"] <= 1e-4, name
            assert found["values_read"] == found["values_held"], name
