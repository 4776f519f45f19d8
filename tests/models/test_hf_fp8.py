"""Folders whose weights are in fp8: models have the values of the files times their scales, in float32 bits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix.cli import plan
from megatron_hybrid_prefix.models import build_hybrid_model, hf_load, open_folder, save_hf_folder
from megatron_hybrid_prefix.models.hf.folder import stored_weights, with_scales
from megatron_hybrid_prefix.models.hf.mapping import Rule, Source
from megatron_hybrid_prefix.models.hf_weights import Copy
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from tests.harness.engine_helpers import unequal
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, config_json, logits_of_transformers, save_shards
from tests.harness.hf_state_dict import copy_hf_weights, hf_shapes
from tests.harness.workers.launch import run_play


def compressed(**weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


RAGGED = [20, 24]  # matrices' ends cut blocks off, and ranks' shards begin within blocks
BLOCKS = {"quant_method": "fp8", "weight_block_size": RAGGED, "modules_to_not_convert": ["lm_head"]}
# quantization_config; the block of a scale, None: all of it; what follows a weight's name.
METHODS = {
    "blocks": (BLOCKS, RAGGED, "_scale_inv"),
    "even blocks": (BLOCKS | {"weight_block_size": [8, 8]}, [8, 8], "_scale_inv"),
    "powers of two": (BLOCKS | {"weight_block_size": [8, 8], "scale_fmt": "ue8m0"}, [8, 8], "_scale_inv"),
    "whole": ({"quant_method": "fp8"}, [None, None], "_scale_inv"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, [None, None], "_scale"),
    "modelopt, a file of its own": (None, [None, None], "_scale"),
    "tensor": (compressed(strategy="tensor"), [None, None], "_scale"),
    "channel": (compressed(strategy="channel"), [1, None], "_scale"),
    "block": (compressed(strategy="block", block_structure=RAGGED), RAGGED, "_scale"),
}
IN_FP8 = ("_proj", "_proj_qkvz", "_proj_qkv", "_proj_z", "_linear")  # ends of modules' names
FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))
CONFIG, UP, NORM = "quantization_config", "model.layers.2.mixer.up_proj.weight", "model.norm_f.weight"
LEFT_OUT = ".input_scale", ".activation_scale", "_activation_scale", ".output_scale"
LEFT_OUT += ".q_scale", ".k_scale", ".v_scale"


def quantised(weight, block, dtype=torch.float32):
    """A weight in fp8, its scales (of ``dtype``, in float32), and the float32 that they stand for."""
    *stack, rows, columns = weight.shape
    height, width = block[0] or rows, block[1] or columns
    scale = (torch.rand(*stack, ceil_div(rows, height), ceil_div(columns, width)) / 64 + 1 / 64).to(dtype).float()
    each = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., :rows, :columns]
    stored = (weight / each).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * each


def make_folder(folder, kind="nemotron_h", method="blocks", *, stacked=False):
    """Random weights, linear layers in fp8, scales in another file; returns the weights as they are to be read."""
    config, block, suffix = METHODS[method]
    dtype = torch.float8_e8m0fnu if method == "powers of two" else torch.float32
    folder.mkdir()
    if config is None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (folder / "config.json").write_text(json.dumps(config_json(kind) | {CONFIG: config}))
    torch.manual_seed(1)
    shapes = hf_shapes(CONFIGS[kind], MODELS[kind].model_type, *stacked * ["model.0.mlp.experts.down_proj"])
    right, weights, scales = {name: torch.randn(shape) for name, shape in shapes.items()}, {}, {}
    for name, weight in right.items():
        weights[name], module = weight, name.removesuffix(".weight")
        if module.endswith(IN_FP8):
            weights[name], scale, right[name] = quantised(weight, block, dtype)
            scales[name + suffix] = (scale.reshape(()) if scale.numel() == 1 else scale).to(dtype)
            scales |= {module + each: torch.zeros(()) for each in (LEFT_OUT if suffix == "_scale" else ())}
    save_shards(folder, weights, scales)
    return right


CASES = [("nemotron_h_experts", method, method == "modelopt") for method in METHODS]
CASES += [(kind, "blocks", stacked) for kind in ("qwen3_next", "qwen3_5_moe", "granite") for stacked in (False, True)]


@pytest.mark.parametrize(("kind", "method", "stacked"), CASES)
def test_a_folder_is_read_planned_with_both_sizes_and_saved_without_scales(platform, tmp_path, kind, method, stacked):
    right, other = make_folder(tmp_path / "hf", kind, method, stacked=stacked), build_hybrid_model(CONFIGS[kind])
    copy_hf_weights(other, right, CONFIGS[kind], MODELS[kind].model_type)
    model = build_hybrid_model(hf=tmp_path / "hf")
    assert unequal(model, other) == []
    assert plan.main(["--hf", str(tmp_path / "hf"), "--cache-gb", "1", "--json", str(tmp_path / "plan")]) == 0
    found, values = json.loads((tmp_path / "plan").read_text()), sum(weight.numel() for weight in right.values())
    assert found["weight_bytes"] == 4 * values and found["file_bytes"] == open_folder(tmp_path / "hf").weight_bytes
    assert values < found["file_bytes"] < 3 * values
    save_hf_folder(model, tmp_path / "again")
    assert CONFIG not in json.loads((tmp_path / "again/config.json").read_text())
    assert {weight.dtype for weight in stored_weights(tmp_path / "again").values()} == {"bfloat16"}


def on_ranks(_, *names):
    """Parameters that differ from those of an ordinary folder with transformers' values."""
    return {name: unequal(*(build_hybrid_model(hf=f"{name}{of}") for of in ("", "-right"))) for name in names}


@pytest.mark.slow
@pytest.mark.multi
def test_transformers_has_the_same_bits_and_two_ranks_their_parts(platform, tmp_path):
    """Matrix by matrix: of stacks it ignores the scales. Ranks' parts begin within blocks."""
    kinds = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h_experts")
    for kind in kinds:
        make_folder(tmp_path / kind, kind, "powers of two" if kind == "qwen3_5" else "even blocks")
    for folder, found in logits_of_transformers({tmp_path / kind: [1] for kind in kinds}).items():
        assert found["wrong"] == []
        model = build_hybrid_model(CONFIGS[folder.name])
        copy_hf_weights(model, found["state_dict"], CONFIGS[folder.name], MODELS[folder.name].model_type)
        save_hf_folder(model, f"{folder}-right", dtype="float32")
    names = [str(tmp_path / kind) for kind in kinds]
    play = {"sizes": {"tp": 2}, "parts": {"folders": ["tests.models.test_hf_fp8:on_ranks", *names]}}
    found = [on_ranks(None, *names), *(rank["folders"] for rank in run_play(tmp_path, play))]
    assert found == 3 * [{name: [] for name in names}]


def read_slice(folder, block, rows, columns, chunk_bytes, dtype, **changes):
    """What a rank reads of a matrix in a stack of them, and what it should."""
    stored, scale, right = quantised(torch.randn(2, 11, 13), block, dtype)
    save_file({"w": stored, "w_scale": scale.to(dtype)}, file := folder / "model.safetensors")
    part = right[1, slice(*rows), slice(*columns)]
    rule = Rule(target="t", sources=(Source(name="w", shape=(2, 11, 13), at=1),))
    copy = Copy(parameter=torch.full(part.shape, torch.nan, dtype=dtype), rule=rule, rows=[rows], columns=columns)
    with open(file, "rb") as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_load, "CHUNK_BYTES", chunk_bytes)
        slices = hf_load._slices(copy, with_scales(stored_weights(folder), (tuple(block),)))
        list(hf_load._read_all([replace(slice_, **changes) for slice_ in slices], {file: opened}))
    return copy.parameter, part.to(dtype)


ROWS, COLUMNS = (st.sets(st.integers(0, size), min_size=2, max_size=2).map(sorted) for size in (11, 13))
SIZES = st.sampled_from([None, 1, 2, 3, 5, 12, 128])


@given(st.tuples(SIZES, SIZES), ROWS, COLUMNS, st.integers(1, 200), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_slice_has_the_scales_of_its_blocks(tmp_path_factory, block, rows, columns, chunk_bytes, dtype):
    assert torch.equal(*read_slice(tmp_path_factory.getbasetemp(), block, rows, columns, chunk_bytes, dtype))


@pytest.mark.parametrize("begin", [(3, 1), (4, 0)])  # and not (4, 1)
def test_where_a_slice_begins_in_a_block_shows(tmp_path, begin):
    assert not torch.equal(*read_slice(tmp_path, (3, 3), (4, 8), (1, 8), 999, torch.float32, begin=begin))


WRONG = [
    *(({f"{UP}_scale_inv": torch.full((6, 3), float(bad))}, f"{SECOND} has {bad}, a") for bad in ("nan", "inf", "0.0")),
    ({f"{UP}_scale_inv": None}, f"{FIRST}: {UP} has dtype F8_E4M3, and no file has its {UP}_scale_inv"),
    ({f"{UP}_scale_inv": torch.ones(3, 6)}, rf"{UP}_scale_inv in .*{SECOND} has .* \(112, 64\) .* \(6, 3\)$"),
    ({f"{NORM}_scale": torch.ones(1)}, f"unknown weight {NORM}_scale in .*{SECOND}"),
    ({"a": torch.ones(3).to(torch.float8_e4m3fn), "a_scale": torch.ones(3)}, f"a_scale in .*{SECOND} .* a matrix$"),
    ({"a": torch.ones(3).to(torch.float8_e5m2)}, f"{SECOND}: a has dtype F8_E5M2, none of"),
    ({CONFIG: None}, f"{FIRST}: .* has dtype F8_E4M3, and config.json has no {CONFIG}$"),
    ({CONFIG: True}, f"config.json: {CONFIG} is True, no JSON object"),
    *(({CONFIG: {"quant_method": name}}, f"'{name}', none .* no 4 bits;") for name in ("gptq", "awq", "bitsandbytes")),
    ({CONFIG: BLOCKS | {"weight_block_size": [128]}}, rf"{CONFIG}: weight_block_size is \[128\], no numbers of rows"),
    ({CONFIG: {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4', not FP8: only 8-bit"),
    ({CONFIG: compressed(num_bits=4)}, r"group_0: weights: type and num_bits are \('float', 4\): only"),
    ({CONFIG: compressed(strategy="group")}, "strategy is 'group', none of tensor, channel, block"),
    ({CONFIG: compressed() | {"transform_config": {"R1": {}}}}, f"{CONFIG}: transform_config: "),
]


def test_a_folder_of_which_keys_and_values_alone_are_quantised(platform, tmp_path):
    right, config = make_folder(folder := tmp_path / "hf"), {"quant_method": "compressed-tensors", "config_groups": {}}
    (folder / "config.json").write_text(json.dumps(config_json("nemotron_h") | {CONFIG: config}))
    save_shards(folder, right, {"model.layers.1.mixer.k_scale": torch.ones(1)})
    build_hybrid_model(hf=folder)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_one_line_that_names_tensor_and_file(platform, tmp_path, changes, message):
    make_folder(folder := tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(config_json("nemotron_h") | {CONFIG: changes.get(CONFIG, BLOCKS)}))
    scales = {name: value for name, value in (load_file(folder / SECOND) | changes).items() if torch.is_tensor(value)}
    save_shards(folder, load_file(folder / FIRST), scales)
    with pytest.raises(ValueError, match=message) as error:
        build_hybrid_model(hf=folder)
    assert "\n" not in str(error.value)
