"""Nemotron-H: layers of Mamba2, attention, an MLP or experts, one norm each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.given import Given, attention, attention_json, norm_epsilon
from megatron_hybrid_prefix.models.hf.mapping import Rule, Source, made_of
from megatron_hybrid_prefix.models.hf.parts import NORMS, Parts, attention_parts, mamba_parts, rules_of

_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
_LAYERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


class NemotronH(Family):
    """``NemotronHForCausalLM`` without latent experts.

    Two things are not weights: Hugging Face clamps the step size dt from below at its ``time_step_min``, megatron does not
    clamp it; and the gated norm of megatron's mixer has an epsilon of 1e-5 whatever the config says.
    """

    model_types = ("nemotron_h",)
    architecture = "NemotronHForCausalLM"
    ties = False

    def dimensions(self, given: Given) -> HybridModelConfig:
        old = {new: given.data[name] for name, new in _OLD_NAMES.items() if name in given}
        given = Given({**given.data, **old}, given.name)
        pattern = _pattern(given)
        for name in ("use_bias", "mlp_bias", "mamba_proj_bias", "residual_in_fp32"):
            given.only(name, False)
        given.only("use_conv_bias", True)
        given.only("mlp_hidden_act", "relu2")
        given.only("mamba_hidden_act", "silu")
        given.check_step_limits()
        epsilon = norm_epsilon(given, pattern, "layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5)
        return HybridModelConfig(
            layer_pattern=pattern,
            **attention(given, kv_heads=8, channels=128),
            mamba_num_heads=given.whole("mamba_num_heads"),
            mamba_head_dim=given.whole("mamba_head_dim"),
            mamba_state_dim=given.whole("ssm_state_size"),
            mamba_num_groups=given.whole("n_groups"),
            d_conv=given.whole("conv_kernel", default=4),
            activation="relu2",
            layernorm_epsilon=epsilon,
            **(_experts_of(given) if "E" in pattern else {}),
        )

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        """A ``time_step_min`` of 0 is none: megatron's mixer does not clamp the step size."""
        pattern = config.layer_pattern.replace("|", "")
        data = {
            **attention_json(config),
            "hybrid_override_pattern": pattern,
            "num_hidden_layers": len(pattern),
            "mamba_num_heads": config.mamba_num_heads,
            "mamba_head_dim": config.mamba_head_dim,
            "ssm_state_size": config.mamba_state_dim,
            "n_groups": config.mamba_num_groups,
            "conv_kernel": config.d_conv,
            "chunk_size": config.chunk_size,
            "layer_norm_epsilon": config.layernorm_epsilon,
            "time_step_min": 0.0,
        }
        if "E" in pattern:
            data |= {
                "n_routed_experts": config.num_moe_experts,
                "num_experts_per_tok": config.moe_router_topk,
                "n_group": config.moe_router_groups or 1,
                "topk_group": config.moe_router_topk_groups or 1,
                "routed_scaling_factor": config.moe_router_scaling,
                "moe_intermediate_size": config.expert_ffn_hidden_size,
                "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
            }
        return data

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
            yield from rules_of(parts[symbol], ours, f"{theirs}mixer.")
            if symbol == "E":
                yield from _experts(f"{ours}mlp.experts.local_experts.", f"{theirs}mixer.experts.", config, stacked)
        yield made_of("decoder.final_norm.weight", {"model.norm_f.weight": (hidden,)})
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})


def _pattern(given: Given) -> str:
    kinds = given.texts("layers_block_type", "layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in _LAYERS:
                raise given.error(f"layers_block_type has {kind!r}, none of {', '.join(_LAYERS)}")
        return "".join(_LAYERS[kind] for kind in kinds)
    pattern = given.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise given.error("neither layers_block_type nor hybrid_override_pattern says which layers there are")
    if other := set(pattern) - set(_LAYERS.values()):
        raise given.error(f"hybrid_override_pattern has {min(other)!r}, none of M, *, - and E")
    if given.whole("num_hidden_layers", default=len(pattern)) != len(pattern):
        raise given.error(f"hybrid_override_pattern has {len(pattern)} layers, num_hidden_layers is another number")
    return pattern


def _experts_of(given: Given) -> dict[str, Any]:
    """Fields of layers of experts."""
    if given.get("moe_latent_size") is not None:
        raise given.error("moe_latent_size: experts of a latent size are not supported")
    given.only("norm_topk_prob", True)
    given.only("n_shared_experts", 1)
    experts, chosen = given.whole("n_routed_experts", "num_local_experts"), given.whole("num_experts_per_tok")
    groups, chosen_groups = given.whole("n_group", default=1), given.whole("topk_group", default=1)
    if chosen_groups == groups:  # all of them: no choice
        groups = chosen_groups = 0
    elif chosen != 2 * chosen_groups:
        raise given.error(
            f"num_experts_per_tok is {chosen}, and topk_group {chosen_groups} of n_group {groups}: megatron rates a group by "
            f"its {chosen // max(1, chosen_groups)} best experts, this model by its 2 best"
        )
    if not (shared := given.whole("moe_shared_expert_intermediate_size")):
        raise given.error("moe_shared_expert_intermediate_size is 0: layers of experts have a shared expert")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_router_score": "sigmoid",
        "moe_router_groups": groups,
        "moe_router_topk_groups": chosen_groups,
        "moe_router_scaling": given.real("routed_scaling_factor", default=1.0),
        "moe_ffn_hidden_size": given.whole("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared,
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


register_family(NemotronH())
