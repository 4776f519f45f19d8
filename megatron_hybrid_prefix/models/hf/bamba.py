"""Bamba: layers of Mamba2 or attention, each with a gated MLP after it. One layer of Hugging Face is two of megatron's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron_hybrid_prefix.errors import shown
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
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.models.hf.parts import attention_parts, mamba_parts, mlp, rules_of_pairs


class Bamba(Family):
    """``BambaForCausalLM``. As in Nemotron-H, the epsilon of the gated norm in megatron's mixer is 1e-5."""

    model_types = ("bamba",)
    architecture = "BambaForCausalLM"

    def dimensions(self, given: Given) -> HybridModelConfig:
        given.only("mlp_bias", False)
        given.only("partial_rotary_factor", 0.5)  # transformers takes 0.5, and another value from rope_parameters only
        layers, indices = given.layers(), given.get("attn_layer_indices") or []
        if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
            raise given.error(f"attn_layer_indices is {shown(indices)}, no list of layers from 0 to {layers - 1}")
        pattern = "".join("*-" if number in indices else "M-" for number in range(layers))
        fields = attention(given, kv_heads=8) | mamba(given) | rotary(given, default_fraction=0.5)
        fraction, channels = fields["rotary_fraction"], fields["kv_channels"]
        if (turned := given.whole("attn_rotary_emb", default=0)) and turned != fraction * channels:
            raise given.error(f"attn_rotary_emb is {turned}; transformers turns {fraction:g} x {channels}")
        return HybridModelConfig(
            layer_pattern=pattern,
            **fields,
            activation="swiglu",
            layernorm_epsilon=norm_epsilon(given, pattern, "rms_norm_eps", default=1e-5),
        )

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        mixers = config.layers[::2]
        return {
            **attention_json(config),
            **mamba_json(config),
            **rotary_json(config),
            "num_hidden_layers": len(mixers),
            "attn_layer_indices": [number for number, symbol in enumerate(mixers) if symbol == "*"],
            "rms_norm_eps": config.layernorm_epsilon,
        }

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        layers = {
            "M": ("mamba.", mamba_parts(config)),
            "*": ("self_attn.", attention_parts(config)),
            "-": ("feed_forward.", mlp("mlp.", "", config.hidden_size, config.ffn_hidden_size, gated=True)),
        }
        return rules_of_pairs(config, layers, second_norm="pre_ff_layernorm", final_norm="model.final_layernorm")


register_family(Bamba())
