"""What `invariant_forward` puts on a model beside the layers of an engine: forwards of whole sequences, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_hybrid_prefix.layers.base import LayerKind, put_before
from megatron_hybrid_prefix.layers.components import OPEN_RINGS
from megatron_hybrid_prefix.layers.invariant import invariant_problem, use_invariant_layers
from megatron_hybrid_prefix.layers.kinds import recurrent_modules, use_slot_mixers
from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.layers.whole import Recomputed, WholeSequences, whole_sequences
from megatron_hybrid_prefix.upstream.invariant import DotProductAttention, HybridModel, SelfAttention
from megatron_hybrid_prefix.upstream.mixer import MambaMixer
from megatron_hybrid_prefix.upstream.overrides import lost_override


class WholeMamba(HybridPrefixMambaMixer):
    """Other kinds of recurrent layers derive from `SlotLayer`, which does so itself."""

    def forward(self, hidden_states: torch.Tensor, inference_context: Any = None, **kwargs: Any) -> Any:
        """A prefill, where the forward is a trainer's."""
        if (whole := whole_sequences(inference_context)) is None:
            return super().forward(hidden_states, inference_context, **kwargs)
        return whole.run(self, hidden_states, self._whole)

    def _whole(self, hidden_states: torch.Tensor, states: Mapping[str, torch.Tensor], step: PrefillStep) -> Any:
        return self.out_proj(self.prefill(self.in_proj(hidden_states)[0], step, states["conv"], states["ssm"]))


class WholeAttention(DotProductAttention):
    """Megatron's core attention; ``_owner`` is its `SelfAttention`."""

    _owner: Any

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """By an engine's function where the forward is a trainer's."""
        if (whole := whole_sequences(None)) is None:
            return super().forward(query, key, value, *args, **kwargs)
        return whole.attend(self._owner, query, key, value)


class WholeLayer:
    """Mixin before the class of a decoder's layer, of its last norm, and of the output layer: one function for autograd."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Without gradients as ever."""
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled() or whole_sequences(kwargs.get("inference_context")) is None:
            return forward(*args, **kwargs)
        layer: Any = self
        hidden_states, *others = args or (kwargs.pop("hidden_states"),)
        weights = [
            x for x in (*layer.parameters(), *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        return Recomputed.apply(lambda x, *_: forward(x, *others, **kwargs), hidden_states, *weights)  # type: ignore[no-untyped-call]


def whole_sequences_of(model: torch.nn.Module, block_tokens: int) -> WholeSequences:
    """Put the classes on a built model, in place; what an engine puts there, too.

    Raises:
        ValueError: The model is not covered.
    """
    found = invariant_problem(model) or _problem(model, block_tokens)
    if found is not None:
        raise ValueError(f"invariant_forward: {found}")
    use_slot_mixers(model)
    use_invariant_layers(model)
    hybrid, quanta, states = _hybrid(model), set(), {}
    device = next(hybrid.parameters()).device
    for kind, layer in recurrent_modules(model):
        if isinstance(layer, MambaMixer):
            put_before("Whole", WholeMamba, layer, last=True)
        quanta.add(kind.chunk_tokens(layer))
        parts = kind.components(layer, state_dtype=torch.float32, window_dtype=None)
        of_one = {each.name: ((1, *each.shape), getattr(torch, each.dtype)) for each in parts}
        states[id(layer)] = {n: torch.zeros(shape, dtype=dtype, device=device) for n, (shape, dtype) in of_one.items()}
    for attention in _attentions(model):
        put_before("Whole", WholeAttention, attention.core_attention)
        vars(attention.core_attention)["_owner"] = attention  # not as a part of it
    ends = getattr(hybrid.decoder, "final_norm", None), getattr(hybrid, "output_layer", None)  # of the last stage
    for layer in filter(None, (*hybrid.decoder.layers, *ends)):
        put_before("Whole", WholeLayer, layer)
    return WholeSequences(hybrid, quanta, states, block_tokens)


def _hybrid(model: torch.nn.Module) -> Any:
    return next(module for module in model.modules() if isinstance(module, HybridModel))


def _attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


def _problem(model: torch.nn.Module, block_tokens: int) -> str | None:
    """What an engine computes, and a trainer's forward would compute otherwise; in one line."""
    hybrid = _hybrid(model)
    if hybrid.config.mtp_num_layers:
        return "layers that predict drafts (mtp_num_layers) are not covered"
    if hybrid.config.recompute_granularity == "selective":
        return "recompute_granularity='selective': a backward recomputes whole layers; use None or 'full'"
    if any(hasattr(layer, "cudagraph_manager") for layer in hybrid.decoder.layers):
        return "layers are captured in CUDA graphs; build the model with cuda_graph_impl='none'"
    for kind, layer in recurrent_modules(model):
        if kind.name not in OPEN_RINGS and type(kind).open_ring is LayerKind.open_ring:
            return f"layers of kind {kind.name} have no decode with the bits of their prefill"
        if kind.whole_chunks and block_tokens % kind.chunk_tokens(layer):
            return f"block_size_tokens={block_tokens} is no multiple of {kind.chunk_tokens(layer).numerator}, the chunk of {kind.name}"
        if isinstance(layer, MambaMixer) and (lost := lost_override(layer, WholeMamba, extends=True)) is not None:
            return lost
    for core in (attention.core_attention for attention in _attentions(model)):
        lost = lost_override(core, WholeAttention) if isinstance(core, DotProductAttention) else "it is not covered"
        if lost is not None:
            return f"core attention {type(core).__name__}: {lost}"
    return None
