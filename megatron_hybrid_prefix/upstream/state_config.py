"""Megatron's description of a model's recurrent states, with this package's beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.config import MambaInferenceStateConfig
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.utils import get_attr_wrapped_model

RECURRENT = Symbols.MAMBA
"""Symbol of the layers that megatron's context gives live states."""
_NOT_IN_DYNAMIC_INFERENCE = Symbols.GDN


@dataclass
class RecurrentStateConfig(MambaInferenceStateConfig):
    """What megatron's context is told of a model's recurrent layers.

    Attributes:
        states: What this package knows of them (`ModelStates`); None where the layers are all Mamba2, as megatron describes
            them.
    """

    states: Any = None


def decoder_layers(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """Symbol and module of each layer of a model's decoder on this pipeline stage; none for a model without a pattern."""
    decoder = get_attr_wrapped_model(model, "decoder")
    symbols = getattr(decoder, "layer_type_list", None)
    return [] if symbols is None else list(zip(symbols, decoder.layers, strict=True))


def needs_a_kind(symbol: str) -> bool:
    """Whether a layer with this symbol is recurrent, so that megatron's engine can only run it by slots."""
    return symbol in (RECURRENT, _NOT_IN_DYNAMIC_INFERENCE)
