"""Bamba: layers of Mamba2 or attention, each with a gated MLP after it. One layer of Hugging Face is two of megatron's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.given import (
    Given,
    attention,
    attention_json,
    norm_epsilon,
    rotary,
    rotary_json,
)
from megatron_hybrid_prefix.models.hf.mapping import Rule, made_of
from megatron_hybrid_prefix.models.hf.parts import NORMS, attention_parts, gated_mlp, mamba_parts, rules_of


class Bamba(Family):
    """``BambaForCausalLM``. As in Nemotron-H, the epsilon of the gated norm in megatron's mixer is 1e-5."""

    model_types = ("bamba",)
    architecture = "BambaForCausalLM"

    def dimensions(self, given: Given) -> HybridModelConfig:
        for name in ("mlp_bias", "mamba_proj_bias"):
            given.only(name, False)
        given.only("mamba_conv_bias", True)
        given.only("hidden_act", "silu")
        given.check_step_limits()
        given.only("partial_rotary_factor", 0.5)  # transformers takes 0.5, and another value from rope_parameters only
        layers, indices = given.whole("num_hidden_layers"), given.get("attn_layer_indices") or []
        if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
            raise given.error(f"attn_layer_indices is {indices!r}, no list of layers from 0 to {layers - 1}")
        pattern = "".join("*-" if number in indices else "M-" for number in range(layers))
        base, fraction = rotary(given, default_fraction=0.5)
        heads = given.whole("mamba_n_heads")
        inner = given.whole("mamba_expand", default=2) * given.whole("hidden_size")
        head_dim = (
            inner // max(1, heads) if given.get("mamba_d_head") in (None, "auto") else given.whole("mamba_d_head")
        )
        if heads * head_dim != inner:
            raise given.error(
                f"mamba_n_heads x mamba_d_head is {heads * head_dim}, mamba_expand x hidden_size is {inner}"
            )
        fields = attention(given, kv_heads=8)
        if (turned := given.whole("attn_rotary_emb", default=0)) and turned != fraction * fields["kv_channels"]:
            raise given.error(f"attn_rotary_emb is {turned}; transformers turns {fraction:g} x {fields['kv_channels']}")
        return HybridModelConfig(
            layer_pattern=pattern,
            **fields,
            mamba_num_heads=heads,
            mamba_head_dim=head_dim,
            mamba_state_dim=given.whole("mamba_d_state"),
            mamba_num_groups=given.whole("mamba_n_groups"),
            d_conv=given.whole("mamba_d_conv", default=4),
            activation="swiglu",
            rotary_base=base,
            rotary_fraction=fraction,
            layernorm_epsilon=norm_epsilon(given, pattern, "rms_norm_eps", default=1e-5),
        )

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        mixers = config.layer_pattern.replace("|", "")[::2]
        return {
            **attention_json(config),
            **rotary_json(config),
            "num_hidden_layers": len(mixers),
            "attn_layer_indices": [number for number, symbol in enumerate(mixers) if symbol == "*"],
            "mamba_n_heads": config.mamba_num_heads,
            "mamba_d_head": config.mamba_head_dim,
            "mamba_expand": config.mamba_num_heads * config.mamba_head_dim // config.hidden_size,
            "mamba_d_state": config.mamba_state_dim,
            "mamba_n_groups": config.mamba_num_groups,
            "mamba_d_conv": config.d_conv,
            "mamba_chunk_size": config.chunk_size,
            "rms_norm_eps": config.layernorm_epsilon,
        }

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        hidden, vocabulary = (config.hidden_size,), (config.vocab_size, config.hidden_size)
        yield made_of("embedding.word_embeddings.weight", {"model.embed_tokens.weight": vocabulary})
        mixers = {"M": ("mamba.", mamba_parts(config)), "*": ("self_attn.", attention_parts(config))}
        for number, symbol in enumerate(config.layer_pattern.replace("|", "")[::2]):
            theirs = f"model.layers.{number}."
            ours = f"decoder.layers.{2 * number}."
            for target in NORMS[symbol]:
                yield made_of(ours + target, {f"{theirs}input_layernorm.weight": hidden})
            prefix, parts = mixers[symbol]
            yield from rules_of(parts, ours, theirs + prefix)
            ours = f"decoder.layers.{2 * number + 1}."
            for target in NORMS["-"]:
                yield made_of(ours + target, {f"{theirs}pre_ff_layernorm.weight": hidden})
            yield from gated_mlp(f"{ours}mlp.", f"{theirs}feed_forward.", config.hidden_size, config.ffn_hidden_size)
        yield made_of("decoder.final_norm.weight", {"model.final_layernorm.weight": hidden})
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})


register_family(Bamba())
