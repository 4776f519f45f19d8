"""Megatron's description of a model's recurrent states, and this package's next to it."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.config import MambaInferenceStateConfig
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    is_linear_attention_variant,
)
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

RECURRENT = Symbols.MAMBA
"""Symbol of the layers that megatron's context gives live states."""
WITH_EXPERTS = Symbols.MOE
"""Symbol of the layers with experts."""
_NOT_IN_DYNAMIC_INFERENCE = Symbols.GDN


@dataclass
class RecurrentStateConfig(MambaInferenceStateConfig):
    """What megatron's context is told of a model's recurrent layers.

    Attributes:
        states: This package's description of them (`ModelStates`); None where the layers are all Mamba2, as megatron describes
            them.
    """

    states: Any = None


def as_subclass(config: RecurrentStateConfig, cls: Any) -> MambaInferenceStateConfig:
    """The same description as an object of ``cls``; a subclass by users gets the field ``states`` as well."""
    if isinstance(config, cls):
        return config
    return _with_states(cls)(**{field.name: getattr(config, field.name) for field in fields(config)})


@cache
def _with_states(cls: Any) -> Any:
    return make_dataclass(cls.__name__, [("states", Any, None)], bases=(cls,))


def decoder(model: Any) -> torch.nn.Module:
    """The decoder of a model on this pipeline stage; layers that draft are not in it."""
    return get_attr_wrapped_model(model, "decoder")


def process_groups(model: Any) -> Any:
    """Megatron's process groups of a model; None for a model without."""
    owner: HybridModel = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    return getattr(owner, "pg_collection", None)


def pattern_of_all_stages(model: Any) -> str | None:
    """Symbols of the layers of all pipeline stages; None for a ``HybridModel`` that does not have them."""
    stack: Any = decoder(model)
    if isinstance(stack, TransformerBlock):
        return _pattern_of_gpt(stack.config)
    if getattr(stack, "layer_type_list", None) is None:
        return ""
    owner: HybridModel = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    return getattr(owner, "hybrid_layer_pattern", None)


def _pattern_of_gpt(config: TransformerConfig) -> str:
    """Symbols of the layers of a ``GPTModel``: attention, or a Gated DeltaNet. The MLP or the experts of a layer have none."""
    if not is_linear_attention_variant(config.experimental_attention_variant):
        return Symbols.ATTENTION * config.num_layers
    return "".join(Symbols.GDN if linear else Symbols.ATTENTION for linear in get_linear_attention_pattern(config))


def has_latent_attention(model: Any) -> bool:
    """Whether the attention of a ``GPTModel`` is multi-latent."""
    stack = decoder(model)
    return isinstance(stack, TransformerBlock) and bool(stack.config.multi_latent_attention)


def decoder_layers(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """Symbol and module of each layer of a ``HybridModel``'s or ``GPTModel``'s decoder on this pipeline stage; none for others."""
    stack: Any = decoder(model)
    symbols = getattr(stack, "layer_type_list", None)
    if isinstance(stack, TransformerBlock):
        pattern = _pattern_of_gpt(stack.config)
        symbols = [pattern[layer.layer_number - 1] for layer in stack.layers]
    return [] if symbols is None else list(zip(symbols, stack.layers, strict=True))


def mixer_name(layer: Any) -> str:
    """Class of what is recurrent in a layer with a symbol for which `needs_a_kind`."""
    return type(getattr(layer, "mixer", None) or getattr(layer, "self_attention", layer)).__name__


def needs_a_kind(symbol: str) -> bool:
    """Whether a layer with this symbol is recurrent, so that megatron's engine can only run it by slots."""
    return symbol in (RECURRENT, _NOT_IN_DYNAMIC_INFERENCE)
