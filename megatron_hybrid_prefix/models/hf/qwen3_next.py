"""Qwen3-Next: layers of Gated DeltaNet or gated attention, each with experts or an MLP after it.

One layer of Hugging Face is two of megatron's. Norms multiply by 1 + weight there, all but the one inside Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.mapping import Family, Rule, Source, made_of, plus_one, row_numbers


class Qwen3Next(Family):
    """``Qwen3NextForCausalLM``.

    A norm's 1 + weight stays in float32 (`HybridModelConfig.float32_norms`), as Hugging Face adds in float32. Transformer
    Engine's norms round it to the model's dtype.
    """

    model_type = "qwen3_next"

    def mismatch(self, config: HybridModelConfig) -> str | None:
        pattern = config.layer_pattern.replace("|", "")
        if set(pattern[::2]) - set("G*") or set(pattern[1::2]) - set("E-") or len(pattern) % 2:
            return f"a layer G or *, then one E or -, and so on, not layer_pattern={config.layer_pattern!r}"
        if config.activation != "swiglu" or config.rotary_base is None:
            return f"swiglu and rotary_base, not {config.activation!r} and rotary_base={config.rotary_base}"
        if not (config.attention_output_gate and config.qk_norm):
            return "attention_output_gate and qk_norm"
        if config.count("E") and not config.moe_shared_expert_gate:
            return "moe_shared_expert_gate"
        if config.moe_router_score != "softmax" or config.moe_router_groups or config.moe_router_scaling != 1.0:
            return "a router with softmax, without groups and scaling"
        return None

    def canonical(self, name: str) -> str | None:
        """``mtp.`` is multi-token prediction."""
        return None if name.startswith("mtp.") else name

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        """Experts are matrices each in files, and stacks of matrices in a model in memory."""
        hidden, vocabulary = (config.hidden_size,), (config.vocab_size, config.hidden_size)
        stacked = any(name.endswith(".mlp.experts.down_proj") for name in names)
        yield made_of("embedding.word_embeddings.weight", {"model.embed_tokens.weight": vocabulary})
        pattern = config.layer_pattern.replace("|", "")
        qkv = _order_of_qkv(config)
        for number, (mixer, feed_forward) in enumerate(zip(pattern[::2], pattern[1::2], strict=True)):
            theirs = f"model.layers.{number}."
            ours = f"decoder.layers.{2 * number}."
            yield _norm(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden)
            if mixer == "G":
                fused = "self_attention.in_proj.layer_norm_weight"
                yield from _delta_net(f"{ours}self_attention.", f"{theirs}linear_attn.", config, *self.in_proj(config))
            else:
                fused = "self_attention.linear_qkv.layer_norm_weight"
                yield from _attention(f"{ours}self_attention.", f"{theirs}self_attn.", config, qkv)
            yield _norm(ours + fused, f"{theirs}input_layernorm.weight", hidden)
            ours = f"decoder.layers.{2 * number + 1}."
            behind = f"{theirs}post_attention_layernorm.weight"
            yield _norm(f"{ours}pre_mlp_layernorm.weight", behind, hidden)
            yield _norm(f"{ours}mlp.linear_fc1.layer_norm_weight", behind, hidden)
            if feed_forward == "E":
                yield from _experts(f"{ours}mlp.", f"{theirs}mlp.", config, stacked)
            else:
                yield from _mlp(f"{ours}mlp.", f"{theirs}mlp.", config.hidden_size, config.ffn_hidden_size)
        yield _norm("decoder.final_norm.weight", "model.norm.weight", hidden)
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})

    def in_proj(self, config: HybridModelConfig) -> tuple[dict[str, int], torch.Tensor | None]:
        """Tensors of the projection into Gated DeltaNet with their rows, and the order of the rows in megatron's matrix.

        Theirs: for each key head q, k, and v and z of its value heads; then for each key head b and a. Ours: part by part.
        """
        key_heads = config.gdn_num_key_heads
        shared = config.gdn_num_value_heads // key_heads  # value heads of a key head
        key, value = config.gdn_key_head_dim, shared * config.gdn_value_head_dim
        rows = {"in_proj_qkvz": key_heads * (2 * key + 2 * value), "in_proj_ba": key_heads * 2 * shared}
        qkvz, ba = row_numbers(*rows.values())
        parts = [
            *qkvz.view(key_heads, -1).split([key, key, value, value], dim=1),
            *ba.view(key_heads, -1).split([shared, shared], dim=1),
        ]
        return rows, torch.cat([part.flatten() for part in parts])


def _norm(target: str, source: str, shape: tuple[int, ...]) -> Rule:
    return Rule(target=target, sources=(Source(name=source, shape=shape),), finish=plus_one)


def _delta_net(
    ours: str, theirs: str, config: HybridModelConfig, in_proj: dict[str, int], order: torch.Tensor | None
) -> Iterator[Rule]:
    hidden, heads = config.hidden_size, config.gdn_num_value_heads
    keys, values = config.gdn_num_key_heads * config.gdn_key_head_dim, heads * config.gdn_value_head_dim
    projection = {f"{theirs}{name}.weight": (rows, hidden) for name, rows in in_proj.items()}
    yield made_of(f"{ours}in_proj.weight", projection, order)
    yield made_of(f"{ours}conv1d.weight", {f"{theirs}conv1d.weight": (2 * keys + values, 1, config.d_conv)})
    yield made_of(f"{ours}dt_bias", {f"{theirs}dt_bias": (heads,)})
    yield made_of(f"{ours}A_log", {f"{theirs}A_log": (heads,)})
    yield made_of(f"{ours}out_norm.weight", {f"{theirs}norm.weight": (config.gdn_value_head_dim,)})
    yield made_of(f"{ours}out_proj.weight", {f"{theirs}out_proj.weight": (hidden, values)})


def _attention(ours: str, theirs: str, config: HybridModelConfig, order: torch.Tensor) -> Iterator[Rule]:
    hidden, channels = config.hidden_size, config.kv_channels
    heads, kv = config.num_attention_heads * channels, config.num_query_groups * channels
    yield made_of(
        f"{ours}linear_qkv.weight",
        {
            f"{theirs}q_proj.weight": (2 * heads, hidden),
            f"{theirs}k_proj.weight": (kv, hidden),
            f"{theirs}v_proj.weight": (kv, hidden),
        },
        order,
    )
    yield _norm(f"{ours}q_layernorm.weight", f"{theirs}q_norm.weight", (channels,))
    yield _norm(f"{ours}k_layernorm.weight", f"{theirs}k_norm.weight", (channels,))
    yield made_of(f"{ours}linear_proj.weight", {f"{theirs}o_proj.weight": (hidden, heads)})


def _order_of_qkv(config: HybridModelConfig) -> torch.Tensor:
    """Theirs: for each query head its query and its gate; keys; values. Ours: for each group queries, gates, key, value."""
    groups, channels = config.num_query_groups, config.kv_channels
    heads, kv = config.num_attention_heads * channels, groups * channels
    q_and_gate, k, v = row_numbers(2 * heads, kv, kv)
    q, gate = q_and_gate.view(groups, -1, 2, channels).unbind(2)
    return torch.cat([part.reshape(groups, -1) for part in (q, gate, k, v)], dim=1).flatten()


def _experts(ours: str, theirs: str, config: HybridModelConfig, stacked: bool) -> Iterator[Rule]:
    hidden, width, experts = config.hidden_size, config.expert_ffn_hidden_size, config.num_moe_experts
    yield made_of(f"{ours}router.weight", {f"{theirs}gate.weight": (experts, hidden)})
    for expert in range(experts):
        target = f"{ours}experts.local_experts.{expert}."
        if stacked:
            for ours_of, theirs_of, shape in (
                ("linear_fc1", "gate_up_proj", (experts, 2 * width, hidden)),
                ("linear_fc2", "down_proj", (experts, hidden, width)),
            ):
                source = Source(name=f"{theirs}experts.{theirs_of}", shape=shape, at=expert)
                yield Rule(target=f"{target}{ours_of}.weight", sources=(source,))
        else:
            yield from _mlp(target, f"{theirs}experts.{expert}.", hidden, width)
    shared = config.moe_shared_expert_intermediate_size
    yield from _mlp(f"{ours}shared_experts.", f"{theirs}shared_expert.", hidden, shared)
    yield made_of(f"{ours}shared_experts.gate_weight", {f"{theirs}shared_expert_gate.weight": (1, hidden)})


def _mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Rule]:
    gate_and_up = {f"{theirs}{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    yield made_of(f"{ours}linear_fc1.weight", gate_and_up)
    yield made_of(f"{ours}linear_fc2.weight", {f"{theirs}down_proj.weight": (hidden, width)})
