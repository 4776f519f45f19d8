"""Nemotron-H, Nemotron 3: layers of Mamba2, attention, an MLP or experts, one norm each; and heads that draft."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.given import Given, attention, attention_json, norm_epsilon, written
from megatron_hybrid_prefix.models.hf.mapping import Rule, made_of
from megatron_hybrid_prefix.models.hf.parts import attention_parts, experts, mamba_parts, mlp, norms, rules_of

_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "num_local_experts": "n_routed_experts",
}
_LAYERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_MAMBA = {
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "ssm_state_size": "mamba_state_dim",
    "n_groups": "mamba_num_groups",
    "conv_kernel": "d_conv",
}
_EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


class NemotronH(Family):
    """``NemotronHForCausalLM``, also with latent experts, and with the heads of multi-token prediction that transformers leaves out.

    Two things are not weights: Hugging Face clamps the step size dt from below at its ``time_step_min``, megatron does not
    clamp it; and the gated norm of megatron's mixer has an epsilon of 1e-5 whatever the config says.
    """

    model_types = ("nemotron_h",)
    architecture = "NemotronHForCausalLM"
    ties = False

    def dimensions(self, given: Given) -> HybridModelConfig:
        old = {new: given.data[name] for name, new in _OLD_NAMES.items() if name in given}
        given = Given({**given.data, **old}, given.name)
        pattern, drafts = _pattern(given), _drafts_of(given)
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
            **given.fields(_MAMBA, d_conv=4),
            activation="relu2",
            layernorm_epsilon=epsilon,
            **(_experts_of(given) if "E" in pattern + drafts.get("mtp_layer_pattern", "") else {}),
            **drafts,
        )

    def as_stored(self, config: HybridModelConfig, names: Collection[str]) -> HybridModelConfig:
        """Without weights there are no heads that draft. One head is applied again at each depth, unless each has its own."""
        stored = {int(found[1]) for name in names if (found := re.match(r"mtp\.layers\.(\d+)\.", name))}
        if not config.mtp_num_layers or not stored:
            return replace(config, mtp_num_layers=0, mtp_layer_pattern="", mtp_use_repeated_layer=False)
        one = config.mtp_use_repeated_layer and max(stored) < len(config.mtp_layer_pattern)
        return replace(config, mtp_use_repeated_layer=one)

    def config_json(self, config: HybridModelConfig) -> dict[str, Any]:
        """A ``time_step_min`` of 0 is none: megatron's mixer does not clamp the step size."""
        data = {
            **attention_json(config),
            **written(config, _MAMBA),
            "hybrid_override_pattern": config.layers,
            "num_hidden_layers": config.num_layers,
            "chunk_size": config.chunk_size,
            "layer_norm_epsilon": config.layernorm_epsilon,
            "time_step_min": 0.0,
        }
        if config.mtp_num_layers:
            data |= {
                "num_nextn_predict_layers": config.mtp_num_layers,
                "mtp_hybrid_override_pattern": config.mtp_layer_pattern,
                "mtp_use_repeated_layer": config.mtp_use_repeated_layer,
            }
        if config.has_experts:
            data |= written(config, _EXPERTS) | {
                "n_group": config.moe_router_groups or 1,
                "topk_group": config.moe_router_topk_groups or 1,
                "routed_scaling_factor": config.moe_router_scaling,
                "moe_latent_size": config.moe_latent_size or None,
            }
        return data

    def canonical(self, name: str) -> str | None:
        """On the Hub names begin with ``backbone.``."""
        return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name

    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
        yield made_of("embedding.word_embeddings.weight", {"model.embeddings.weight": vocabulary})
        yield from _layers(config, config.layers, "decoder.", "model.", 0, names)
        yield made_of("decoder.final_norm.weight", {"model.norm_f.weight": (hidden,)})
        yield made_of("output_layer.weight", {"lm_head.weight": vocabulary})
        # Of heads that draft, all layers are numbered; the first and the last have what is around a head's layers.
        pattern = config.mtp_layer_pattern
        for depth in range(config.mtp_heads):
            ours, first = f"mtp.layers.{depth}.", depth * len(pattern)
            for name, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}.items():
                yield made_of(f"{ours}{name}.weight", {f"mtp.layers.{first}.{name}.weight": shape})
            yield from _layers(config, pattern, f"{ours}mtp_model_layer.", "mtp.", first, names)
            last = f"mtp.layers.{first + len(pattern) - 1}."
            yield made_of(f"{ours}final_layernorm.weight", {f"{last}final_layernorm.weight": (hidden,)})


def _layers(
    config: HybridModelConfig, pattern: str, ours: str, theirs: str, first: int, names: Collection[str]
) -> Iterator[Rule]:
    """Layers with these symbols; ``first`` is the number that the first one has in Hugging Face's names."""
    hidden = config.hidden_size
    stacked = any(name.startswith(theirs) and name.endswith(".experts.down_proj") for name in names)
    layers = {
        "M": mamba_parts(config),
        "*": attention_parts(config),
        "-": mlp("mlp.", "", hidden, config.ffn_hidden_size, gated=False),
        "E": _experts(config, stacked=stacked),
    }
    rules = {symbol: list(layers[symbol]) for symbol in set(pattern)}
    for number, symbol in enumerate(pattern):
        our_layer, their_layer = f"{ours}layers.{number}.", f"{theirs}layers.{first + number}."
        yield from norms(symbol, our_layer, f"{their_layer}norm.weight", hidden)
        yield from rules_of(rules[symbol], our_layer, f"{their_layer}mixer.")


def _pattern(given: Given) -> str:
    pattern = _symbols(given, "layers_block_type", "layer_types")
    if pattern is not None:
        return pattern
    if given.get("hybrid_override_pattern") is None:
        raise given.error("neither layers_block_type nor hybrid_override_pattern says which layers there are")
    pattern = _written(given, "hybrid_override_pattern")
    if given.whole("num_hidden_layers", default=len(pattern)) != len(pattern):
        raise given.error(f"hybrid_override_pattern has {len(pattern)} layers, num_hidden_layers is another number")
    return pattern


def _symbols(given: Given, *names: str) -> str | None:
    """Layers that one of these names lists; None: the file has none of them."""
    kinds = given.texts(*names)
    for kind in kinds or ():
        if kind not in _LAYERS:
            raise given.error(f"{names[0]} has {shown(kind)}, none of {', '.join(_LAYERS)}")
    return None if kinds is None else "".join(_LAYERS[kind] for kind in kinds)


def _written(given: Given, name: str) -> str:
    """Layers whose symbols the file has under this name."""
    pattern = str(given.get(name))
    if other := set(pattern) - set(_LAYERS.values()):
        raise given.error(f"{name} has {shown(min(other))}, none of M, *, - and E")
    return pattern


def _drafts_of(given: Given) -> dict[str, Any]:
    """Fields of multi-token prediction. As in transformers, the newer name counts unless it says the default.

    ``mtp_use_repeated_layer`` is a name of Megatron-Bridge; what NVIDIA has published is repeated.
    """
    depths = given.whole("num_nextn_predict_layers", default=0)
    if not depths:
        return {}
    pattern = _symbols(given, "mtp_layers_block_type") or "*E"
    if pattern == "*E" and given.get("mtp_hybrid_override_pattern") is not None:
        pattern = _written(given, "mtp_hybrid_override_pattern")
    return {
        "mtp_num_layers": depths,
        "mtp_layer_pattern": pattern,
        "mtp_use_repeated_layer": given.flag("mtp_use_repeated_layer", True),
    }


def _experts_of(given: Given) -> dict[str, Any]:
    """Fields of layers of experts."""
    given.only("norm_topk_prob", True)
    fields = given.fields(_EXPERTS)
    chosen = fields["moe_router_topk"]
    groups, chosen_groups = given.whole("n_group", default=1), given.whole("topk_group", default=1)
    if chosen_groups == groups:  # all of them: no choice
        groups = chosen_groups = 0
    elif chosen != 2 * chosen_groups:
        raise given.error(
            f"num_experts_per_tok is {chosen}, and topk_group {chosen_groups} of n_group {groups}: megatron rates a group by "
            f"its {chosen // max(1, chosen_groups)} best experts, this model by its 2 best"
        )
    if not fields["moe_shared_expert_intermediate_size"]:
        raise given.error("moe_shared_expert_intermediate_size is 0: layers of experts have a shared expert")
    return fields | {
        "moe_router_score": "sigmoid",
        "moe_router_groups": groups,
        "moe_router_topk_groups": chosen_groups,
        "moe_router_scaling": given.real("routed_scaling_factor", default=1.0),
        "moe_latent_size": given.whole("moe_latent_size", default=0),
    }


def _experts(config: HybridModelConfig, *, stacked: bool) -> Iterator[Rule]:
    hidden, latent, count = config.hidden_size, config.moe_latent_size, config.num_moe_experts
    if latent:
        yield made_of("mlp.fc1_latent_proj.weight", {"fc1_latent_proj.weight": (latent, hidden)})
        yield made_of("mlp.fc2_latent_proj.weight", {"fc2_latent_proj.weight": (hidden, latent)})
    yield made_of("mlp.router.weight", {"gate.weight": (count, hidden)})
    yield made_of("mlp.router.expert_bias", {"gate.e_score_correction_bias": (count,)})
    yield from experts(config, gated=False, stacked=stacked)
    shared = config.moe_shared_expert_intermediate_size
    yield from mlp("mlp.shared_experts.", "shared_experts.", hidden, shared, gated=False)


register_family(NemotronH())
