"""Every field of transformers' config classes: it is honoured, or refused unless neutral, or has no effect on an answer.

The lists below are complete: a release of transformers with another field fails. Defaults are those of the classes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from megatron_hybrid_prefix.lab.capacity import sizes_of
from megatron_hybrid_prefix.models.hf.dimensions import KV_DEFAULTS, dimensions_of
from tests.harness.hf_helpers import BAMBA_ASKED, NEMOTRON_H_EXPERTS_ASKED, QWEN3_NEXT_ASKED

CLASSES = {"nemotron_h": "NemotronH", "bamba": "Bamba", "qwen3_next": "Qwen3Next"}
# Dimensions of which none is a default of a class.
GIVEN = {
    "nemotron_h": NEMOTRON_H_EXPERTS_ASKED["model"] | {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "bamba": BAMBA_ASKED["model"],
    "qwen3_next": QWEN3_NEXT_ASKED["model"],
}
GIVEN = {
    family: {name: value for name, value in given.items() if name != "hybrid_override_pattern"}
    | {"model_type": family, "max_position_embeddings": 1024}
    for family, given in GIVEN.items()
}
SCALED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}

# Another value of a field, and the field here that it changes.
HONOURED = {
    "nemotron_h": {
        "vocab_size": (512, "vocab_size"),
        "hidden_size": (128, "hidden_size"),
        "layers_block_type": (["full_attention", "linear_attention"], "layer_pattern"),
        "tie_word_embeddings": (True, "tie_embeddings"),
        "num_attention_heads": (2, "num_attention_heads"),
        "num_key_value_heads": (4, "num_query_groups"),
        "head_dim": (64, "kv_channels"),
        "max_position_embeddings": (99, "max_sequence_length"),
        "intermediate_size": (99, "ffn_hidden_size"),
        "ssm_state_size": (99, "mamba_state_dim"),
        "mamba_num_heads": (4, "mamba_num_heads"),
        "mamba_head_dim": (99, "mamba_head_dim"),
        "n_groups": (4, "mamba_num_groups"),
        "conv_kernel": (3, "d_conv"),
        "mamba_ssm_cache_dtype": ("bfloat16", "state_dtype"),
        "n_routed_experts": (32, "num_moe_experts"),
        "num_experts_per_tok": (2, "moe_router_topk"),  # with topk_group 1
        "routed_scaling_factor": (1.5, "moe_router_scaling"),
        "n_group": (8, "moe_router_groups"),
        "topk_group": (1, "moe_router_topk_groups"),  # with num_experts_per_tok 2
        "moe_intermediate_size": (99, "moe_ffn_hidden_size"),
        "moe_shared_expert_intermediate_size": (99, "moe_shared_expert_intermediate_size"),
    },
    "bamba": {
        "vocab_size": (512, "vocab_size"),
        "tie_word_embeddings": (True, "tie_embeddings"),
        "hidden_size": (128, "hidden_size"),
        "intermediate_size": (99, "ffn_hidden_size"),
        "num_hidden_layers": (5, "layer_pattern"),
        "num_attention_heads": (8, "num_attention_heads"),
        "num_key_value_heads": (4, "num_query_groups"),
        "max_position_embeddings": (99, "max_sequence_length"),
        "attn_layer_indices": ([0], "layer_pattern"),
        "mamba_n_heads": (4, "mamba_num_heads"),
        "mamba_expand": (4, "mamba_head_dim"),
        "mamba_n_groups": (4, "mamba_num_groups"),
        "mamba_d_state": (99, "mamba_state_dim"),
        "mamba_d_conv": (3, "d_conv"),
        "rope_parameters": ({"rope_theta": 99.0}, "rotary_base"),
    },
    "qwen3_next": {
        "vocab_size": (512, "vocab_size"),
        "hidden_size": (128, "hidden_size"),
        "intermediate_size": (99, "ffn_hidden_size"),
        "num_hidden_layers": (4, "layer_pattern"),  # with as many layer_types
        "num_attention_heads": (8, "num_attention_heads"),
        "num_key_value_heads": (4, "num_query_groups"),
        "max_position_embeddings": (99, "max_sequence_length"),
        "rms_norm_eps": (1e-4, "layernorm_epsilon"),
        "tie_word_embeddings": (True, "tie_embeddings"),
        "rope_parameters": ({"rope_theta": 99.0}, "rotary_base"),
        "head_dim": (64, "kv_channels"),
        "linear_conv_kernel_dim": (3, "d_conv"),
        "linear_key_head_dim": (99, "gdn_key_head_dim"),
        "linear_value_head_dim": (99, "gdn_value_head_dim"),
        "linear_num_key_heads": (3, "gdn_num_key_heads"),
        "linear_num_value_heads": (8, "gdn_num_value_heads"),
        "decoder_sparse_step": (2, "layer_pattern"),
        "moe_intermediate_size": (99, "moe_ffn_hidden_size"),
        "shared_expert_intermediate_size": (99, "moe_shared_expert_intermediate_size"),
        "num_experts_per_tok": (4, "moe_router_topk"),
        "num_experts": (16, "num_moe_experts"),
        "mlp_only_layers": ([0, 4], "layer_pattern"),
        "layer_types": (["full_attention"] + 4 * ["linear_attention"], "layer_pattern"),
    },
}
WITH = {
    ("nemotron_h", "num_experts_per_tok"): {"topk_group": 1},
    ("nemotron_h", "topk_group"): {"num_experts_per_tok": 2},
    ("qwen3_next", "num_hidden_layers"): {"layer_types": ["full_attention"] + 3 * ["linear_attention"]},
}

# A value that this package cannot compute with, or the values.
REFUSED = {
    "nemotron_h": {
        "attention_bias": True,
        "sliding_window": 4096,
        "mlp_hidden_act": "gelu",
        "mlp_bias": True,
        "mamba_hidden_act": "gelu",
        "time_step_limit": [0.0, 0.1],
        "use_conv_bias": False,
        "mamba_proj_bias": True,
        "n_shared_experts": 2,
        "moe_latent_size": 16,
        "norm_topk_prob": False,
        "use_bias": True,
        "layer_norm_epsilon": 1e-6,
        "residual_in_fp32": True,
    },
    "bamba": {
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-6,
        "mamba_d_head": 99,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": [0.0, 0.1],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3_next": {"hidden_act": "gelu", "attention_bias": True, "norm_topk_prob": False},
}

SHAPE_OF_AN_ANSWER = "what a call returns"
TRAINING = "training only"
IDS = "names of tokens: generation_config.json and the tokenizer have those that count"
SPEED = "how it is computed, not what"
NO_EFFECT = {
    "use_cache": SPEED,
    "pad_token_id": IDS,
    "bos_token_id": IDS,
    "eos_token_id": IDS,
    "attention_dropout": TRAINING,
    "hidden_dropout": TRAINING,
    "initializer_range": TRAINING,
    "num_logits_to_keep": SHAPE_OF_AN_ANSWER,
    "output_router_logits": SHAPE_OF_AN_ANSWER,
    "router_aux_loss_coef": TRAINING,
    "z_loss_coefficient": TRAINING,
    "use_mamba_kernels": SPEED,
    "chunk_size": SPEED,
    "mamba_chunk_size": SPEED,
    "moe_shared_expert_overlap": SPEED,
    "expand": "the width is mamba_num_heads x mamba_head_dim",
    "time_step_min": "initial values; transformers also clamps the step size at it, NVIDIA's code and megatron do not",
    "time_step_max": "initial values",
    "time_step_floor": "initial values",
    "rescale_prenorm_residual": "initial values",
    "num_nextn_predict_layers": "multi-token prediction is left out",
    "mtp_layers_block_type": "multi-token prediction is left out",
}
# Fields without effect that transformers' modules read nevertheless.
READ = {
    *("pad_token_id", "attention_dropout", "initializer_range", "num_logits_to_keep", "output_router_logits"),
    *("router_aux_loss_coef", "z_loss_coefficient", "use_mamba_kernels", "chunk_size", "mamba_chunk_size"),
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
}
# Absent is the layer kind's choice here; transformers does not read it either.
ANOTHER_DEFAULT = {"mamba_ssm_cache_dtype"}
# Fields that decide which layers there are come with others.
LAYERS = {"layers_block_type", "layer_types", "attn_layer_indices", "num_hidden_layers"}


def fields_of(family):
    """Of the family's config class, without those of every model: names and defaults."""
    common = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    found = dataclasses.fields(getattr(transformers, f"{CLASSES[family]}Config"))
    return {field.name: field.default for field in found if field.name not in common}


def dimensions(family, **changes):
    data = GIVEN[family] | changes
    return dimensions_of({name: value for name, value in data.items() if value is not ...}, "DIR/config.json")


@pytest.mark.parametrize("family", CLASSES)
def test_the_lists_are_complete(family):
    fields = fields_of(family)
    assert fields.keys() == HONOURED[family].keys() | REFUSED[family].keys() | (NO_EFFECT.keys() & fields.keys())
    assert not HONOURED[family].keys() & REFUSED[family].keys() and not NO_EFFECT.keys() & HONOURED[family].keys()


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, of in HONOURED.items() for name in of])
def test_a_field_that_is_honoured(family, name):
    value, ours = HONOURED[family][name]
    others = WITH.get((family, name), {})
    before, after = dimensions(family), dimensions(family, **others, **{name: value})
    assert getattr(after, ours) != getattr(before, ours)
    assert value in (getattr(after, ours), {"rope_theta": getattr(after, ours)}) or name in LAYERS | {
        *("decoder_sparse_step", "mlp_only_layers", "mamba_expand")
    }


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, of in REFUSED.items() for name in of])
def test_a_field_that_is_refused(family, name):
    with pytest.raises(ValueError, match=rf"^DIR/config\.json: .*{name}") as error:
        dimensions(family, **{name: REFUSED[family][name]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", CLASSES)
def test_fields_without_effect(family):
    module = Path(transformers.__file__).parent / "models" / family / f"modeling_{family}.py"
    source = module.read_text()
    for name in NO_EFFECT.keys() & fields_of(family).keys():
        for value in (0, 7, True, [0.1], "x"):
            assert dimensions(family, **{name: value}) == dimensions(family), name
        assert name in READ or f"config.{name}" not in source, name


@pytest.mark.parametrize("family", CLASSES)
def test_what_a_file_does_not_say_is_what_the_class_says(family, tmp_path):
    """A missing field is the class's default, or an error that names it."""
    required = set()
    for name, default in fields_of(family).items():
        if name in LAYERS | ANOTHER_DEFAULT or default is dataclasses.MISSING:
            continue
        if family == "bamba" and name in ("mamba_expand", "mamba_d_head"):
            changes = {"mamba_d_head": ..., "mamba_expand": ...}
            assert dimensions(family, **changes) == dimensions(family, mamba_d_head="auto", mamba_expand=2)
            continue
        others = {"n_group": ..., "topk_group": ...} if name in ("n_group", "topk_group") else {}
        others |= {"num_attention_heads": 8} if name == "num_key_value_heads" else {}
        try:
            missing = dimensions(family, **others | {name: ...})
        except ValueError as error:
            required.add(name)
            assert str(error) == f"DIR/config.json: {name} is missing"
            continue
        assert dimensions(family, **others | {name: default}) == missing, name
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= required
    # A rotary base or fraction that the file does not say is transformers', too.
    if family != "nemotron_h":
        theirs = getattr(transformers, f"{CLASSES[family]}Config")().rope_parameters
        ours = dimensions(family, rope_parameters=...)
        assert (ours.rotary_base, ours.rotary_fraction) == (theirs["rope_theta"], theirs["partial_rotary_factor"])


def test_key_value_heads_and_channels_are_those_of_the_classes_here_and_in_the_plan(tmp_path):
    for family, (kv_heads, channels) in KV_DEFAULTS.items():
        name = CLASSES.get(family, "FalconH1")
        theirs = getattr(transformers, f"{name}Config")()
        assert theirs.num_key_value_heads == kv_heads and getattr(theirs, "head_dim", None) == channels
    for family in CLASSES:
        for changes in ({}, {"num_key_value_heads": ..., "head_dim": ...}, {"num_key_value_heads": None}):
            data = {**GIVEN[family], "num_attention_heads": 8, **changes}
            if family == "bamba":
                data |= {"mamba_d_head": 16}
            data = {name: value for name, value in data.items() if value is not ...}
            ours = dimensions_of(data, "c")
            (tmp_path / "config.json").write_text(json.dumps(data))
            planned = sizes_of(str(tmp_path))
            assert planned.config == ours
            if family == "bamba":  # the other classes take no null
                allowed = {key: value for key, value in data.items() if key != "model_type"}
                theirs = getattr(transformers, f"{CLASSES[family]}Config")(**allowed)
                assert ours.num_query_groups == theirs.num_key_value_heads


OLD = [  # names of transformers 4, and of NVIDIA's own files
    ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": "M*M"}, "layer_pattern", "M*M"),
    ("nemotron_h", {"layers_block_type": ..., "layer_types": ["mamba", "attention"]}, "layer_pattern", "M*"),
    ("nemotron_h", {"hybrid_override_pattern": "M*M"}, "layer_pattern", "M*-E"),  # as in transformers
    ("nemotron_h", {"head_dim": ..., "attention_head_dim": 40}, "kv_channels", 40),
    ("nemotron_h", {"mamba_n_groups": 4}, "mamba_num_groups", 4),
    ("nemotron_h", {"mamba_d_conv": 3}, "d_conv", 3),
    ("nemotron_h", {"n_routed_experts": ..., "num_local_experts": 8}, "num_moe_experts", 8),
    ("nemotron_h", {"rope_theta": 99}, "rotary_base", None),
    ("nemotron_h", {"use_sliding_window": False, "sliding_window": 9}, "hidden_size", 64),
    ("bamba", {"rope_theta": 99.0}, "rotary_base", 99),
    ("bamba", {"rope_scaling": None}, "rotary_base", 10_000),
    ("bamba", {"head_dim": 32}, "kv_channels", 32),
    ("bamba", {"attn_rotary_emb": 8, "partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
    ("bamba", {"mamba_d_head": 16}, "mamba_head_dim", 16),
    ("qwen3_next", {"rope_parameters": ..., "rope_theta": 99}, "rotary_base", 99),
    ("qwen3_next", {"rope_parameters": ..., "partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
    ("qwen3_next", {"rope_scaling": {"type": "default", "rope_theta": 99}}, "rotary_base", 99),
    ("qwen3_next", {"layer_types": ..., "full_attention_interval": 2}, "layer_pattern", "GE*EGE*EG-"),
    ("qwen3_next", {"torch_dtype": None}, "dtype", "bfloat16"),
    ("qwen3_next", {"torch_dtype": "torch.float32"}, "dtype", "float32"),
    ("qwen3_next", {"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype", "float32"),
]


@pytest.mark.parametrize(("family", "changes", "name", "value"), OLD)
def test_an_old_name(family, changes, name, value):
    assert getattr(dimensions(family, **changes), name) == value


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("nemotron_h", {"mamba_conv_bias": False}, "use_conv_bias is False"),
        ("nemotron_h", {"mamba_dt_limit": [0.0, 0.1]}, "time_step_limit is"),
        ("nemotron_h", {"layer_norm_epsilon": ..., "norm_eps": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ("bamba", {"rope_parameters": SCALED}, "rope_type 'yarn'"),
        ("bamba", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("bamba", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has full_attention"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ("bamba", {"attn_rotary_emb": 16}, "attn_rotary_emb is 16; transformers turns 0.5 x 16"),
        ("bamba", {"sliding_window": 9}, "sliding_window"),
        ("bamba", {"attn_layer_indices": [40]}, r"attn_layer_indices is \[40\], no list of layers from 0 to"),
        ("bamba", {"attn_layer_indices": None}, "has no attention layer"),
        ("qwen3_next", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "has mrope_section"),
        ("qwen3_next", {"sliding_window": 9}, "sliding_window"),
        *[(family, {"quantization_config": {"bits": 4}}, "quantization_config: quantized") for family in CLASSES],
    ],
)
def test_an_old_name_that_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        dimensions(family, **changes)
