"""Layers whose parameters several families make in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Finish, RowNumbers, Rule, made_of, row_numbers

# megatron's names of a layer's norm: with local layers, and where Transformer Engine fuses it.
NORMS = {
    "M": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    "G": ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    "*": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "-": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "E": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}

# Of a layer: megatron's name to Hugging Face's names with their shapes, and the order of their rows.
Parts = dict[str, tuple[Mapping[str, tuple[int, ...]], RowNumbers | None]]


def rules_of(parts: Parts, ours: str, theirs: str) -> Iterator[Rule]:
    """The rules of a layer, by what its names begin with here and there."""
    for target, (sources, order) in parts.items():
        yield made_of(ours + target, {theirs + name: shape for name, shape in sources.items()}, order)


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
    import numpy as np

    heads, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    # Megatron's linear_qkv: for each query group its query heads, its key head, its value head.
    groups = [rows.reshape(config.num_query_groups, -1) for rows in row_numbers(heads, kv, kv)]
    sources = {
        f"{part}_proj.weight": (rows, config.hidden_size) for part, rows in zip("qkv", (heads, kv, kv), strict=True)
    }
    return {
        "self_attention.linear_qkv.weight": (sources, np.concatenate(groups, axis=1).flatten()),
        "self_attention.linear_proj.weight": ({"o_proj.weight": (config.hidden_size, heads)}, None),
    }


def gated_mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Rule]:
    """A gated MLP, or an expert: gate and up projection are one matrix."""
    gate_and_up = {f"{theirs}{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    yield made_of(f"{ours}linear_fc1.weight", gate_and_up)
    yield made_of(f"{ours}linear_fc2.weight", {f"{theirs}down_proj.weight": (hidden, width)})


def rules_of_pairs(
    config: HybridModelConfig,
    mixers: Mapping[str, tuple[str, Parts]],
    feed_forward: Callable[[str, str, str], Iterator[Rule]],
    *,
    second_norm: str,
    final_norm: str,
    finish: Finish | None = None,
) -> Iterator[Rule]:
    """A model with one layer for two of megatron's: a mixer, then experts or a gated MLP, each after a norm.

    Args:
        config: Its dimensions.
        mixers: By symbol of a mixer, the prefix of its tensors, and its parts.
        feed_forward: Gets the second layer's symbol, and the prefixes of megatron's MLP and of the whole layer.
        second_norm: The name of the norm before experts or MLP.
        final_norm: Likewise, after all layers.
        finish: What is done to the weights of these norms.
    """
    vocabulary, pattern = (config.vocab_size, config.hidden_size), config.layer_pattern.replace("|", "")

    def norm(target: str, source: str) -> Rule:
        return made_of(target, {f"{source}.weight": (config.hidden_size,)}, finish=finish)

    yield made_of("embedding.word_embeddings.weight", {"model.embed_tokens.weight": vocabulary})
    for number, (mixer, second) in enumerate(zip(pattern[::2], pattern[1::2], strict=True)):
        first, next_, theirs = (
            f"decoder.layers.{2 * number}.",
            f"decoder.layers.{2 * number + 1}.",
            f"model.layers.{number}.",
        )
        yield from (norm(first + target, f"{theirs}input_layernorm") for target in NORMS[mixer])
        prefix, parts = mixers[mixer]
        yield from rules_of(parts, first, theirs + prefix)
        yield from (norm(next_ + target, theirs + second_norm) for target in NORMS[second])
        yield from feed_forward(second, f"{next_}mlp.", theirs)
    yield norm("decoder.final_norm.weight", final_norm)
    yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})
