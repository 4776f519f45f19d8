"""Published config.json files as dimensions: old and new spellings. test_hf_config_fields.py has every field by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hybrid_prefix.lab.capacity import sizes_of, sizes_of_config
from megatron_hybrid_prefix.models import get_preset
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of

FOLDER = Path(__file__).parent / "hf_configs"
# The preset, and what it leaves to the file.
PRESETS = {
    "nemotron_h": ("nemotron-h-8b", {"max_sequence_length": 8192, "state_dtype": "float32"}),
    "nemotron_3_nano": ("nemotron-3-nano-30b-a3b", {}),
    "nemotron_3_super": ("nemotron-3-super-120b-a12b", {}),
    "qwen3_next": ("qwen3-next-80b-a3b", {}),
    "qwen3_5": ("qwen3.5-27b", {"state_dtype": "float32"}),
    "qwen3_5_moe": ("qwen3.5-35b-a3b", {"state_dtype": "float32"}),
    "granitemoehybrid": ("granite-4.0-h-small", {}),
}


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("family", PRESETS)
def test_either_spelling_is_the_published_model(family, spelling):
    preset, changes = PRESETS[family]
    assert dimensions_of(read(f"{family}_{spelling}"), "c") == get_preset(preset, **changes)
    by_hand = sizes_of(str(FOLDER / f"{family}_{spelling}.json"))
    planned = sizes_of_config(preset, get_preset(preset, **changes))
    assert by_hand.state_dtype == planned.state_dtype
    assert (by_hand.kv_token_bytes, by_hand.state_bytes) == (planned.kv_token_bytes, planned.state_bytes)


EXPERTS = {
    "layers_block_type": ["mamba", "attention", "moe"],
    **{"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40},
    **{"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5},
}


@pytest.mark.parametrize(("groups", "expected"), [((1, 1), (0, 0)), ((4, 2), (4, 2)), ((4, 4), (0, 0))])
def test_experts_of_nemotron_h(groups, expected):
    given = read("nemotron_h_new") | EXPERTS | dict(zip(("n_group", "topk_group"), groups, strict=True))
    config = dimensions_of(given, "c")
    assert (config.moe_router_groups, config.moe_router_topk_groups) == expected
    assert (config.moe_router_score, config.moe_router_scaling) == ("sigmoid", 2.5)
    assert (config.num_moe_experts, config.moe_router_topk, config.expert_ffn_hidden_size) == (16, 4, 40)


@pytest.mark.parametrize("name", ["nemotron_h_new", "qwen3_next_new"])
@pytest.mark.parametrize("value", [list(range(5_000)), "x\n" * 5_000, 10**400], ids=["list", "text", "number"])
def test_a_line_about_a_long_value_is_short(name, value):
    """In whatever field. A value that a field does not read, or a text that it takes, is no error."""
    said = []
    given = read(name)
    for field in given:
        try:
            dimensions_of(given | {field: value}, "config.json")
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 10 and max(map(len, said)) < 500 and "\n" not in "".join(said)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemotron_h_old", {"model_type": None}, "model_type is missing"),
        (
            "nemotron_h_old",
            {"model_type": "llama"},
            "model_type 'llama' is not supported: it is none of bamba, .*nemotron_h.*; register_family adds one",
        ),
        ("nemotron_h_old", {"torch_dtype": "float16"}, "dtype is 'float16', none of float32, bfloat16"),
        ("nemotron_h_old", {"hidden_size": None}, "hidden_size is missing"),
        ("nemotron_h_old", {"hidden_size": "big"}, "hidden_size is 'big', not a whole number"),
        ("nemotron_h_old", {"num_hidden_layers": 51}, "hybrid_override_pattern has 52 layers"),
        ("nemotron_h_new", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type has 'conv'"),
        ("nemotron_h_new", EXPERTS | {"n_group": 4, "topk_group": 1}, "num_experts_per_tok is 4, and topk_group 1 of"),
        ("nemotron_h_new", EXPERTS | {"num_experts_per_tok": 1}, "moe_router_topk=1"),
        ("nemotron_h_new", {"n_groups": 7}, "mamba_num_heads=128 is not a multiple of mamba_num_groups=7"),
        ("nemotron_h_new", {"model_type": []}, r"model_type \[\] is not supported"),
        ("qwen3_next_new", {"layer_types": ["full_attention"]}, "layer_types must be 48 times"),
        ("qwen3_next_new", {"mlp_only_layers": 3}, "mlp_only_layers is 3, no list of layers"),
    ],
)
def test_what_cannot_be_run_is_one_line_that_names_it(name, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        dimensions_of(read(name) | changes, "DIR/config.json")
    assert str(error.value).startswith("DIR/config.json: ") and "\n" not in str(error.value)
