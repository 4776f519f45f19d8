"""`invariant_forward`: a trainer's forward gives the log-probs of an engine with ``exact="bits"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_hybrid_prefix.layers.base import put_before
from megatron_hybrid_prefix.layers.invariant import invariant_problem, use_invariant_layers
from megatron_hybrid_prefix.layers.kinds import recurrent_modules, use_slot_mixers
from megatron_hybrid_prefix.layers.whole import WholeAttention, WholeLayer, WholeSequences
from megatron_hybrid_prefix.platform import replace_names
from megatron_hybrid_prefix.platform.patches import AUTOTUNERS
from megatron_hybrid_prefix.upstream.invariant import DotProductAttention, HybridModel, SelfAttention
from megatron_hybrid_prefix.upstream.overrides import lost_override

LogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def invariant_forward(model: torch.nn.Module, *, block_size_tokens: int = 256) -> Iterator[LogProbs]:
    """Inside, a plain forward of the model has the bits of an engine with ``exact="bits"``, with gradients or without.

        with invariant_forward(model) as log_probs:
            logits = model(tokens, position_ids, None)
            found = log_probs(logits, tokens)  # (batch, seq - 1)

    A forward has neither an inference context nor labels; its sequences are right-padded. The gradient of a layer is that of megatron's
    ordinary forward at the same inputs: a backward computes it again.

    Args:
        model: A ``HybridModel`` of megatron-core's own layers, or a wrapper of one. Its layers change as those of an engine's model.
        block_size_tokens: The engine's. A scan's chunks end at multiples of it.

    Yields:
        `WholeSequences.log_probs`: of logits and tokens, each token's log-prob.

    Raises:
        ValueError: The model, this machine, or a forward's arguments are not covered.
    """
    found = invariant_problem(model) or _problem_of_training(model, block_size_tokens)
    if found is not None:
        raise ValueError(f"invariant_forward: {found}")
    use_slot_mixers(model)
    use_invariant_layers(model)
    hybrid = _hybrid(model)
    for part in (*hybrid.decoder.layers, getattr(hybrid.decoder, "final_norm", None), getattr(hybrid, "output_layer", None)):
        if part is not None:
            put_before("Whole", WholeLayer, part)
    for attention in _attentions(model):
        put_before("Whole", WholeAttention, attention.core_attention)
        vars(attention.core_attention)["_owner"] = attention  # not as a part of it
    replace_names(AUTOTUNERS)
    fields = {"state_dtype": torch.float32, "window_dtype": None}
    layers = ((each, kind.chunk_tokens(each), kind.components(each, **fields)) for kind, each in recurrent_modules(model))
    whole = WholeSequences(hybrid, layers, block_size_tokens)
    with whole.running():
        yield whole.log_probs


def _hybrid(model: torch.nn.Module) -> Any:
    return next(module for module in model.modules() if isinstance(module, HybridModel))


def _attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


def _problem_of_training(model: torch.nn.Module, block_tokens: int) -> str | None:
    """What an engine computes, and a trainer's forward would compute otherwise, or without a gradient; in one line."""
    hybrid = _hybrid(model)
    if hybrid.config.mtp_num_layers:
        return "layers that predict drafts (mtp_num_layers) are not covered"
    if any(hasattr(layer, "cudagraph_manager") for layer in hybrid.decoder.layers):
        return "layers are captured in CUDA graphs; build the model with cuda_graph_impl='none', or with graphs of blocks"
    for kind, layer in recurrent_modules(model):
        if kind.whole_chunks and block_tokens % kind.chunk_tokens(layer):
            return f"block_size_tokens={block_tokens} is no multiple of {kind.chunk_tokens(layer)}, as {kind.name} needs it"
    for attention in _attentions(model):
        core = attention.core_attention
        lost = lost_override(core, WholeAttention) if isinstance(core, DotProductAttention) else "it is not covered"
        if lost is not None:
            return f"core attention {type(core).__name__}: {lost}"
    return None
