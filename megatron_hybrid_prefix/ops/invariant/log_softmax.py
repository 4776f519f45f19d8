"""Log-probs of rows that do not depend on each other."""

from __future__ import annotations

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax over the last dimension.

    Args:
        logits: (rows, vocabulary), floating.

    Returns:
        (rows, vocabulary) float32.
    """
    if logits.is_cuda:
        from megatron_hybrid_prefix.ops.invariant.log_softmax_triton import log_softmax as on_gpu

        return on_gpu(logits)
    # PyTorch sums each row by itself on a CPU; tests/kernels/test_invariant.py shows it.
    return torch.log_softmax(logits.float(), dim=-1)
