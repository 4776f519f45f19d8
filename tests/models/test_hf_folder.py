"""A Hugging Face folder: what its files say, models with its weights, and folders that something is wrong with."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix.models import build_hybrid_model, hf_load, open_folder
from megatron_hybrid_prefix.models.hf_weights import family_of
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.hf_helpers import MODELS, PromptLogits, make_folder
from tests.harness.hf_state_dict import read as read_rule


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_has_the_weights_of_its_folder(platform, tmp_path, model_type, tied, shards):
    weights = make_folder(tmp_path / "hf", model_type, shards=shards, tied=tied)
    folder = open_folder(tmp_path / "hf")
    config = replace(MODELS[model_type][0], tie_embeddings=tied)
    assert folder.config == config
    assert folder.weight_bytes == sum(weight.nbytes for weight in weights.values())
    read = []
    model = build_hybrid_model(hf=str(tmp_path / "hf"), platform=platform, on_read=lambda *values: read.append(values))
    assert model.hybrid_config == config
    rules = {rule.target: rule for rule in family_of(config).rules(config)}
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


def damage(name):
    """Functions that damage a folder of three shards."""
    first, index = "model-00001-of-00003.safetensors", "model.safetensors.index.json"

    def weights_of(folder, change):
        weights = load_file(folder / first)
        change(weights)
        save_file(weights, folder / first)

    def in_index(folder, change):
        data = json.loads((folder / index).read_text())
        change(data["weight_map"])
        (folder / index).write_text(json.dumps(data))

    def cut(folder, to):
        whole = (folder / first).read_bytes()
        (folder / first).write_bytes(whole[: to if to > 0 else len(whole) + to])

    def unknown(folder):
        weights_of(folder, lambda weights: weights.update({"model.norm_f.bias": torch.zeros(3)}))
        in_index(folder, lambda names: names.update({"model.norm_f.bias": first}))

    def quantized(folder):
        header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (folder / first).write_bytes(struct.pack("<Q", len(header)) + header + b"0")

    return {
        "missing shard": (lambda folder: (folder / first).unlink(), f"{first} is missing: it has model.embed.*weights"),
        "truncated values": (
            lambda folder: cut(folder, -1),
            f"{first} is truncated: it ends 1 bytes before .* of model",
        ),
        "truncated header": (
            lambda folder: cut(folder, 100),
            f"{first} is truncated or no safetensors file: 100 bytes",
        ),
        "empty file": (lambda folder: (folder / first).write_bytes(b""), f"{first} is truncated"),
        "other shape": (
            lambda folder: weights_of(folder, lambda w: w.update({"model.embeddings.weight": torch.zeros(3, 64)})),
            rf"model.embeddings.weight in .*{first} has shape \(3, 64\), .* require \(272, 64\)",
        ),
        "unknown name": (unknown, f"has an unknown weight model.norm_f.bias in .*{first}"),
        "lost weight": (
            lambda folder: weights_of(folder, lambda w: w.pop("model.embeddings.weight")),
            f"{first} lacks model.embeddings.weight, which the index says it has",
        ),
        "not in the index": (
            lambda folder: in_index(folder, lambda names: names.pop("model.embeddings.weight")),
            f"{first} has model.embeddings.weight, which the index does not say",
        ),
        "lost everywhere": (
            lambda folder: (
                weights_of(folder, lambda w: w.pop("model.embeddings.weight")),
                in_index(folder, lambda names: names.pop("model.embeddings.weight")),
            ),
            "hf lacks weight model.embeddings.weight",
        ),
        "outside": (
            lambda folder: in_index(
                folder, lambda names: names.update({"model.embeddings.weight": "../a.safetensors"})
            ),
            "model.embeddings.weight is in '../a.safetensors', which is no file of this folder",
        ),
        "quantized": (quantized, f"{first}: w has dtype F8_E4M3"),
        "no index": (lambda folder: (folder / index).unlink(), "3 safetensors files, and no model.safetensors.index"),
        "no config": (
            lambda folder: (folder / "config.json").unlink(),
            "no Hugging Face folder: it has no config.json",
        ),
        "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        "end tokens": (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
            "generation_config.json: eos_token_id is '</s>'",
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("missing shard", "truncated values", "truncated header", "empty file", "other shape", "unknown name"),
        *("lost weight", "not in the index", "lost everywhere", "outside", "quantized", "no index", "no config"),
        *("no JSON", "end tokens"),
    ],
)
def test_a_damaged_folder_is_one_line_that_names_file_and_weight(platform, tmp_path, name):
    make_folder(tmp_path / "hf", shards=3)
    spoil, message = damage(name)
    spoil(tmp_path / "hf")
    with pytest.raises(ValueError, match=message) as error:
        build_hybrid_model(hf=tmp_path / "hf", platform=platform)
    assert "\n" not in str(error.value)


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
