"""Qwen3.5, dense and with experts, and the language models of those with images; as `nemotron_h`."""

from tests.harness.hf_families import qwen3_next
from tests.harness.hf_families.bamba import YARN
from tests.harness.hf_families.entry import Fields, Model

_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
_ELSEWHERE = {"mlp_only_layers", "decoder_sparse_step"}
_ROPE = {**qwen3_next.DIMENSIONS["rope_parameters"], "mrope_section": [1, 1, 1], "mrope_interleaved": True}


def _without(fields, names):
    return {name: value for name, value in fields.items() if name not in names}


# Three value heads share a key head as in the 27B; with experts each has its own.
DENSE = _without(qwen3_next.DIMENSIONS, _EXPERTS | _ELSEWHERE) | {"rope_parameters": _ROPE}
EXPERTS = _without(qwen3_next.DIMENSIONS, {"intermediate_size"} | _ELSEWHERE) | {
    "rope_parameters": _ROPE,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "num_experts": 6,
}
WITH_YARN = EXPERTS | {"rope_parameters": _ROPE | YARN | {"attention_factor": 1.5}}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _with_images(text):
    """Fewer layers: what is new are the names."""
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return {"text_config": text | {"num_hidden_layers": 3, "layer_types": layers}, "vision_config": VISION}


MODELS = {
    "qwen3_5": Model(
        model_type="qwen3_5_text", config_class="Qwen3_5TextConfig", model_class="Qwen3_5ForCausalLM", dimensions=DENSE,
        changes=({"rotary_base": 10_000}, {"rotary_fraction": 0.5}, {"layernorm_epsilon": 1e-3}),
    ),
    "qwen3_5_moe": Model(
        model_type="qwen3_5_moe_text", config_class="Qwen3_5MoeTextConfig", model_class="Qwen3_5MoeForCausalLM",
        dimensions=WITH_YARN,
        changes=({"moe_router_topk": 2}, {"yarn_factor": 2.0}, {"yarn_attention_factor": 1.0}),
    ),
    "qwen3_5_images": Model(
        model_type="qwen3_5", config_class="Qwen3_5Config", model_class="Qwen3_5ForConditionalGeneration",
        dimensions=_with_images(DENSE), prompt_lengths=(1, 64, 129),
    ),
    "qwen3_5_moe_images": Model(
        model_type="qwen3_5_moe", config_class="Qwen3_5MoeConfig", model_class="Qwen3_5MoeForConditionalGeneration",
        dimensions=_with_images(WITH_YARN | {"num_experts": 4}),
        prompt_lengths=(1, 64, 129),
    ),
}  # fmt: skip

HONOURED = _without(qwen3_next.HONOURED, _EXPERTS | _ELSEWHERE)
HONOURED_EXPERTS = _without(qwen3_next.HONOURED, {"intermediate_size"} | _ELSEWHERE) | {
    "linear_num_key_heads": (2, "gdn_num_key_heads")
}
_COMMON = {
    "among_others": frozenset({"layer_types", "num_hidden_layers"}),
    "together": {"num_hidden_layers": {"layer_types": ["full_attention"] + 3 * ["linear_attention"]}},
    "refused": {"hidden_act": "gelu", "attention_bias": True},
}
# Old names, or old places: what is changed, a field here, and its value.
OLD = (
    ({"rope_parameters": ..., "rope_theta": 99, "mrope_section": [11, 11, 10]}, "rotary_base", 99),
    ({"rope_parameters": ..., "partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
    ({"mamba_ssm_dtype": "bfloat16"}, "state_dtype", "bfloat16"),
    ({"attn_output_gate": True, "output_gate_type": "swish"}, "hidden_size", 64),
)
OLD_REFUSED = (
    ({"attn_output_gate": False}, "attn_output_gate is False"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
)

FIELDS = [
    Fields(
        model_type="qwen3_5_text", config_class="Qwen3_5TextConfig", modeling="qwen3_5", given=DENSE, honoured=HONOURED,
        old=(*OLD, ({"layer_types": ..., "full_attention_interval": 2}, "layer_pattern", "G-*-G-*-G-")),
        old_refused=OLD_REFUSED, **_COMMON,
    ),
    Fields(
        model_type="qwen3_5_moe_text", config_class="Qwen3_5MoeTextConfig", modeling="qwen3_5_moe", given=EXPERTS,
        honoured=HONOURED_EXPERTS,
        old=(*OLD, ({"mlp_only_layers": [1]}, "layer_pattern", "GE*EGEGE*E")),  # its class has no such field
        old_refused=(*OLD_REFUSED, ({"num_experts": 0}, "num_experts is 0: every layer has experts")),
        **_COMMON,
    ),
]  # fmt: skip
