"""Qwen3-Next: layers of Gated DeltaNet or gated attention, each with experts or an MLP after it.

One layer of Hugging Face is two of megatron's. Norms multiply by 1 + weight there, all but the one inside Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.given import Given, attention, attention_json, rotary, rotary_json, written
from megatron_hybrid_prefix.models.hf.mapping import PLUS_ONE, Finish, RowNumbers, Rule, made_of, row_numbers
from megatron_hybrid_prefix.models.hf.parts import experts, mlp, rules_of_pairs

_NUM_EXPERTS = 512  # where the file has no such name
_MIXERS = {"linear_attention": "G", "full_attention": "*"}
_DELTA_NET = {
    "linear_num_key_heads": "gdn_num_key_heads",
    "linear_num_value_heads": "gdn_num_value_heads",
    "linear_key_head_dim": "gdn_key_head_dim",
    "linear_value_head_dim": "gdn_value_head_dim",
    "linear_conv_kernel_dim": "d_conv",
}
_EXPERTS = {
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


class Qwen3Next(Family):
    """``Qwen3NextForCausalLM``.

    A norm's 1 + weight stays in float32 (`HybridModelConfig.float32_norms`), as Hugging Face adds in float32. Transformer
    Engine's norms round it to the model's dtype.

    Attributes:
        kv_heads, channels, rotary_fraction: Where the file has no such names, as of `attention` and `rotary`.
        fixed: Fields that all models have alike. finish: What is done to norms. of_output: Names of the norm and the projection after Gated DeltaNet.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    architecture = "Qwen3NextForCausalLM"
    kv_heads: ClassVar[int | None] = 2
    channels: ClassVar[int | None] = 256
    rotary_fraction: ClassVar[float] = 0.25
    fixed: ClassVar[dict[str, Any]] = {"attention_output_gate": True, "qk_norm": True, "float32_norms": True}
    finish: ClassVar[Finish | None] = PLUS_ONE
    of_output: ClassVar[tuple[str, str]] = "norm", "out_proj"

    def dimensions(self, given: Given) -> HybridModelConfig:
        given.only("hidden_act", "silu")
        pattern = _pattern(given)
        fields: dict[str, Any] = {}
        fraction = 1.0 if "partial_rotary_factor" in given else self.rotary_fraction  # a null is all of them
        if "E" in pattern:
            given.only("norm_topk_prob", True)  # the router's weights here are a softmax over the chosen experts
            fields = given.fields(_EXPERTS, num_moe_experts=_NUM_EXPERTS) | {"moe_shared_expert_gate": True}
        return HybridModelConfig(
            layer_pattern=pattern,
            **attention(given, kv_heads=self.kv_heads, channels=self.channels)
            | rotary(given, default_fraction=fraction),
            **given.fields(_DELTA_NET, d_conv=4),
            activation="swiglu",
            **self.fixed,
            layernorm_epsilon=given.real("rms_norm_eps", default=1e-6),
            **fields,
        )

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        kinds = ["full_attention" if symbol == "*" else "linear_attention" for symbol in config.layers[::2]]
        return {
            **attention_json(config),
            **rotary_json(config),
            "num_hidden_layers": len(kinds),
            "layer_types": kinds,
            "mlp_only_layers": [number for number, symbol in enumerate(config.layers[1::2]) if symbol != "E"],
            **written(config, _DELTA_NET | _EXPERTS),
            "rms_norm_eps": config.layernorm_epsilon,
            "norm_topk_prob": True,
        }

    def canonical(self, name: str) -> str | None:
        """``mtp.`` is multi-token prediction."""
        return None if name.startswith("mtp.") else name

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        layers = {
            "G": ("linear_attn.", self.delta_net_parts(config, names)),
            "*": ("self_attn.", self.attention_parts(config)),
            "-": ("mlp.", mlp("mlp.", "", config.hidden_size, config.ffn_hidden_size, gated=True)),
            "E": ("mlp.", _experts(config, stacked=any(name.endswith(".mlp.experts.down_proj") for name in names))),
        }
        norms = {"second_norm": "post_attention_layernorm", "final_norm": "model.norm"}
        return rules_of_pairs(config, layers, **norms, finish=self.finish)

    def delta_net_parts(self, config: HybridModelConfig, names: Collection[str]) -> Iterator[Rule]:
        """A layer of Gated DeltaNet."""
        heads, (norm, out_proj) = config.gdn_num_value_heads, self.of_output
        keys, values = config.gdn_num_key_heads * config.gdn_key_head_dim, heads * config.gdn_value_head_dim
        yield self.in_proj(config, keys, values)
        sources = {f"{name}.weight": (n, 1, config.d_conv) for name, n in self.convolution(keys, values, names).items()}
        yield made_of("self_attention.conv1d.weight", sources)
        yield made_of("self_attention.dt_bias", {"dt_bias": (heads,)})
        yield made_of("self_attention.A_log", {"A_log": (heads,)})
        yield made_of("self_attention.out_norm.weight", {f"{norm}.weight": (config.gdn_value_head_dim,)})
        yield made_of("self_attention.out_proj.weight", {f"{out_proj}.weight": (config.hidden_size, values)})

    def convolution(self, keys: int, values: int, names: Collection[str]) -> dict[str, int]:
        """Its tensors, and their channels."""
        return {"conv1d": 2 * keys + values}

    def in_proj(self, config: HybridModelConfig, keys: int, values: int) -> Rule:
        """The projection into it, to so many channels of all key heads, and of all value heads."""
        hidden, heads = config.hidden_size, config.gdn_num_value_heads
        sources = {"in_proj_qkvz.weight": (2 * keys + 2 * values, hidden), "in_proj_ba.weight": (2 * heads, hidden)}
        return made_of("self_attention.in_proj.weight", sources, _order_of_in_proj(config))

    def attention_parts(self, config: HybridModelConfig) -> Iterator[Rule]:
        """Gated attention."""
        hidden, channels = config.hidden_size, config.kv_channels
        heads, kv = config.num_attention_heads * channels, config.num_query_groups * channels
        sources = {"q_proj.weight": (2 * heads, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden)}
        yield made_of("self_attention.linear_qkv.weight", sources, _order_of_qkv(config))
        yield made_of("self_attention.linear_proj.weight", {"o_proj.weight": (hidden, heads)})
        for part in "qk":
            norm = {f"{part}_norm.weight": (channels,)}
            yield made_of(f"self_attention.{part}_layernorm.weight", norm, finish=PLUS_ONE)


def _pattern(given: Given) -> str:
    layers, experts = given.layers(), given.whole("num_experts", default=_NUM_EXPERTS)
    kinds = given.texts("layer_types")
    if kinds is None:
        every = max(1, given.whole("full_attention_interval", default=4))
        kinds = ["full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)]
    if len(kinds) != layers or set(kinds) - set(_MIXERS):
        raise given.error(f"layer_types must be {layers} times linear_attention or full_attention")
    without = given.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise given.error(f"mlp_only_layers is {shown(without)}, no list of layers")
    step = max(1, given.whole("decoder_sparse_step", default=1))
    return "".join(
        _MIXERS[kind] + ("E" if experts and number not in without and (number + 1) % step == 0 else "-")
        for number, kind in enumerate(kinds)
    )


def _order_of_in_proj(config: HybridModelConfig) -> RowNumbers:
    """Theirs: for each key head q, k, and v and z of its value heads; then for each key head b and a. Ours: part by part."""
    import numpy as np

    key_heads = config.gdn_num_key_heads
    shared = config.gdn_num_value_heads // key_heads  # value heads of a key head
    key, value = config.gdn_key_head_dim, shared * config.gdn_value_head_dim
    qkvz, ba = row_numbers(key_heads * (2 * key + 2 * value), key_heads * 2 * shared)
    parts = [
        *np.split(qkvz.reshape(key_heads, -1), np.cumsum([key, key, value]), axis=1),
        *np.split(ba.reshape(key_heads, -1), 2, axis=1),
    ]
    return np.concatenate([part.flatten() for part in parts])


def _order_of_qkv(config: HybridModelConfig) -> RowNumbers:
    """Theirs: for each query head its query and its gate; keys; values. Ours: for each group queries, gates, key, value."""
    import numpy as np

    groups, channels = config.num_query_groups, config.kv_channels
    heads, kv = config.num_attention_heads * channels, groups * channels
    q_and_gate, k, v = row_numbers(2 * heads, kv, kv)
    heads_of_groups = q_and_gate.reshape(groups, -1, 2, channels)
    parts = [heads_of_groups[:, :, 0], heads_of_groups[:, :, 1], k, v]
    order: RowNumbers = np.concatenate([part.reshape(groups, -1) for part in parts], axis=1).flatten()
    return order


def _experts(config: HybridModelConfig, *, stacked: bool) -> Iterator[Rule]:
    hidden, shared = config.hidden_size, config.moe_shared_expert_intermediate_size
    yield made_of("mlp.router.weight", {"gate.weight": (config.num_moe_experts, hidden)})
    yield from experts(config, gated=True, stacked=stacked)
    yield from mlp("mlp.shared_experts.", "shared_expert.", hidden, shared, gated=True)
    yield made_of("mlp.shared_experts.gate_weight", {"shared_expert_gate.weight": (1, hidden)})


register_family(Qwen3Next())
