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
from megatron_hybrid_prefix.models.hf.dimensions import config_json_of, family_of
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.models.hf_weights import EMBEDDING, OUTPUT
from megatron_hybrid_prefix.models.weights import parameters_by_global_name


def save_hf_folder(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    generation: Mapping[str, Any] | None = None,
    model_type: str | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and perhaps ``generation_config.json``; other files stay.

    Args:
        model: The model, unsharded (tp = pp = ep = 1).
        path: The folder; it is made where there is none.
        dtype: Of the stored weights, all of them: "bfloat16" or "float32".
        generation: Values of ``generation_config.json``, such as ``eos_token_id``; None: no such file.
        model_type: Hugging Face's name of the family; None: that of the folder that the model was built from, or the first
            family that has such dimensions.

    Raises:
        ValueError: No family here has such dimensions, or the model is sharded, or has a weight that the family lacks.
    """
    from safetensors.torch import save_file

    config: HybridModelConfig = replace(model.hybrid_config, dtype=dtype)
    family = family_of(config, model_type or model.hf_model_type)
    parameters = dict(parameters_by_global_name(model))
    if config.tie_embeddings and not family.ties:
        config = replace(config, tie_embeddings=False)
        parameters[OUTPUT] = parameters[EMBEDDING]
    rules = {rule.target: rule for rule in family.rules(config)}
    if config.tie_embeddings:
        del rules[OUTPUT]
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if name not in rules or tuple(parameter.shape) != rules[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}: the model is sharded, or not of {family.name}"
            )
        _write(rules[name], parameter.detach(), getattr(torch, dtype), weights)
    written = {source for name in parameters for source in rules[name].sources}
    absent = {source.name for rule in rules.values() for source in rule.sources if source not in written}
    if absent:
        raise ValueError(f"the model has no weight for {min(absent)}: it is sharded, or not of {family.name}")
    data = config_json_of(family, config)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation), indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(rule: Rule, values: torch.Tensor, dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> None:
    """Writes the sources of a parameter with these values, whole tensors or matrices of a stack, into ``weights``."""
    if rule.finish is not None:
        values = rule.finish.undo(values)
    if rule.order is not None:
        rows = torch.empty_like(values)
        rows[torch.from_numpy(rule.order).to(values.device)] = values
        values = rows
    parts = values.split([source.part_shape[0] for source in rule.sources])
    for source, part in zip(rule.sources, parts, strict=True):
        if source.name not in weights:
            weights[source.name] = torch.empty(source.shape, dtype=dtype)
        (weights[source.name] if source.at is None else weights[source.name][source.at]).copy_(part)
