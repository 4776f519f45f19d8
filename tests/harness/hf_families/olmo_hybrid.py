"""OLMo Hybrid, as `nemotron_h`."""

from tests.harness.hf_families.bamba import YARN
from tests.harness.hf_families.entry import Fields, Model

# Three value heads share a key head, two query heads a key and value head. No head of Gated DeltaNet has a power of two.
DIMENSIONS = {
    "hidden_size": 64, "vocab_size": 272, "num_hidden_layers": 5, "pad_token_id": None, "eos_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 20, "linear_value_head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}  # fmt: skip
# Two heads of each kind alike, as in the published model; YaRN; beta below 1.
ROTARY = DIMENSIONS | {
    "linear_num_value_heads": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-4, "linear_allow_neg_eigval": False,
    "rope_parameters": YARN | {"rope_theta": 500.0},
}  # fmt: skip
_CLASSES = {"config_class": "OlmoHybridConfig", "model_class": "OlmoHybridForCausalLM", "model_type": "olmo_hybrid"}
MODELS = {
    "olmo_hybrid": Model(
        **_CLASSES,
        dimensions=DIMENSIONS,
        changes=({"gdn_beta_scale": 1.0}, {"rotary_base": 10_000}, {"gated_norm_epsilon": 1e-2}),
    ),
    "olmo_hybrid_rotary": Model(**_CLASSES, dimensions=ROTARY, changes=({"gdn_beta_scale": 2.0}, {"yarn_factor": 2.0})),
}

# Another value of a field, and the field here that it changes.
HONOURED = {
    "vocab_size": (512, "vocab_size"), "hidden_size": (128, "hidden_size"),
    "intermediate_size": (99, "ffn_hidden_size"), "num_hidden_layers": (4, "layer_pattern"),
    "num_attention_heads": (8, "num_attention_heads"), "num_key_value_heads": (4, "num_query_groups"),
    "max_position_embeddings": (99, "max_sequence_length"),
    "rms_norm_eps": (1e-5, "layernorm_epsilon"), "tie_word_embeddings": (True, "tie_embeddings"),
    "rope_parameters": ({"rope_theta": 99.0}, "rotary_base"), "linear_conv_kernel_dim": (3, "d_conv"),
    "linear_key_head_dim": (99, "gdn_key_head_dim"), "linear_value_head_dim": (99, "gdn_value_head_dim"),
    "linear_num_key_heads": (1, "gdn_num_key_heads"), "linear_num_value_heads": (8, "gdn_num_value_heads"),
    "linear_allow_neg_eigval": (False, "gdn_beta_scale"),
    "layer_types": (["full_attention"] + 4 * ["linear_attention"], "layer_pattern"),
}  # fmt: skip
# Old names, or old places: what is changed, a field here, and its value.
OLD = (
    ({"rope_parameters": ..., "rope_theta": 99}, "rotary_base", 99),
    ({"rope_parameters": ..., "rope_theta": None}, "rotary_base", None),
    ({"rope_parameters": {"rope_theta": None}, "rope_theta": 99}, "rotary_base", None),
    ({"rope_parameters": None}, "rotary_base", 10_000),
    ({"layer_types": ..., "full_attention_interval": 2}, "layer_pattern", "G-G-G-*-G-"),
    ({"layer_types": ..., "num_hidden_layers": 2}, "layer_pattern", "G-*-"),
    ({"head_dim": 32}, "kv_channels", 32),
)
OLD_REFUSED = (
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"layer_types": ["full_attention"]}, "layer_types must be 5 times"),
    ({"layer_types": 5 * ["linear_attention"]}, "has no attention layer"),
    ({"linear_allow_neg_eigval": "yes"}, "linear_allow_neg_eigval is 'yes', neither true nor false"),
    ({"sliding_window": 9}, "sliding_window"),
)
_INITIAL = dict.fromkeys(
    ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"), "initial values"
)

FIELDS = [
    Fields(
        model_type="olmo_hybrid", config_class="OlmoHybridConfig", modeling="olmo_hybrid", given=DIMENSIONS,
        honoured=HONOURED,
        among_others=frozenset({"layer_types", "num_hidden_layers", "linear_allow_neg_eigval"}),
        together={"num_hidden_layers": {"layer_types": ["full_attention"] + 3 * ["linear_attention"]}},
        refused={"hidden_act": "gelu", "attention_bias": True},
        no_effect=_INITIAL, read=frozenset(_INITIAL), old=OLD, old_refused=OLD_REFUSED,
    )
]  # fmt: skip
