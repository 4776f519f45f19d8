"""OLMo Hybrid: layers as those of Qwen3-Next, each with an MLP. Attention is that of OLMo 2: norms behind it, and of all heads together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import register_family
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.mapping import Rule, made_of
from megatron_hybrid_prefix.models.hf.parts import attention_parts
from megatron_hybrid_prefix.models.hf.qwen3_5 import Qwen35


class OlmoHybrid(Qwen35):
    """``OlmoHybridForCausalLM``. The epsilon of the norm inside Gated DeltaNet is 1e-5 there."""

    model_types = ("olmo_hybrid",)
    architecture = "OlmoHybridForCausalLM"
    kv_heads = channels = finish = None
    rotary_fraction = 1.0
    fixed: ClassVar[dict[str, Any]] = {"qk_norm": True, "attention_post_norm": True, "gated_norm_epsilon": 1e-5}
    of_output = "o_norm", "o_proj"

    def dimensions(self, given: Given) -> HybridModelConfig:
        if given.get("layer_types") is None:  # each fourth, or the last one; `full_attention_interval` is not read
            layers = given.layers()
            full = range(3, layers, 4) or (layers - 1,)
            kinds = ["full_attention" if number in full else "linear_attention" for number in range(layers)]
            given = Given({**given.data, "layer_types": kinds}, given.name)
        config = super().dimensions(given)
        if config.rotary_fraction != 1.0:
            raise given.error(f"partial_rotary_factor is {config.rotary_fraction:g}; transformers turns whole heads")
        rope = given.get("rope_scaling", "rope_parameters") or {}
        has_rotary = {**given.data, **rope}.get("rope_theta", ...) is not None  # a null says that there is none
        scale = 2.0 if given.flag("linear_allow_neg_eigval", True) else 1.0
        return replace(config, gdn_beta_scale=scale, rotary_base=config.rotary_base if has_rotary else None)

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        rotary = {} if config.rotary_base else {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        own = {
            "linear_allow_neg_eigval": config.gdn_beta_scale == 2.0,
            "pad_token_id": None,
        }  # no id of OLMo's tokenizer
        return super().config_json(config) | rotary | own

    def canonical(self, name: str) -> str | None:
        """Files have other names of some norms than a model in memory."""
        name = name.replace("attention_layer_norm", "input_layernorm")
        return name.replace("feedforward_layer_norm", "post_attention_layernorm")

    def in_proj(self, config: HybridModelConfig, keys: int, values: int) -> Rule:
        heads = config.gdn_num_value_heads
        rows = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
        sources = {f"{name}_proj.weight": (count, config.hidden_size) for name, count in rows.items()}
        return made_of("self_attention.in_proj.weight", sources)

    def convolution(self, keys: int, values: int, names: Collection[str]) -> dict[str, int]:
        """In files queries, keys and values, or three tensors alike as transformers saves them; one in a model in memory."""
        channels, weights = 2 * keys + values, names if isinstance(names, Mapping) else {}
        if any(name.endswith(".linear_attn.conv1d.weight") for name in names):
            return {"conv1d": channels}
        third = -(-channels // 3)
        alike = any(name.endswith(".q_conv1d.weight") and weights[name].shape[0] == third for name in weights)
        keys, values = (third, channels - 2 * third) if alike else (keys, values)
        return {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}

    def attention_parts(self, config: HybridModelConfig) -> Iterator[Rule]:
        """Without a gate."""
        yield from attention_parts(config)
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
            norm = {f"{part}_norm.weight": (heads * config.kv_channels,)}
            yield made_of(f"self_attention.{part}_layernorm.norm.weight", norm)


register_family(OlmoHybrid())
