"""`copy_hf_weights`: copy a Hugging Face Nemotron-H state dict into this rank's shard of a hybrid model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.weights import (
    parameters_by_global_name,
    shard_for_this_rank,
)

# Nemotron-H's name to megatron's names: with local layers, and with Transformer Engine, which fuses a norm into the next layer.
_MAMBA = {
    "norm.weight": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    # Both models pack z (the gate), x, B, C, dt in this order.
    "mixer.in_proj.weight": ("mixer.in_proj.weight",),
    "mixer.conv1d.weight": ("mixer.conv1d_weight",),
    "mixer.conv1d.bias": ("mixer.conv1d_bias",),
    "mixer.dt_bias": ("mixer.dt_bias",),
    "mixer.A_log": ("mixer.A_log",),
    "mixer.D": ("mixer.D",),
    "mixer.norm.weight": ("mixer.norm.weight",),
    "mixer.out_proj.weight": ("mixer.out_proj.weight",),
}
_ATTENTION = {
    "norm.weight": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "mixer.o_proj.weight": ("self_attention.linear_proj.weight",),
}
_MLP = {
    "norm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "mixer.up_proj.weight": ("mlp.linear_fc1.weight",),
    "mixer.down_proj.weight": ("mlp.linear_fc2.weight",),
}
_BY_SYMBOL = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP}
_QKV = tuple(f"mixer.{part}_proj.weight" for part in "qkv")


@torch.no_grad()
def copy_hf_weights(model: Any, state_dict: Mapping[str, torch.Tensor], config: HybridModelConfig) -> None:
    """Copy a ``NemotronHForCausalLM`` state dict into ``model``, for any tensor- and pipeline-parallel layout.

    The whole state dict is checked before the first weight is written. Values are converted to the model's dtype.
    Two differences remain, as they are not weights: Hugging Face's Nemotron-H clamps the step size dt from below at its
    ``time_step_min``, megatron does not; and the gated norm of megatron's mixer always has an epsilon of 1e-5.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it.
        state_dict: Unsharded tensors; names begin with ``model.`` or, as on the Hub, ``backbone.``. Weights of
            multi-token-prediction layers (``mtp.``) are ignored.
        config: Dimensions of the unsharded model.

    Raises:
        ValueError: ``config`` is not a Nemotron-H, or a weight is missing, unknown or has another shape.
    """
    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    if config.activation != "relu2" or config.rotary_base is not None:
        raise ValueError(
            f"Nemotron-H has squared ReLU and no position embedding, not activation={config.activation!r} "
            f"and rotary_base={config.rotary_base}"
        )
    weights = {
        name.replace("backbone.", "model.", 1): value
        for name, value in state_dict.items()
        if not name.startswith("mtp.")
    }
    _check(weights, config)
    sources = _sources(config)
    for name, parameter in parameters_by_global_name(model):
        source = sources[name]
        if isinstance(source, str):
            full = weights[source]
        else:
            q, k, v = (weights[part] for part in source)
            full = _pack_qkv(q, k, v, config)
        parameter.copy_(shard_for_this_rank(full, name, parameter, config))
    invalidate_layers(model)


def hf_shapes(config: HybridModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict of a ``NemotronHForCausalLM`` with these dimensions."""
    hidden = config.hidden_size
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    heads, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    of_layer: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "in_proj.weight": (inner + conv + config.mamba_num_heads, hidden),
            "conv1d.weight": (conv, 1, config.d_conv),
            "conv1d.bias": (conv,),
            "dt_bias": (config.mamba_num_heads,),
            "A_log": (config.mamba_num_heads,),
            "D": (config.mamba_num_heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        },
        "*": {
            "q_proj.weight": (heads, hidden),
            "k_proj.weight": (kv, hidden),
            "v_proj.weight": (kv, hidden),
            "o_proj.weight": (hidden, heads),
        },
        "-": {
            "up_proj.weight": (config.ffn_hidden_size, hidden),
            "down_proj.weight": (hidden, config.ffn_hidden_size),
        },
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (config.vocab_size, hidden)}
    for layer, symbol in enumerate(config.layer_pattern.replace("|", "")):
        shapes[f"model.layers.{layer}.norm.weight"] = (hidden,)
        shapes |= {f"model.layers.{layer}.mixer.{name}": shape for name, shape in of_layer[symbol].items()}
    return shapes | {"model.norm_f.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def _check(weights: Mapping[str, torch.Tensor], config: HybridModelConfig) -> None:
    expected = hf_shapes(config)
    if config.tie_embeddings and "lm_head.weight" not in weights:
        del expected["lm_head.weight"]
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    for what, names in (("lacks", missing), ("has an unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"the state dict {what} weight {min(names)}{more}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, the model's dimensions require {shape}")


def _sources(config: HybridModelConfig) -> dict[str, str | tuple[str, ...]]:
    """Maps megatron's name of each parameter to Nemotron-H's name, or to the names of q, k and v."""
    sources: dict[str, str | tuple[str, ...]] = {
        "embedding.word_embeddings.weight": "model.embeddings.weight",
        "decoder.final_norm.weight": "model.norm_f.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for layer, symbol in enumerate(config.layer_pattern.replace("|", "")):
        for theirs, names in _BY_SYMBOL[symbol].items():
            for name in names:
                sources[f"decoder.layers.{layer}.{name}"] = f"model.layers.{layer}.{theirs}"
        if symbol == "*":
            qkv = tuple(f"model.layers.{layer}.{part}" for part in _QKV)
            sources[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = qkv
    return sources


def _pack_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: HybridModelConfig) -> torch.Tensor:
    """Megatron's ``linear_qkv``: for each query group the query heads, the key head, the value head."""
    groups = [part.reshape(config.num_query_groups, -1, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(groups, dim=1).reshape(-1, q.shape[-1])
