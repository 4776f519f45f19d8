"""`hybrid-prefix plan --gpu-gb`: what fits a GPU beside the weights, and which budget to give."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from megatron_hybrid_prefix.cli import plan
from megatron_hybrid_prefix.lab.budget import KEPT_FREE, left_bytes, parameter_count, weight_bytes
from megatron_hybrid_prefix.models import get_preset
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, make_folder
from tests.harness.hf_state_dict import hf_shapes

GIB = 2**30


PRESETS = {
    **{"nemotron-h-8b": "nemotron_h", "qwen3-next-80b-a3b": "qwen3_next", "granite-4.0-h-small": "granitemoehybrid"},
    **dict.fromkeys(["nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "tiny-nemotron-3"], "nemotron_h"),
    **{"qwen3.5-27b": "qwen3_5_text", "qwen3.5-35b-a3b": "qwen3_5_moe_text", "olmo-hybrid-7b": "olmo_hybrid"},
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


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_budget_fills_what_the_weights_leave_and_no_more(tp):
    config = get_preset("nemotron-h-8b")
    weights = weight_bytes(config, tp)
    assert weights == 2 * parameter_count(config) // tp
    room = int(80e9 * (1 - KEPT_FREE)) - weights
    assert room - 0.01 * GIB < left_bytes(config, tp, 80 * 10**9) <= room
    assert left_bytes(config, 1, 16 * 10**9) == 0


def test_the_budget_that_it_names_can_be_planned(tmp_path, capsys):
    path = tmp_path / "fit.json"
    make_folder(tmp_path / "hf")
    for model, gpu_gb in ((["nemotron-h-8b", "--tp", "2"], 20), (["--hf", str(tmp_path / "hf")], 1)):
        options = [*model, "--conversation-tokens", "200", "--json", str(path)]
        assert plan.main([*options, "--gpu-gb", str(gpu_gb)]) == 0
        fit = json.loads(path.read_text())
        (cache_gb,) = re.findall(r"left for the cache .*--cache-gb ([\d.]+)", capsys.readouterr().out)
        assert plan.main([*options, "--cache-gb", cache_gb]) == 0
        planned = json.loads(path.read_text())
        assert (planned["cache_bytes"], planned["plan"]) == (fit["cache_bytes"], fit["plan"])
        assert fit["weight_bytes"] > 0 and planned["weight_bytes"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give MODEL or --hf DIR, and only one of them"),
        (["tiny", "--hf", "x", "--gpu-gb", "1"], "give MODEL or --hf DIR"),
        (["tiny"], "give --cache-gb or --gpu-gb, and only one of them"),
        (["tiny", "--mamba-gb", "1", "--gpu-gb", "1"], "--mamba-gb 1: the most for checkpoints in --cache-gb 0.8"),
        (["nemotron-h-8b", "--gpu-gb", "16"], "--gpu-gb 16 leaves 0 GiB beside 15.1 GiB of weights: a state, a"),
        (["tests/models/hf_configs/nemotron_h_old.json", "--gpu-gb", "1"], "--gpu-gb: needs --hf or a preset"),
        (["nosuch"], "nosuch: neither a file nor a preset"),
        (["--hf", "nosuch"], "--hf: there is no folder nosuch"),
        (["--hf", "nvidia/Nemo-8B", "--gpu-gb", "80"], "hf download nvidia/Nemo-8B"),
    ],
)
def test_bad_options_are_one_line(argv, message, capsys):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
