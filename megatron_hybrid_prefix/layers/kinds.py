"""Which kinds of recurrent layers there are, and what is done to all of them in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.layers import mamba2  # noqa: F401  (registers its kind)
from megatron_hybrid_prefix.layers.base import KINDS, LayerKind
from megatron_hybrid_prefix.upstream.state_config import decoder_layers


def layer_kinds() -> Sequence[LayerKind]:
    """All kinds, those of plugins included. Imports megatron, so a platform has to run.

    Raises:
        PluginError: A plugin cannot be imported.
    """
    return [KINDS[name] for name in KINDS.names()]


def kind_of(module: torch.nn.Module) -> LayerKind | None:
    """The kind of a recurrent layer; None for any other module."""
    return next((kind for kind in layer_kinds() if kind.is_layer(module)), None)


def use_slot_mixers(model: Any) -> int:
    """Make every recurrent layer of a built model read and write states by slot, in place.

    Returns:
        How many layers changed; 0 where all did already.
    """
    kinds, changed = layer_kinds(), 0
    number_of = {
        id(part): number for number, (_, layer) in enumerate(decoder_layers(model), 1) for part in layer.modules()
    }
    for module in model.modules():
        for kind in kinds:
            if kind.is_layer(module) and kind.put_on(module):
                changed += 1
                if id(module) in number_of:  # else it drafts, and keeps no state
                    module.slot_layer_number = number_of[id(module)]
    return changed


def restore_mixers(model: Any) -> int:
    """Undo `use_slot_mixers`; returns how many layers changed."""
    kinds = layer_kinds()
    return sum(kind.take_off(module) for module in model.modules() for kind in kinds)


def invalidate_layers(model: Any) -> None:
    """The model has new weights: what its recurrent layers derived from the old ones is stale."""
    kinds = layer_kinds()
    for module in model.modules():
        for kind in kinds:
            if kind.is_layer(module):
                kind.invalidate(module)
