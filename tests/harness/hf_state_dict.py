"""State dicts of Hugging Face in memory: their shapes, and the way into a model without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_hybrid_prefix.models import HybridModelConfig
from megatron_hybrid_prefix.models.hf_weights import family_of, plan_copies, shapes_of


@torch.no_grad()
def copy_hf_weights(
    model: Any, state_dict: Mapping[str, Any], config: HybridModelConfig, model_type: str | None = None
) -> None:
    """Copies a state dict into ``model``; arguments and errors as of `plan_copies`."""
    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    weights, copies = plan_copies(model, state_dict, config, model_type, source="the state dict")
    for copy in copies:
        copy.parameter.copy_(copy.rule.read(weights, rows=copy.rows, columns=copy.columns))
    invalidate_layers(model)


def hf_shapes(config: HybridModelConfig, model_type: str | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the files of a Hugging Face model with these dimensions."""
    return shapes_of(family_of(config, model_type).rules(config))
