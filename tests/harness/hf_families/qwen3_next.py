"""Qwen3-Next, as `nemotron_h`."""

from tests.harness.hf_families.entry import Fields, Model

# Three value heads share a key head, two query heads a key and value head. The last layer has an MLP and no experts.
DIMENSIONS = {
    "hidden_size": 64, "vocab_size": 272, "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "mlp_only_layers": [4], "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 20,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "intermediate_size": 112, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48, "rms_norm_eps": 1e-6,
}  # fmt: skip
MODELS = {
    "qwen3_next": Model(
        model_type="qwen3_next", config_class="Qwen3NextConfig", model_class="Qwen3NextForCausalLM",
        dimensions=DIMENSIONS,
        changes=(
            {"rotary_base": 10_000}, {"rotary_fraction": 0.5}, {"moe_router_topk": 2}, {"layernorm_epsilon": 1e-3},
        ),
    )
}  # fmt: skip

# Another value of a field, and the field here that it changes.
HONOURED = {
    "vocab_size": (512, "vocab_size"), "hidden_size": (128, "hidden_size"),
    "intermediate_size": (99, "ffn_hidden_size"), "num_hidden_layers": (4, "layer_pattern"),
    "num_attention_heads": (8, "num_attention_heads"), "num_key_value_heads": (4, "num_query_groups"),
    "max_position_embeddings": (99, "max_sequence_length"),
    "rms_norm_eps": (1e-4, "layernorm_epsilon"), "tie_word_embeddings": (True, "tie_embeddings"),
    "rope_parameters": ({"rope_theta": 99.0}, "rotary_base"),
    "head_dim": (64, "kv_channels"), "linear_conv_kernel_dim": (3, "d_conv"),
    "linear_key_head_dim": (99, "gdn_key_head_dim"),
    "linear_value_head_dim": (99, "gdn_value_head_dim"),
    "linear_num_key_heads": (3, "gdn_num_key_heads"),
    "linear_num_value_heads": (8, "gdn_num_value_heads"),
    "decoder_sparse_step": (2, "layer_pattern"),
    "moe_intermediate_size": (99, "moe_ffn_hidden_size"),
    "shared_expert_intermediate_size": (99, "moe_shared_expert_intermediate_size"),
    "num_experts_per_tok": (4, "moe_router_topk"), "num_experts": (16, "num_moe_experts"),
    "mlp_only_layers": ([0, 4], "layer_pattern"),
    "layer_types": (["full_attention"] + 4 * ["linear_attention"], "layer_pattern"),
}  # fmt: skip
# A value that this package cannot compute with.
REFUSED = {"hidden_act": "gelu", "attention_bias": True, "norm_topk_prob": False}
# Old names, or old places: what is changed, a field here, and its value.
OLD = (
    ({"rope_parameters": ..., "rope_theta": 99}, "rotary_base", 99),
    ({"rope_parameters": ..., "partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
    ({"rope_parameters": {}, "partial_rotary_factor": None}, "rotary_fraction", 1.0),  # its class turns whole heads
    ({"rope_scaling": {"type": "default", "rope_theta": 99}}, "rotary_base", 99),
    ({"layer_types": ..., "full_attention_interval": 2}, "layer_pattern", "GE*EGE*EG-"),
    ({"torch_dtype": None}, "dtype", "bfloat16"),
    ({"torch_dtype": "torch.float32"}, "dtype", "float32"),
    ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype", "float32"),
)
OLD_REFUSED = (({"sliding_window": 9}, "sliding_window"),)

FIELDS = [
    Fields(
        model_type="qwen3_next", config_class="Qwen3NextConfig", modeling="qwen3_next", given=DIMENSIONS,
        honoured=HONOURED,
        among_others=frozenset({"layer_types", "num_hidden_layers", "decoder_sparse_step", "mlp_only_layers"}),
        together={"num_hidden_layers": {"layer_types": ["full_attention"] + 3 * ["linear_attention"]}},
        refused=REFUSED, old=OLD, old_refused=OLD_REFUSED,
    )
]  # fmt: skip
