"""Granite 4, as `nemotron_h`."""

from tests.harness.hf_families.bamba import LAYERS, LAYERS_HONOURED, LAYERS_REFUSED
from tests.harness.hf_families.entry import Fields, Model

# No two dimensions agree by chance, and every multiplier is far from 1 and from attention's own, 1 / 4.
EXPERTS = LAYERS | {
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 48,
    "attention_multiplier": 0.6, "embedding_multiplier": 0.3, "residual_multiplier": 1.7, "logits_scaling": 2.7,
}  # fmt: skip
# One group of Mamba heads, as the published models have: not with tensor parallelism.
DENSE = EXPERTS | {
    "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1, "position_embedding_type": "rope",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attention_multiplier": 0.07, "residual_multiplier": 0.4, "logits_scaling": 0.6,
}  # fmt: skip
_CLASSES = {
    "config_class": "GraniteMoeHybridConfig",
    "model_class": "GraniteMoeHybridForCausalLM",
    "model_type": "granitemoehybrid",
}
MODELS = {
    "granite": Model(
        **_CLASSES,
        dimensions=EXPERTS,
        changes=(
            {"attention_multiplier": 0.25},
            {"embedding_multiplier": 1.0},
            {"residual_multiplier": 1.0},
            {"logits_scaling": 1.0},
            {"moe_router_topk": 2},
        ),
    ),
    "granite_dense": Model(**_CLASSES, dimensions=DENSE, changes=({"rotary_base": 10_000}, {"rotary_base": None})),
}

# Another value of a field, and the field here that it changes.
HONOURED = LAYERS_HONOURED | {
    "intermediate_size": (99, "moe_ffn_hidden_size"),
    "num_hidden_layers": (2, "layer_pattern"),
    "embedding_multiplier": (12, "embedding_multiplier"),
    "logits_scaling": (16, "logits_scaling"),
    "residual_multiplier": (0.22, "residual_multiplier"),
    "attention_multiplier": (0.0078125, "attention_multiplier"),
    "num_local_experts": (16, "num_moe_experts"),
    "num_experts_per_tok": (4, "moe_router_topk"),
    "shared_intermediate_size": (99, "moe_shared_expert_intermediate_size"),
    "position_embedding_type": ("nope", "rotary_base"),
    "layer_types": (["full_attention", "linear_attention", "mamba", "attention"], "layer_pattern"),
}
# Old names, or old places: what is changed, a field here, and its value.
OLD = (
    ({"rope_parameters": ..., "rope_theta": 99.0}, "rotary_base", 99),
    ({"layer_types": ..., "layers_block_type": ["attention", "mamba", "mamba", "mamba"]}, "layer_pattern", "*EMEMEME"),
    ({"head_dim": 32}, "kv_channels", 32),
    ({"num_local_experts": 0}, "layer_pattern", "M-*-M-*-"),
    ({"num_local_experts": 0}, "ffn_hidden_size", 48),
    ({"num_local_experts": 0, "num_experts_per_tok": 0}, "num_moe_experts", 0),
)
OLD_REFUSED = (
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    ({"layer_types": ["mamba"] * 4}, "has no attention layer"),
    ({"layer_types": ["mamba", "attention"]}, "layer_types must be 4 times mamba or attention"),
    ({"shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
    ({"num_local_experts": 0, "shared_intermediate_size": 0}, "ffn_hidden_size=0"),
    ({"num_experts_per_tok": 1}, "moe_router_topk=1"),
    ({"residual_multiplier": 0}, "residual_multiplier=0.0: must be above 0"),
    ({"logits_scaling": "big"}, "logits_scaling is 'big', not a number"),
    ({"sliding_window": 9}, "sliding_window"),
)

FIELDS = [
    Fields(
        model_type="granitemoehybrid",
        config_class="GraniteMoeHybridConfig",
        modeling="granitemoehybrid",
        given=EXPERTS | {"position_embedding_type": "rope"},
        honoured=HONOURED,
        among_others=frozenset({"layer_types", "num_hidden_layers", "mamba_expand", "position_embedding_type"}),
        together={"num_hidden_layers": {"layer_types": ["attention", "mamba"]}},
        refused=LAYERS_REFUSED,
        absent_with={"mamba_expand": {"mamba_d_head": ...}},
        old=OLD,
        old_refused=OLD_REFUSED,
    )
]
