"""``--hf DIR`` in the commands: tokenizer, end tokens, default sampling, conversion; and bad input."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_hybrid_prefix.cli import bench, convert, generate, serve
from megatron_hybrid_prefix.console import hf
from megatron_hybrid_prefix.console.hf import default_sampling, tokenizer_of
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, open_folder
from tests.harness.hf_helpers import make_folder, save_tokenizer

pytestmark = pytest.mark.usefixtures("engine_imported")
GENERATION = {"eos_token_id": [256, 257], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "Tiny-H"
    make_folder(path)
    save_tokenizer(path, "<eos>", "<|im_end|>")
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


def generated(tmp_path, *argv):
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--num-tokens-to-generate", 4, "--max-sequence-length", 256, *argv]
    assert generate.main([*map(str, arguments), "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    return data, data["engines"]["ours"]["requests"][0]


def test_generate_takes_tokenizer_end_tokens_and_sampling_of_the_folder(folder, tmp_path):
    data, request = generated(tmp_path, "--hf", folder, "a<|im_end|>")
    assert data["model"]["preset"] == "Tiny-H" and data["model"]["hf"] == str(folder)
    assert request["prompt_tokens"] == 2, "the special token is one token"
    sampling = request["sampling"]
    options = sampling["sampling_options"]
    assert (options["temperature"], options["top_p"], options["top_k"]) == (0.6, 0.9, 20)
    assert (sampling["termination_id"], sampling["stop_token_ids"]) == (256, [257])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--no-generation-config"], {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "stop_token_ids": None}),
        (["--top-k", 1], {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "stop_token_ids": [257]}),
        (["--temperature", 0], {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "sampling_options": None}),
        (["--temperature", 0.7], {"temperature": 0.7, "top_k": 0, "top_p": 0.0, "sampling_options": None}),
        (["--ignore-eos"], {"termination_id": -1, "stop_token_ids": None}),
        (["--tokenizer", "bytes"], {"termination_id": 257, "stop_token_ids": None}),
    ],
    ids=str,
)
def test_options_come_before_the_folder(folder, tmp_path, options, expected):
    _, request = generated(tmp_path, "--hf", folder, "a", *options)
    assert {name: request["sampling"].get(name) for name in expected} == expected


def test_an_answer_ends_at_a_token_that_only_config_json_names(tmp_path):
    folder = tmp_path / "hf"
    make_folder(folder)
    save_tokenizer(folder, "<eos>")
    config = json.loads((folder / "config.json").read_text())

    def answer(*options):
        return generated(tmp_path, "--hf", folder, "ab", *options)[1]["generated"]

    whole = answer("--ignore-eos")
    assert len(whole) == 4
    end = whole.index(whole[2])
    for named in (whole[2], [whole[2]], [271, whole[2]], [whole[2], 271]):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": named}))
        hf._open.cache_clear()  # a command reads a folder once
        assert answer() == whole[: end + 1]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.5}, {}),
        ({"do_sample": True, "temperature": 0.5, "top_k": 20}, {"temperature": 0.5, "top_k": 20}),
        ({"do_sample": True, "top_p": 1.0, "top_k": 3}, {"top_k": 3}),
        ({"do_sample": True, "top_p": 0.9, "top_k": 3, "min_p": 0.1}, {"top_p": 0.9, "top_k": 3, "min_p": 0.1}),
        ({"do_sample": True, "top_k": 272, "min_p": None}, {}),
        ({"do_sample": False, "temperature": 0.5, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1, "top_k": 20}, {"repetition_penalty": 1.1}),
    ],
)
def test_default_sampling(tmp_path, generation, expected):
    make_folder(tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    args = argparse.Namespace(hf=str(tmp_path / "hf"), no_generation_config=False, tokenizer="bytes")
    assert default_sampling(args) == expected
    assert tokenizer_of(args, 272).end_tokens == ()
    args.num_speculative_tokens = 2
    if "repetition_penalty" in expected:
        said = r"hf/generation_config\.json: repetition_penalty=1\.1 does not go with --num-speculative-tokens"
        with pytest.raises(InputError, match=said):
            default_sampling(args)
    else:
        assert default_sampling(args) == expected


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ([], [257, 256, 258]),
        (["--no-generation-config"], [257, 258]),
        (["--tokenizer", "OTHER"], [256, 259, 258]),
        (["--tokenizer", "bytes"], [257]),
    ],
    ids=str,
)
def test_end_tokens_are_those_of_all_files(tmp_path, options, ends):
    """Of the tokenizer's folder and of the model's: the tokenizer's own first."""
    names = ("<eos>", "<|im_end|>", "<|endoftext|>", "<|eot|>")
    folder, other = tmp_path / "hf", tmp_path / "OTHER"
    make_folder(folder)
    other.mkdir()
    for path, own in ((folder, names[1]), (other, names[0])):
        save_tokenizer(path, *names)
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": own}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 258}))
    (other / "config.json").write_text(json.dumps({"eos_token_id": 259}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    options = [str(other) if word == "OTHER" else word for word in options]
    args = generate.make_parser().parse_args(["x", "--hf", str(folder), *options])
    tokenizer = tokenizer_of(args, 272)
    assert [tokenizer.eod, *tokenizer.end_tokens] == ends


def test_convert_writes_a_checkpoint_of_the_same_weights(folder, tmp_path, platform, capsys):
    assert convert.main(["--hf", str(folder), "--out", str(tmp_path / "mcore"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'mcore'}: " in said and " GB in " in said and " s to load, " in said
    right = build_hybrid_model(hf=folder, platform=platform)
    model = build_hybrid_model(open_folder(folder).config, seed=5, platform=platform)
    load_checkpoint(model, tmp_path / "mcore")
    for (name, value), (_, wanted) in zip(model.named_parameters(), right.named_parameters(), strict=True):
        assert value.equal(wanted), name


# What is wrong with a folder's files: tests/models/test_hf_folder.py.
BAD = {
    "two models": (["x", "--hf", "FOLDER", "--preset", "tiny"], "--preset tiny: give one of them"),
    "two weights": (["x", "--hf", "FOLDER", "--load", "."], "--load .: give one of them"),
    "no tokenizer": (["x", "--hf", "BARE"], "BARE has no tokenizer.json: give --tokenizer DIR, or --tokenizer bytes"),
    "broken": (["x", "--hf", "BROKEN"], "BROKEN/model-00002-of-00002.safetensors is missing: it has model."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    argv, message = BAD[name]
    make_folder(tmp_path / "BARE")
    make_folder(tmp_path / "BROKEN", shards=2)
    (tmp_path / "BROKEN/model-00002-of-00002.safetensors").unlink()
    argv = [str(folder) if word == "FOLDER" else word for word in argv]
    assert generate.main([*argv, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [bench, serve, convert])
def test_the_other_commands_take_a_folder_and_refuse_a_hub_name(command, tmp_path, capsys):
    argv = {bench: ["no_reuse"], convert: ["--out", str(tmp_path / "new")]}
    assert command.main([*argv.get(command, []), "--hf", "nvidia/Nemo-8B"]) == 2
    error = capsys.readouterr().err
    assert "hf download nvidia/Nemo-8B" in error and error.count("\n") == 1
