"""Nemotron-H: layers of Mamba2, attention, an MLP or experts, one norm each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Family, Rule, Source, made_of, row_numbers

# Nemotron-H's name of a layer's norm, then megatron's: with local layers, and where Transformer Engine fuses it.
NORMS = {
    "M": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    "*": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "-": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "E": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}


class NemotronH(Family):
    """``NemotronHForCausalLM`` without latent experts.

    Two things are not weights: Hugging Face clamps the step size dt from below at its ``time_step_min``, megatron does not
    clamp it; and the gated norm of megatron's mixer has an epsilon of 1e-5 whatever the config says.
    """

    model_type = "nemotron_h"

    def mismatch(self, config: HybridModelConfig) -> str | None:
        if config.activation != "relu2" or config.rotary_base is not None:
            return (
                f"squared ReLU and no position embedding, not activation={config.activation!r} "
                f"and rotary_base={config.rotary_base}"
            )
        if other := set(config.layer_pattern) - set("M*-E|"):
            return f"layers M, *, - and E, not {min(other)}"
        if config.count("E") and (
            config.moe_router_score != "sigmoid"
            or config.moe_shared_expert_gate
            or not config.moe_shared_expert_intermediate_size
        ):
            return "experts with moe_router_score='sigmoid' and a shared expert without gate"
        if config.attention_output_gate or config.qk_norm:
            return "neither attention_output_gate nor qk_norm"
        return None

    def canonical(self, name: str) -> str | None:
        """On the Hub names begin with ``backbone.``; ``mtp.`` is multi-token prediction."""
        if name.startswith("mtp."):
            return None
        return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        """Experts are matrices each in files, and stacks of matrices in a model in memory."""
        hidden = config.hidden_size
        vocabulary = config.vocab_size, hidden
        yield made_of("embedding.word_embeddings.weight", {"model.embeddings.weight": vocabulary})
        stacked = any(name.endswith(".mixer.experts.down_proj") for name in names)
        parts = {"M": mamba_parts(config), "*": attention_parts(config), "-": _mlp(config), "E": _shared(config)}
        for layer, symbol in enumerate(config.layer_pattern.replace("|", "")):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            for target in NORMS[symbol]:
                yield made_of(ours + target, {f"{theirs}norm.weight": (hidden,)})
            for target, (sources, order) in parts[symbol].items():
                yield made_of(ours + target, {f"{theirs}mixer.{name}": shape for name, shape in sources.items()}, order)
            if symbol == "E":
                yield from _experts(f"{ours}mlp.experts.local_experts.", f"{theirs}mixer.experts.", config, stacked)
        yield made_of("decoder.final_norm.weight", {"model.norm_f.weight": (hidden,)})
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})


# Of a layer: megatron's name to Nemotron-H's names with their shapes, and the order of their rows.
Parts = dict[str, tuple[Mapping[str, tuple[int, ...]], torch.Tensor | None]]


def mamba_parts(config: HybridModelConfig) -> Parts:
    """A Mamba2 mixer: megatron's names, and Hugging Face's below the mixer."""
    heads, inner = config.mamba_num_heads, config.mamba_num_heads * config.mamba_head_dim
    conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return {
        # Both pack z (the gate), x, B, C, dt in this order.
        "mixer.in_proj.weight": ({"in_proj.weight": (inner + conv + heads, config.hidden_size)}, None),
        "mixer.conv1d_weight": ({"conv1d.weight": (conv, 1, config.d_conv)}, None),
        "mixer.conv1d_bias": ({"conv1d.bias": (conv,)}, None),
        "mixer.dt_bias": ({"dt_bias": (heads,)}, None),
        "mixer.A_log": ({"A_log": (heads,)}, None),
        "mixer.D": ({"D": (heads,)}, None),
        "mixer.norm.weight": ({"norm.weight": (inner,)}, None),
        "mixer.out_proj.weight": ({"out_proj.weight": (config.hidden_size, inner)}, None),
    }


def attention_parts(config: HybridModelConfig) -> Parts:
    """An attention layer, likewise."""
    heads, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    # Megatron's linear_qkv: for each query group its query heads, its key head, its value head.
    groups = [rows.view(config.num_query_groups, -1) for rows in row_numbers(heads, kv, kv)]
    sources = {
        f"{part}_proj.weight": (rows, config.hidden_size) for part, rows in zip("qkv", (heads, kv, kv), strict=True)
    }
    return {
        "self_attention.linear_qkv.weight": (sources, torch.cat(groups, dim=1).flatten()),
        "self_attention.linear_proj.weight": ({"o_proj.weight": (config.hidden_size, heads)}, None),
    }


def _mlp(config: HybridModelConfig) -> Parts:
    return {
        "mlp.linear_fc1.weight": ({"up_proj.weight": (config.ffn_hidden_size, config.hidden_size)}, None),
        "mlp.linear_fc2.weight": ({"down_proj.weight": (config.hidden_size, config.ffn_hidden_size)}, None),
    }


def _shared(config: HybridModelConfig) -> Parts:
    """Of a layer of experts: all but the experts that a router chooses."""
    hidden, experts, width = config.hidden_size, config.num_moe_experts, config.moe_shared_expert_intermediate_size
    return {
        "mlp.router.weight": ({"gate.weight": (experts, hidden)}, None),
        "mlp.router.expert_bias": ({"gate.e_score_correction_bias": (experts,)}, None),
        "mlp.shared_experts.linear_fc1.weight": ({"shared_experts.up_proj.weight": (width, hidden)}, None),
        "mlp.shared_experts.linear_fc2.weight": ({"shared_experts.down_proj.weight": (hidden, width)}, None),
    }


def _experts(ours: str, theirs: str, config: HybridModelConfig, stacked: bool) -> Iterator[Rule]:
    width, experts = config.expert_ffn_hidden_size, config.num_moe_experts
    shapes = {"up_proj": (width, config.hidden_size), "down_proj": (config.hidden_size, width)}
    for expert in range(experts):
        for target, (part, shape) in zip(("linear_fc1", "linear_fc2"), shapes.items(), strict=True):
            if stacked:
                source = Source(name=f"{theirs}{part}", shape=(experts, *shape), at=expert)
            else:
                source = Source(name=f"{theirs}{expert}.{part}.weight", shape=shape)
            yield Rule(target=f"{ours}{expert}.{target}.weight", sources=(source,))
