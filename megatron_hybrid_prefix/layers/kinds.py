"""Which kinds of recurrent layers there are, and what is done to all of them in a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.layers import gated_delta_net, gated_delta_product, mamba2  # noqa: F401  (they register their kinds)
from megatron_hybrid_prefix.layers.base import KINDS, LayerKind
from megatron_hybrid_prefix.upstream.state_config import decoder_layers


def layer_kinds() -> Sequence[LayerKind]:
    """All kinds, those of plugins included. Imports megatron, so a platform has to run.

    Raises:
        PluginError: A plugin cannot be imported.
    """
    return [KINDS[name] for name in KINDS.names()]


def kind_of(module: torch.nn.Module, kinds: Sequence[LayerKind] | None = None) -> LayerKind | None:
    """The kind of a recurrent layer, None for any other module. Of several that match, the one registered last.

    Args:
        module: Any module of a built model.
        kinds: The result of `layer_kinds`, for callers that ask for many modules.
    """
    return next((kind for kind in reversed(kinds or layer_kinds()) if kind.is_layer(module)), None)


def recurrent_modules(model: Any) -> Iterator[tuple[LayerKind, torch.nn.Module]]:
    """Every recurrent layer of a model, or of a layer, with its kind; those that draft included, which keep no state."""
    kinds = layer_kinds()
    return ((kind, module) for module in model.modules() if (kind := kind_of(module, kinds)) is not None)


def use_slot_mixers(model: Any) -> int:
    """Make every recurrent layer of a built model read and write states by slot, in place.

    Returns:
        How many layers changed; 0 where all did already.

    Raises:
        ValueError: The class of a layer overrides what would be lost; none changed.
    """
    for kind, module in recurrent_modules(model):
        if (lost := kind.problem_of(module)) is not None:
            raise ValueError(f"{lost}: this package computes layers of kind {kind.name!r}; run this model without it")
    layers = enumerate(decoder_layers(model), 1)
    number_of = {id(part): number for number, (_, layer) in layers for part in layer.modules()}
    changed = 0
    for kind, module in recurrent_modules(model):
        changed += kind.put_on(module)
        if id(module) in number_of:
            layer: Any = module  # torch's stub knows no plain attributes
            layer.slot_layer_number = number_of[id(module)]
    return changed


def restore_mixers(model: Any) -> int:
    """Undo `use_slot_mixers`; returns how many layers changed."""
    return sum(kind.take_off(module) for kind, module in recurrent_modules(model))


def invalidate_layers(model: Any) -> None:
    """The model has new weights: what its recurrent layers derived from the old ones is computed again, in place."""
    for kind, module in recurrent_modules(model):
        kind.invalidate(module)
