"""Granite 4: layers of Mamba2 or attention, each with experts or a gated MLP after it. One layer of Hugging Face is two of megatron's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.given import (
    Given,
    attention,
    attention_json,
    mamba,
    mamba_json,
    norm_epsilon,
    rotary,
    rotary_json,
)
from megatron_hybrid_prefix.models.hf.mapping import Rule, made_of
from megatron_hybrid_prefix.models.hf.parts import attention_parts, mamba_parts, rules_of_pairs, stacked_experts

_MIXERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
# What names end with in a model in memory, and in files.
_IN_FILES = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}


class Granite(Family):
    """``GraniteMoeHybridForCausalLM``. As in Nemotron-H, the epsilon of the gated norm in megatron's mixer is 1e-5."""

    model_types = ("granitemoehybrid",)
    architecture = "GraniteMoeHybridForCausalLM"

    def dimensions(self, given: Given) -> HybridModelConfig:
        given.only("position_embedding_type", "nope", "rope")
        fields = attention(given, kv_heads=None) | mamba(given)
        fields |= {name: given.real(name, default=1.0) for name in _MULTIPLIERS}
        experts, shared = given.whole("num_local_experts"), given.whole("shared_intermediate_size")
        if experts:
            fields |= {
                "num_moe_experts": experts,
                "moe_router_topk": given.whole("num_experts_per_tok", default=2),
                "moe_ffn_hidden_size": fields["ffn_hidden_size"],
                "moe_shared_expert_intermediate_size": shared,
            }
            if not shared:
                raise given.error("shared_intermediate_size is 0: layers without a shared expert are not supported")
        else:
            fields["ffn_hidden_size"] = shared
        if given.get("position_embedding_type") == "rope":
            fields |= rotary(given, default_fraction=1.0)
            if (fraction := fields["rotary_fraction"]) != 1.0:
                raise given.error(f"partial_rotary_factor is {fraction:g}; transformers turns whole heads")
        kinds, layers = given.texts("layer_types", "layers_block_type"), given.layers()
        if kinds is None or len(kinds) != layers or set(kinds) - set(_MIXERS):
            raise given.error(f"layer_types must be {layers} times mamba or attention")
        pattern = "".join(_MIXERS[kind] + ("E" if experts else "-") for kind in kinds)
        return HybridModelConfig(
            layer_pattern=pattern,
            **fields,
            activation="swiglu",
            layernorm_epsilon=norm_epsilon(given, pattern, "rms_norm_eps"),
        )

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        mixers = config.layers[::2]
        data = {
            **attention_json(config),
            **mamba_json(config),
            **rotary_json(config),
            **{name: getattr(config, name) for name in _MULTIPLIERS},
            "position_embedding_type": "nope" if config.rotary_base is None else "rope",
            "num_hidden_layers": len(mixers),
            "layer_types": ["attention" if symbol == "*" else "mamba" for symbol in mixers],
            "num_local_experts": config.num_moe_experts if config.has_experts else 0,
            "shared_intermediate_size": config.ffn_hidden_size,
            "rms_norm_eps": config.layernorm_epsilon,
        }
        if config.has_experts:
            data |= {
                "num_experts_per_tok": config.moe_router_topk,
                "intermediate_size": config.moe_ffn_hidden_size,
                "shared_intermediate_size": config.moe_shared_expert_intermediate_size,
            }
        return data

    def canonical(self, name: str) -> str | None:
        """The names of files."""
        layer, moe, last = name.partition(".block_sparse_moe.")
        return layer + moe + _IN_FILES.get(last, last)

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        layers = {
            "M": ("mamba.", mamba_parts(config)),
            "*": ("self_attn.", attention_parts(config)),
            "-": ("shared_mlp.", _mlp("mlp.", "", config.hidden_size, config.ffn_hidden_size)),
            "E": ("", _experts(config)),
        }
        return rules_of_pairs(config, layers, second_norm="post_attention_layernorm", final_norm="model.norm")


def _mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Rule]:
    """A gated MLP: gate and up projection are one matrix there, too."""
    yield made_of(f"{ours}linear_fc1.weight", {f"{theirs}input_linear.weight": (2 * width, hidden)})
    yield made_of(f"{ours}linear_fc2.weight", {f"{theirs}output_linear.weight": (hidden, width)})


def _experts(config: HybridModelConfig) -> Iterator[Rule]:
    hidden, width, count = config.hidden_size, config.expert_ffn_hidden_size, config.num_moe_experts
    moe = "block_sparse_moe."
    yield made_of("mlp.router.weight", {f"{moe}router.layer.weight": (count, hidden)})
    matrices = {f"{moe}input_linear.weight": (2 * width, hidden), f"{moe}output_linear.weight": (hidden, width)}
    yield from stacked_experts(count, matrices)
    yield from _mlp("mlp.shared_experts.", "shared_mlp.", hidden, config.moe_shared_expert_intermediate_size)


register_family(Granite())
