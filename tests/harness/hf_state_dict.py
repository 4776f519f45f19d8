"""State dicts of Hugging Face in memory: their shapes, and the way into a model without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.models import HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import family_of
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.models.hf_weights import plan_copies, shapes_of


@torch.no_grad()
def copy_hf_weights(
    model: Any, state_dict: Mapping[str, Any], config: HybridModelConfig, model_type: str | None = None
) -> None:
    """Copies a state dict into ``model``; arguments and errors as of `plan_copies`."""
    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    weights, copies = plan_copies(model, state_dict, config, model_type, source="the state dict")
    for copy in copies:
        copy.parameter.copy_(read(copy.rule, weights, rows=copy.rows, columns=copy.columns))
    invalidate_layers(model)


def read(
    rule: Rule,
    weights: Mapping[str, Any],
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    columns: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The parameter of a rule, or a part of it as of `Copy`, from tensors by name; nothing else of them is touched."""
    pieces = []
    for run in rule.runs(rows):
        where: tuple[int | slice, ...] = (slice(run.start, run.stop),)
        if run.source.at is not None:
            where = (run.source.at, *where)
        if columns is not None:
            where = (*where, slice(*columns))
        pieces.append(weights[run.source.name][where])
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found if rule.finish is None else rule.finish.apply(found)


def hf_shapes(config: HybridModelConfig, model_type: str | None = None, *names: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the files of a model with these dimensions; ``names`` as of `Family.rules`."""
    return shapes_of(family_of(config, model_type).rules(config, names))
