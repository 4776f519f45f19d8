"""`save_hf_folder`: a model of this package as a Hugging Face folder, which `open_folder` and transformers read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.models.hf_weights import family_of
from megatron_hybrid_prefix.models.weights import parameters_by_global_name


def save_hf_folder(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and perhaps ``generation_config.json``; other files stay.

    Args:
        model: The model, unsharded (tp = pp = ep = 1), of the family Nemotron-H without experts.
        path: The folder; it is made where there is none.
        dtype: Of the stored weights, all of them: "bfloat16" or "float32".
        generation: Values of ``generation_config.json``, such as ``eos_token_id``; None: no such file.

    Raises:
        ValueError: No family here has such dimensions, or it cannot be saved, or the model is sharded.
    """
    from safetensors.torch import save_file

    config: HybridModelConfig = model.hybrid_config
    family = family_of(config)
    if family.model_type != "nemotron_h" or config.has_experts:
        raise ValueError(
            f"only Nemotron-H without experts is saved, not {family.model_type} with {config.layer_pattern}"
        )
    rules = {rule.target: rule for rule in family.rules(config)}
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in parameters_by_global_name(model):
        if name not in rules or tuple(parameter.shape) != rules[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}: the model is sharded, or not of {family.model_type}"
            )
        weights |= _sources(rules[name], parameter.detach())
    if config.tie_embeddings:  # transformers' Nemotron-H does not tie them
        weights["lm_head.weight"] = weights["model.embeddings.weight"]
    stored = {name: weight.to("cpu", getattr(torch, dtype)).contiguous().clone() for name, weight in weights.items()}
    data = _nemotron_h(config, dtype)
    read_back = replace(dimensions_of(data, "config.json"), chunk_size=config.chunk_size)
    wanted = replace(
        config,
        layer_pattern=config.layer_pattern.replace("|", ""),
        dtype=dtype,
        tie_embeddings=False,
        long_memory=False,
    )
    if read_back != wanted:
        raise ValueError(f"config.json cannot say what this model is: {wanted} would be read as {read_back}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation), indent=2) + "\n", encoding="utf-8")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _sources(rule: Rule, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """`Rule.read` the other way round: the sources that the parameter is made of."""
    if rule.finish is not None or any(source.at is not None for source in rule.sources):
        raise ValueError(f"{rule.target} is computed from its sources: it cannot be saved")
    if rule.order is not None:
        rows = torch.empty_like(parameter)
        rows[rule.order.to(parameter.device)] = parameter
        parameter = rows
    parts = parameter.split([source.part_shape[0] for source in rule.sources])
    return {source.name: part for source, part in zip(rule.sources, parts, strict=True)}


def _nemotron_h(config: HybridModelConfig, dtype: str) -> dict[str, Any]:
    """``config.json``. A lower limit of 0 is none: megatron's mixer does not clamp the step size."""
    data: dict[str, Any] = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "dtype": dtype,
        "hybrid_override_pattern": config.layer_pattern.replace("|", ""),
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "attention_bias": False,
        "intermediate_size": config.ffn_hidden_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "ssm_state_size": config.mamba_state_dim,
        "n_groups": config.mamba_num_groups,
        "conv_kernel": config.d_conv,
        "chunk_size": config.chunk_size,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_hidden_act": "silu",
        "time_step_min": 0.0,
    }
    if config.state_dtype is not None:
        data["mamba_ssm_cache_dtype"] = config.state_dtype
    return data
