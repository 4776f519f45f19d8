"""`invariant_forward`: a trainer's forward gives the log-probs of an engine with ``exact="bits"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_hybrid_prefix.platform import replace_names


@contextmanager
def invariant_forward(
    model: torch.nn.Module, *, block_size_tokens: int = 256
) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Inside, a plain forward of the model has the bits of an engine with ``exact="bits"``, with gradients or without.

    It has neither an inference context nor labels; its sequences are right-padded. A layer's gradient is that of megatron's
    ordinary forward at the same inputs, which a backward computes again.

    Args:
        model: A ``HybridModel`` of megatron-core's own layers, or a wrapper of one. Its layers change as those of an engine's model.
        block_size_tokens: The engine's. A scan's chunks end at multiples of it.

    Yields:
        A function of logits and tokens that gives each token's log-prob: `WholeSequences.log_probs`.

    Raises:
        ValueError: The model, this machine, or a forward's arguments are not covered.
    """
    from megatron_hybrid_prefix.layers.trainer import whole_sequences_of
    from megatron_hybrid_prefix.platform.patches import AUTOTUNERS

    whole = whole_sequences_of(model, block_size_tokens)
    replace_names(AUTOTUNERS)
    with whole.running():
        yield whole.log_probs
