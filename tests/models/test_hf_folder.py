"""A Hugging Face folder: what its files say, models with its weights, and folders that something is wrong with."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix.models import build_hybrid_model, hf_load, open_folder
from megatron_hybrid_prefix.models.hf.dimensions import family_of
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, PromptLogits, make_folder
from tests.harness.hf_state_dict import read as read_rule


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_the_weights_of_its_folder(platform, tmp_path, kind, tied, shards):
    weights = make_folder(tmp_path / "hf", kind, shards=shards, tied=tied)
    folder = open_folder(tmp_path / "hf")
    config = replace(CONFIGS[kind], tie_embeddings=tied)
    assert folder.config == config
    assert folder.weight_bytes == sum(weight.nbytes for weight in weights.values())
    read = []
    model = build_hybrid_model(hf=str(tmp_path / "hf"), platform=platform, on_read=lambda *values: read.append(values))
    assert model.hybrid_config == config
    rules = {rule.target: rule for rule in family_of(config, folder.model_type).rules(config)}
    for name, parameter in parameters_by_global_name(model):
        assert torch.equal(parameter, read_rule(rules[name], weights)), name
    total = sum(parameter.numel() for _, parameter in parameters_by_global_name(model))
    assert read == sorted(read) and read[-1] == (total, total)


def test_dtype_of_the_files_where_the_config_says_none(tmp_path):
    for number, (dtype, expected) in enumerate([(torch.float32, "float32"), (torch.float16, "bfloat16")]):
        make_folder(tmp_path / str(number), dtype=dtype)
        config = tmp_path / str(number) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": None}))
        assert open_folder(tmp_path / str(number)).config.dtype == expected


def test_end_tokens(tmp_path):
    make_folder(tmp_path / "hf")
    assert open_folder(tmp_path / "hf").end_tokens == ()
    for value, expected in ((2, (2,)), ([2, 11], (2, 11)), (None, ())):
        (tmp_path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert open_folder(tmp_path / "hf").end_tokens == expected


FIRST, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"
EMBEDDINGS = "model.embeddings.weight"


def change_weights(folder, change):
    """Writes the first shard again, with other weights."""
    weights = load_file(folder / FIRST)
    change(weights)
    save_file(weights, folder / FIRST)


def change_index(folder, change):
    data = json.loads((folder / INDEX).read_text())
    change(data["weight_map"])
    (folder / INDEX).write_text(json.dumps(data))


def unknown(folder):
    change_weights(folder, lambda weights: weights.update({"model.norm_f.bias": torch.zeros(3)}))
    change_index(folder, lambda names: names.update({"model.norm_f.bias": FIRST}))


def lost_everywhere(folder):
    change_weights(folder, lambda weights: weights.pop(EMBEDDINGS))
    change_index(folder, lambda names: names.pop(EMBEDDINGS))


def with_header(header, said):
    """The first shard has this header and four bytes."""
    text = json.dumps(header).encode()
    return lambda at: (at / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4)), FIRST + said


VALUE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
# What is done to a folder of three shards, and what is said. Wrong end tokens: test_tokenizer.py.
DAMAGE = {
    "no object in a header": with_header([], " is no safetensors file: its header is no"),
    "no text": with_header({"a": VALUE | {"dtype": []}}, r": a has dtype \[\], none of"),
    "no numbers": with_header(
        {"a": VALUE | {"shape": [None]}}, " is no safetensors file: its header says nothing of a$"
    ),
    "missing shard": (lambda at: (at / FIRST).unlink(), f"{FIRST} is missing: it has model.embed.*weights"),
    "truncated values": (
        lambda at: os.truncate(at / FIRST, (at / FIRST).stat().st_size - 1),
        f"{FIRST} is truncated: it ends 1 bytes before .* of model",
    ),
    "truncated header": (
        lambda at: os.truncate(at / FIRST, 100),
        f"{FIRST} is truncated or no safetensors file: 100 bytes",
    ),
    "empty file": (lambda at: os.truncate(at / FIRST, 0), f"{FIRST} is truncated"),
    "other shape": (
        lambda at: change_weights(at, lambda weights: weights.update({EMBEDDINGS: torch.zeros(3, 64)})),
        rf"{EMBEDDINGS} in .*{FIRST} has shape \(3, 64\), .* require \(272, 64\)",
    ),
    "unknown name": (unknown, f"has an unknown weight model.norm_f.bias in .*{FIRST}"),
    "lost weight": (
        lambda at: change_weights(at, lambda weights: weights.pop(EMBEDDINGS)),
        f"{FIRST} lacks {EMBEDDINGS}, which the index says it has",
    ),
    "not in the index": (
        lambda at: change_index(at, lambda names: names.pop(EMBEDDINGS)),
        f"{FIRST} has {EMBEDDINGS}, which the index does not say",
    ),
    "lost everywhere": (lost_everywhere, f"hf lacks weight {EMBEDDINGS}"),
    "outside": (
        lambda at: change_index(at, lambda names: names.update({EMBEDDINGS: "../a.safetensors"})),
        f"{EMBEDDINGS} is in '../a.safetensors', which is no file of this folder",
    ),
    "no index": (lambda at: (at / INDEX).unlink(), "3 safetensors files, and no model.safetensors.index"),
    "no config": (lambda at: (at / "config.json").unlink(), "no Hugging Face folder: it has no config.json"),
    "no JSON": (lambda at: (at / "config.json").write_text("{"), "config.json is not JSON"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_one_line_that_names_file_and_weight(platform, tmp_path, name):
    make_folder(tmp_path / "hf", shards=3)
    spoil, message = DAMAGE[name]
    spoil(tmp_path / "hf")
    with pytest.raises(ValueError, match=message) as error:
        build_hybrid_model(hf=tmp_path / "hf", platform=platform)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "prefix"), [("nemotron_h", "backbone."), ("qwen3_5", "model.language_model.")])
def test_a_wrong_weight_has_the_name_that_it_has_in_the_file(platform, tmp_path, kind, prefix):
    weights = {name.replace("model.", prefix, 1): weight for name, weight in make_folder(tmp_path / "hf", kind).items()}
    norm = next(name for name in weights if name.startswith(prefix) and name.endswith("norm.weight"))
    for wrong, what in ({norm: torch.zeros(3)}, "has shape"), ({f"{prefix}a.bias": torch.zeros(3)}, ""):
        save_file(weights | wrong, tmp_path / "hf/model.safetensors")
        with pytest.raises(ValueError, match=rf"{re.escape(next(iter(wrong)))} in \S+model\.safetensors ?{what}"):
            build_hybrid_model(hf=tmp_path / "hf", platform=platform)


def test_a_file_that_is_cut_after_it_was_checked_is_an_error(platform, tmp_path):
    """And no signal, as where a file is mapped."""
    make_folder(tmp_path / "hf")
    folder = open_folder(tmp_path / "hf")
    os.truncate(tmp_path / "hf/model.safetensors", folder.weights["model.embeddings.weight"].offset_bytes + 100)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is truncated: it ends before the end of model\.embed\S+$"
    ):
        build_hybrid_model(hf=folder, platform=platform)


def test_rows_of_several_reads(platform, tmp_path, monkeypatch):
    """Slices of a few rows each, direct and through a buffer; the buffers are all that a load needs beside its share."""
    buffers = []

    class Buffer(hf_load._Buffer):
        def __init__(self, size_bytes, device):
            super().__init__(size_bytes, device)
            buffers.append(size_bytes)

    monkeypatch.setattr(hf_load, "_Buffer", Buffer)
    weights = make_folder(tmp_path / "hf", "nemotron_h_experts")
    folder, whole = open_folder(tmp_path / "hf"), {}
    for chunk_bytes in (hf_load.CHUNK_BYTES, 1000):
        monkeypatch.setattr(hf_load, "CHUNK_BYTES", chunk_bytes)
        for dtype in ("float32", "bfloat16"):
            model = build_hybrid_model(replace(folder.config, dtype=dtype), hf=folder, platform=platform)
            for name, parameter in parameters_by_global_name(model):
                assert torch.equal(whole.setdefault((name, dtype), parameter), parameter), name
        assert 1 <= len(buffers) <= hf_load.THREADS and max(buffers) <= chunk_bytes
        buffers.clear()
    assert torch.equal(whole["output_layer.weight", "bfloat16"], weights["lm_head.weight"].bfloat16())


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path):
    with pytest.raises(
        ValueError, match=r"there is no folder nvidia/Nemo-8B; .* run `hf download nvidia/Nemo-8B --local"
    ):
        open_folder("nvidia/Nemo-8B")
    with pytest.raises(ValueError, match=r"there is no folder \S+/nothing$"):
        open_folder(tmp_path / "nothing")


def test_neither_preset_nor_folder(platform):
    with pytest.raises(ValueError, match="needs a preset, dimensions, or hf=FOLDER"):
        build_hybrid_model(platform=platform)


def test_an_output_layer_in_the_files_is_used_whatever_the_config_says(tmp_path):
    """transformers' Nemotron-H has a key tie_word_embeddings, and does not tie them."""
    weights = make_folder(tmp_path / "hf", tied=True)
    assert open_folder(tmp_path / "hf").config.tie_embeddings
    weights |= {"lm_head.weight": torch.zeros_like(weights["model.embeddings.weight"])}
    save_file(weights, tmp_path / "hf/model.safetensors")
    assert not open_folder(tmp_path / "hf").config.tie_embeddings


def test_norms_that_add_one_are_not_rounded(platform, tmp_path):
    """In bfloat16 1 + weight would keep 8 bits of the sum, and give other logits."""
    weights = make_folder(tmp_path / "hf", "qwen3_next", dtype=torch.bfloat16)
    folder = open_folder(tmp_path / "hf")
    model = build_hybrid_model(replace(folder.config, dtype="bfloat16"), hf=folder, platform=platform)
    found = dict(parameters_by_global_name(model))
    norm = found["decoder.final_norm.weight"]
    assert norm.dtype == torch.float32 and found["output_layer.weight"].dtype == torch.bfloat16
    assert torch.equal(norm, weights["model.norm.weight"].float() + 1)
    assert not torch.equal(norm, norm.bfloat16().float())
    prompt_logits = PromptLogits(model)
    tokens = list(range(40))
    logits = prompt_logits(tokens)
    assert logits.isfinite().all()
    with torch.no_grad():
        norm.copy_(norm.bfloat16())
    assert not torch.equal(prompt_logits(tokens), logits)
