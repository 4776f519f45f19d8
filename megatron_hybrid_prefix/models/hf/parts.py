"""Layers whose parameters several families make in the same way.

Of a layer, rules have the names that parameters and tensors have in it; `rules_of` puts the layer's own names before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Finish, Rule, Source, made_of, row_numbers

# megatron's names of a layer's norm: with local layers, and where Transformer Engine fuses it; and of a norm of its output.
NORMS = {
    "M": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    "G": ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    "*": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "output_norm.weight"),
    "-": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "output_norm.weight"),
    "E": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}


def rules_of(layer: Iterable[Rule], ours: str, theirs: str) -> Iterator[Rule]:
    """The rules of a layer, by what its names begin with here and there."""
    for rule in layer:
        sources = tuple(replace(source, name=theirs + source.name) for source in rule.sources)
        yield replace(rule, target=ours + rule.target, sources=sources)


def mamba_parts(config: HybridModelConfig) -> Iterator[Rule]:
    """A Mamba2 mixer."""
    heads, inner = config.mamba_num_heads, config.mamba_num_heads * config.mamba_head_dim
    conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    # Both pack z (the gate), x, B, C, dt in this order.
    yield made_of("mixer.in_proj.weight", {"in_proj.weight": (inner + conv + heads, config.hidden_size)})
    yield made_of("mixer.conv1d_weight", {"conv1d.weight": (conv, 1, config.d_conv)})
    yield made_of("mixer.conv1d_bias", {"conv1d.bias": (conv,)})
    for name in ("dt_bias", "A_log", "D"):
        yield made_of(f"mixer.{name}", {name: (heads,)})
    yield made_of("mixer.norm.weight", {"norm.weight": (inner,)})
    yield made_of("mixer.out_proj.weight", {"out_proj.weight": (config.hidden_size, inner)})


def attention_parts(config: HybridModelConfig) -> Iterator[Rule]:
    """An attention layer."""
    import numpy as np

    hidden, heads = config.hidden_size, config.num_attention_heads * config.kv_channels
    kv = config.num_query_groups * config.kv_channels
    # Megatron's linear_qkv: for each query group its query heads, its key head, its value head.
    groups = [rows.reshape(config.num_query_groups, -1) for rows in row_numbers(heads, kv, kv)]
    sources = {"q_proj.weight": (heads, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden)}
    yield made_of("self_attention.linear_qkv.weight", sources, np.concatenate(groups, axis=1).flatten())
    yield made_of("self_attention.linear_proj.weight", {"o_proj.weight": (hidden, heads)})


def mlp(ours: str, theirs: str, hidden: int, width: int, *, gated: bool) -> Iterator[Rule]:
    """An MLP, or an expert; gate and up projection are one matrix."""
    first = ("gate", "up") if gated else ("up",)
    yield made_of(f"{ours}linear_fc1.weight", {f"{theirs}{part}_proj.weight": (width, hidden) for part in first})
    yield made_of(f"{ours}linear_fc2.weight", {f"{theirs}down_proj.weight": (hidden, width)})


def experts(config: HybridModelConfig, *, gated: bool, stacked: bool) -> Iterator[Rule]:
    """The experts that a router chooses: matrices each in files, and stacks of matrices in a model in memory."""
    count, width = config.num_moe_experts, config.expert_ffn_hidden_size
    hidden = config.moe_latent_size or config.hidden_size
    if stacked:
        up = {"experts.gate_up_proj": (2 * width, hidden)} if gated else {"experts.up_proj": (width, hidden)}
        yield from stacked_experts(count, up | {"experts.down_proj": (hidden, width)})
        return
    for expert in range(count):
        yield from mlp(f"mlp.experts.local_experts.{expert}.", f"experts.{expert}.", hidden, width, gated=gated)


def stacked_experts(count: int, matrices: Mapping[str, tuple[int, int]]) -> Iterator[Rule]:
    """Experts in two stacks: their names, and the shape of a matrix in each; gate and up projection are one matrix."""
    for target, (name, shape) in zip(("linear_fc1", "linear_fc2"), matrices.items(), strict=True):
        for expert in range(count):
            source = Source(name=name, shape=(count, *shape), at=expert)
            yield Rule(target=f"mlp.experts.local_experts.{expert}.{target}.weight", sources=(source,))


def norms(symbol: str, ours: str, name: str, hidden: int, finish: Finish | None = None) -> Iterator[Rule]:
    """The norm before a layer with this symbol, by either of its names here; ``finish`` as of `Rule`."""
    return (made_of(ours + target, {name: (hidden,)}, finish=finish) for target in NORMS[symbol])


def rules_of_pairs(
    config: HybridModelConfig,
    layers: Mapping[str, tuple[str, Iterable[Rule]]],
    *,
    second_norm: str,
    final_norm: str,
    finish: Finish | None = None,
) -> Iterator[Rule]:
    """A model with one layer for two of megatron's: a mixer, then experts or a gated MLP, each after a norm.

    Args:
        config: Its dimensions.
        layers: By symbol, the prefix of a layer's tensors in theirs, and its rules.
        second_norm: The name of the norm before experts or MLP.
        final_norm: Likewise, after all layers.
        finish: What is done to the weights of these norms.
    """
    hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
    rules = {symbol: list(layer) for symbol, (_, layer) in layers.items() if symbol in config.symbols}
    yield made_of("embedding.word_embeddings.weight", {"model.embed_tokens.weight": vocabulary})
    for number, symbol in enumerate(config.layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number // 2}."
        norm = second_norm if number % 2 else "input_layernorm"
        if config.normalises_output(number):
            norm = f"post_{'feedforward' if number % 2 else 'attention'}_layernorm"
        yield from norms(symbol, ours, f"{theirs}{norm}.weight", hidden, finish)
        yield from rules_of(rules[symbol], ours, theirs + layers[symbol][0])
    yield made_of("decoder.final_norm.weight", {f"{final_norm}.weight": (hidden,)}, finish=finish)
    yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})
