"""Bamba, as `nemotron_h`."""

from tests.harness.hf_families.entry import Fields, Model

# What Granite 4 has, too: layers of Mamba2 and attention.
LAYERS = {
    "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 272, "mamba_n_heads": 8, "mamba_d_head": "auto",
    "mamba_d_state": 24, "mamba_n_groups": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "mamba_chunk_size": 32,
}  # fmt: skip
# Prompts are below, at and above the original length.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPE = YARN | {"rope_theta": 500.0, "beta_fast": 4, "truncate": False, "mscale": 3.0, "mscale_all_dim": 0.5}
DIMENSIONS = LAYERS | {"attn_layer_indices": [1, 3], "intermediate_size": 112}
MODELS = {
    "bamba": Model(
        model_type="bamba",
        config_class="BambaConfig",
        model_class="BambaForCausalLM",
        dimensions=DIMENSIONS | {"rope_parameters": ROPE},
        changes=(
            {"rotary_base": 10_000},
            {"rotary_fraction": 0.25},
            {"yarn_original_length": 9},
            {"yarn_beta_fast": 40.0},
            {"yarn_beta_slow": 3.0},
            {"yarn_truncate": True},
        ),
    )
}

# Another value of a field, and the field here that it changes.
LAYERS_HONOURED = {
    "vocab_size": (512, "vocab_size"), "tie_word_embeddings": (True, "tie_embeddings"),
    "hidden_size": (128, "hidden_size"), "num_attention_heads": (8, "num_attention_heads"),
    "num_key_value_heads": (4, "num_query_groups"),
    "max_position_embeddings": (99, "max_sequence_length"),
    "mamba_n_heads": (4, "mamba_num_heads"), "mamba_expand": (4, "mamba_head_dim"),
    "mamba_n_groups": (4, "mamba_num_groups"), "mamba_d_state": (99, "mamba_state_dim"), "mamba_d_conv": (3, "d_conv"),
    "rope_parameters": ({"rope_theta": 99.0}, "rotary_base"),
}  # fmt: skip
HONOURED = LAYERS_HONOURED | {
    "intermediate_size": (99, "ffn_hidden_size"),
    "num_hidden_layers": (5, "layer_pattern"),
    "attn_layer_indices": ([0], "layer_pattern"),
}
# A value that this package cannot compute with.
LAYERS_REFUSED = {
    "hidden_act": "gelu", "rms_norm_eps": 1e-6, "mamba_d_head": 99, "mamba_conv_bias": False, "mamba_proj_bias": True,
    "time_step_limit": [0.0, 0.1], "attention_bias": True,
}  # fmt: skip
REFUSED = LAYERS_REFUSED | {"mlp_bias": True}
# Old names, or old places: what is changed, a field here, and its value.
OLD = (
    ({"rope_theta": 99.0}, "rotary_base", 99),
    ({"rope_scaling": None}, "rotary_base", 10_000),
    ({"head_dim": 32}, "kv_channels", 32),
    ({"attn_rotary_emb": 8, "partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
    ({"mamba_d_head": 16}, "mamba_head_dim", 16),
)
OLD_REFUSED = (
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has full_attention"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    ({"attn_rotary_emb": 16}, "attn_rotary_emb is 16; transformers turns 0.5 x 16"),
    ({"sliding_window": 9}, "sliding_window"),
    ({"attn_layer_indices": [40]}, r"attn_layer_indices is \[40\], no list of layers from 0 to"),
    ({"attn_layer_indices": None}, "has no attention layer"),
)

FIELDS = [
    Fields(
        model_type="bamba", config_class="BambaConfig", modeling="bamba", given=DIMENSIONS, honoured=HONOURED,
        among_others=frozenset({"attn_layer_indices", "num_hidden_layers", "mamba_expand"}),
        refused=REFUSED,
        absent_with={"mamba_expand": {"mamba_d_head": ...}},
        old=OLD, old_refused=OLD_REFUSED,
    )
]  # fmt: skip
