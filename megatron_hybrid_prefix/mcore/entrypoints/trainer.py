"""`invariant_forward`: a trainer's forward gives the log-probs of an engine with ``exact="bits"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_hybrid_prefix.platform import replace_names

if TYPE_CHECKING:
    import torch

LogProbs = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


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
    from megatron_hybrid_prefix.layers.trainer import whole_sequences_of
    from megatron_hybrid_prefix.platform.patches import AUTOTUNERS

    whole = whole_sequences_of(model, block_size_tokens)
    replace_names(AUTOTUNERS)
    with whole.running():
        yield whole.log_probs
