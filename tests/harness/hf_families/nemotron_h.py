"""Nemotron-H: its tiny models, and the fields of its config class."""

from tests.harness.hf_families.entry import Fields, Model

# No two dimensions agree by chance: inner 96, conv 160, query heads 80, key and value heads 40.
DIMENSIONS = {
    "hybrid_override_pattern": "M*-M-*M", "hidden_size": 64, "vocab_size": 272, "mamba_num_heads": 8,
    "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    "chunk_size": 32,  # another grid than megatron's: the result may not depend on it
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 112,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "use_conv_bias": True, "use_bias": False,
}  # fmt: skip
# The bias changes which experts are chosen; 2 of 4 groups; weights are scaled.
EXPERTS = DIMENSIONS | {
    "hybrid_override_pattern": "M*E-ME*M", "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
# Nemotron 3: experts see fewer channels than the residual stream has.
LATENT = DIMENSIONS | {
    "hybrid_override_pattern": "MEM*EM*E",
    "n_routed_experts": 16,
    "num_experts_per_tok": 5,
    "routed_scaling_factor": 5.0,
    "moe_intermediate_size": 40,
    "moe_latent_size": 24,
    "moe_shared_expert_intermediate_size": 48,
}
_CLASSES = {"config_class": "NemotronHConfig", "model_class": "NemotronHForCausalLM", "model_type": "nemotron_h"}
MODELS = {
    "nemotron_h": Model(**_CLASSES, dimensions=DIMENSIONS),
    "nemotron_h_experts": Model(
        **_CLASSES,
        dimensions=EXPERTS,
        changes=(
            {"moe_router_scaling": 1.0},
            {"moe_router_groups": 0, "moe_router_topk_groups": 0},
            {"moe_router_topk": 2},
        ),
    ),
    "nemotron_3": Model(
        **_CLASSES, dimensions=LATENT, changes=({"moe_router_scaling": 2.5}, {"moe_router_topk": 4}), seed=2
    ),
}

# Another value of a field, and the field here that it changes.
HONOURED = {
    "vocab_size": (512, "vocab_size"), "hidden_size": (128, "hidden_size"),
    "layers_block_type": (["full_attention", "linear_attention"], "layer_pattern"),
    "tie_word_embeddings": (True, "tie_embeddings"), "num_attention_heads": (2, "num_attention_heads"),
    "num_key_value_heads": (4, "num_query_groups"), "head_dim": (64, "kv_channels"),
    "max_position_embeddings": (99, "max_sequence_length"),
    "intermediate_size": (99, "ffn_hidden_size"), "ssm_state_size": (99, "mamba_state_dim"),
    "mamba_num_heads": (4, "mamba_num_heads"), "mamba_head_dim": (99, "mamba_head_dim"),
    "n_groups": (4, "mamba_num_groups"), "conv_kernel": (3, "d_conv"),
    "mamba_ssm_cache_dtype": ("bfloat16", "state_dtype"),
    "n_routed_experts": (32, "num_moe_experts"), "num_experts_per_tok": (2, "moe_router_topk"),
    "routed_scaling_factor": (1.5, "moe_router_scaling"),
    "n_group": (8, "moe_router_groups"), "topk_group": (1, "moe_router_topk_groups"),
    "moe_intermediate_size": (99, "moe_ffn_hidden_size"),
    "moe_shared_expert_intermediate_size": (99, "moe_shared_expert_intermediate_size"),
    "moe_latent_size": (16, "moe_latent_size"), "num_nextn_predict_layers": (2, "mtp_num_layers"),
    "mtp_layers_block_type": (["full_attention", "mlp"], "mtp_layer_pattern"),
}  # fmt: skip
# A value that this package cannot compute with.
REFUSED = {
    "attention_bias": True, "sliding_window": 4096, "mlp_hidden_act": "gelu", "mlp_bias": True,
    "mamba_hidden_act": "gelu", "time_step_limit": [0.0, 0.1], "use_conv_bias": False, "mamba_proj_bias": True,
    "norm_topk_prob": False, "use_bias": True, "layer_norm_epsilon": 1e-6, "residual_in_fp32": True,
}  # fmt: skip
NO_EFFECT = {
    "moe_shared_expert_overlap": "how it is computed, not what",
    "expand": "the width is mamba_num_heads x mamba_head_dim",
    "time_step_min": "initial values; transformers also clamps the step size at it, NVIDIA's code and megatron do not",
    "time_step_max": "initial values",
    "time_step_floor": "initial values",
    "rescale_prenorm_residual": "initial values",
    "n_shared_experts": "the width of all of them is moe_shared_expert_intermediate_size",
}
_MTP = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "M-"}
# Names of transformers 4, and of NVIDIA's own files: what is changed, a field here, and its value.
OLD = (
    ({"layers_block_type": ..., "hybrid_override_pattern": "M*M"}, "layer_pattern", "M*M"),
    ({"layers_block_type": ..., "layer_types": ["mamba", "attention"]}, "layer_pattern", "M*"),
    ({"hybrid_override_pattern": "M*M"}, "layer_pattern", "M*-E"),  # as in transformers
    ({"head_dim": ..., "attention_head_dim": 40}, "kv_channels", 40),
    ({"mamba_n_groups": 4}, "mamba_num_groups", 4),
    ({"mamba_d_conv": 3}, "d_conv", 3),
    ({"n_routed_experts": ..., "num_local_experts": 8}, "num_moe_experts", 8),
    ({"num_nextn_predict_layers": 1}, "mtp_layer_pattern", "*E"),
    ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}, "mtp_layer_pattern", "*-"),
    ({"mtp_layers_block_type": ["attention", "moe"], **_MTP}, "mtp_layer_pattern", "M-"),  # as in transformers
    ({"mtp_layers_block_type": ["attention", "mlp"], **_MTP}, "mtp_layer_pattern", "*-"),
    ({"mtp_hybrid_override_pattern": "*-"}, "mtp_layer_pattern", ""),
    (_MTP, "mtp_use_repeated_layer", True),
    (_MTP | {"mtp_use_repeated_layer": False}, "mtp_use_repeated_layer", False),  # Megatron-Bridge's name
    ({"rope_theta": 99}, "rotary_base", None),
    ({"use_sliding_window": False, "sliding_window": 9}, "hidden_size", 64),
)
OLD_REFUSED = (
    (_MTP | {"mtp_hybrid_override_pattern": "*X"}, "mtp_hybrid_override_pattern has 'X', none of M"),
    (_MTP | {"mtp_layers_block_type": ["conv"]}, "mtp_layers_block_type has 'conv', none of mamba"),
    (_MTP | {"mtp_use_repeated_layer": 1}, "mtp_use_repeated_layer is 1, neither true nor false"),
    ({"mamba_conv_bias": False}, "use_conv_bias is False"),
    ({"mamba_dt_limit": [0.0, 0.1]}, "time_step_limit is"),
    ({"layer_norm_epsilon": ..., "norm_eps": 1e-6}, "layer_norm_epsilon is 1e-06"),
)

FIELDS = [
    Fields(
        model_type="nemotron_h", config_class="NemotronHConfig", modeling="nemotron_h",
        given={name: value for name, value in EXPERTS.items() if name != "hybrid_override_pattern"}
        | {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
        honoured=HONOURED,
        among_others=frozenset({"layers_block_type", "mtp_layers_block_type"}),
        together={
            "mtp_layers_block_type": {"num_nextn_predict_layers": 1},
            "num_experts_per_tok": {"topk_group": 1}, "topk_group": {"num_experts_per_tok": 2},
        },
        refused=REFUSED, no_effect=NO_EFFECT,
        read=frozenset({"time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"}),
        absent_with={"n_group": {"topk_group": ...}, "topk_group": {"n_group": ...}},
        old=OLD, old_refused=OLD_REFUSED,
    )
]  # fmt: skip
