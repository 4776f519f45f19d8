"""`hybrid-prefix plan --gpu-gb`: what fits a GPU beside the weights, and which budget to give."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace

import pytest

from megatron_hybrid_prefix.cli import plan
from megatron_hybrid_prefix.lab.budget import Usage, plan_budget
from megatron_hybrid_prefix.lab.capacity import sizes_of_config
from megatron_hybrid_prefix.lab.fit import KEPT_FREE, fits, parameter_count
from megatron_hybrid_prefix.models import get_preset
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, make_folder
from tests.harness.hf_state_dict import hf_shapes

GIB = 2**30


PRESETS = {
    **{"nemotron-h-8b": "nemotron_h", "qwen3-next-80b-a3b": "qwen3_next", "granite-4.0-h-small": "granitemoehybrid"},
    **dict.fromkeys(["nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "tiny-nemotron-3"], "nemotron_h"),
    **{"qwen3.5-27b": "qwen3_5_text", "qwen3.5-35b-a3b": "qwen3_5_moe_text"},
}


@pytest.mark.parametrize("name", [*PRESETS, *MODELS])
def test_parameters_are_those_of_the_files(name):
    config, model_type = (
        (get_preset(name), PRESETS[name]) if name in PRESETS else (CONFIGS[name], MODELS[name].model_type)
    )
    shapes = hf_shapes(config, model_type)
    tied, untied = (replace(config, tie_embeddings=tie) for tie in (True, False))
    assert parameter_count(untied) == sum(map(math.prod, shapes.values()))
    assert parameter_count(untied) - parameter_count(tied) == config.vocab_size * config.hidden_size


def test_the_budget_fills_what_the_weights_leave_and_no_more():
    config = get_preset("nemotron-h-8b")
    usage = Usage(conversation_tokens=8192, block_tokens=256, max_requests=1)
    found = fits(config, usage, gpu_bytes=80 * 10**9)
    assert [fit.tp for fit in found] == [1, 2, 4, 8]
    for fit in found:
        sizes = sizes_of_config("m", config, tp=fit.tp)
        room = int(80e9 * (1 - KEPT_FREE)) - fit.weight_bytes
        assert room - 0.01 * GIB < fit.cache_bytes <= room == fit.left_bytes
        one = 32 * sizes.kv_block_bytes(256) + fit.plan.layout.page_bytes
        assert fit.cache_bytes - 4 * one < fit.plan.conversations * one < fit.cache_bytes
        assert fit.plan == plan_budget(sizes, usage, cache_bytes=fit.cache_bytes)
    assert [fit.tp for fit in fits(get_preset("tiny"), usage, gpu_bytes=10**9)] == [1, 2, 4]
    assert fits(config, usage, gpu_bytes=16 * 10**9)[0].plan is None


def test_the_budget_that_it_names_can_be_planned(tmp_path, capsys):
    path = tmp_path / "fit.json"
    options = ["--conversation-tokens", "4000", "--json", str(path)]
    assert plan.main(["nemotron-h-8b", "--gpu-gb", "20", *options]) == 0
    report = json.loads(path.read_text())
    said = capsys.readouterr().out
    assert report["advice"] in said and "conversations of 4,000 tokens" in said
    words = shlex.split(report["advice"])
    assert words[words.index("serve") :][:3] == ["serve", "--preset", "nemotron-h-8b"] and "--cache-gb" in words
    assert plan.main([*words[words.index("nemotron-h-8b") :], *options]) == 0
    planned, fit = json.loads(path.read_text()), report["fits"][1]  # on one GPU not all 64 that run are kept
    assert planned["cache_bytes"] == fit["cache_bytes"]
    assert planned["plan"]["conversations"] == fit["plan"]["conversations"]


def test_the_smallest_size_that_keeps_so_many(tmp_path):
    """Without the option: all conversations that may run."""
    options = [
        "nemotron-h-8b",
        "--gpu-gb",
        "80",
        "--conversation-tokens",
        "65536",
        "--json",
        str(tmp_path / "fit.json"),
    ]
    for wanted, least, tp in (
        ("--max-requests 64", 64, 2),
        ("--max-requests 32", 32, 1),
        ("--conversations 200", 200, 4),
    ):
        assert plan.main([*options, *wanted.split()]) == 0
        report = json.loads((tmp_path / "fit.json").read_text())
        assert f" --tp {tp} " in report["advice"]
        assert tp == next(fit["tp"] for fit in report["fits"] if fit["plan"]["conversations"] >= least)
    assert plan.main([*options, "--conversations", "1000"]) == 0
    said = json.loads((tmp_path / "fit.json").read_text())["advice"]
    assert said.startswith("no GPU of 80 GB holds 1/8 of this model and 1,000 conversations of 65,536 tokens, at most ")


def test_the_budget_of_a_folder(tmp_path, capsys):
    make_folder(tmp_path / "hf")
    path, short = tmp_path / "fit.json", ["--conversation-tokens", "200"]
    assert plan.main(["--hf", str(tmp_path / "hf"), "--gpu-gb", "1", *short, "--json", str(path)]) == 0
    words = shlex.split(json.loads(path.read_text())["advice"])
    assert words[:4] == ["hybrid-prefix", "serve", "--hf", str(tmp_path / "hf")]
    assert plan.main([*words[2:], *short]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give MODEL or --hf DIR, and only one of them"),
        (["tiny", "--hf", "x", "--gpu-gb", "1"], "give MODEL or --hf DIR"),
        (["tiny"], "give --cache-gb, or --gpu-gb alone"),
        (["tiny", "--mamba-gb", "1", "--gpu-gb", "1"], "or --gpu-gb alone"),
        (["tests/models/hf_configs/nemotron_h_old.json", "--gpu-gb", "1"], "with --hf or a preset"),
        (["nosuch"], "nosuch: neither a file nor a preset"),
        (["--hf", "nosuch"], "--hf: there is no folder nosuch"),
        (["--hf", "nvidia/Nemo-8B", "--gpu-gb", "80"], "hf download nvidia/Nemo-8B"),
    ],
)
def test_bad_options_are_one_line(argv, message, capsys):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
