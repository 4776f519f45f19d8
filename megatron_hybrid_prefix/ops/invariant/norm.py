"""RMS norm of rows that do not depend on each other."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise by the root mean square of the last dimension.

    Args:
        x: (..., size), floating.
        weight: (size,), floating, x's dtype on a CPU.
        epsilon: Added to the mean square.

    Returns:
        Shape and dtype of x.
    """
    if x.is_cuda:
        from megatron_hybrid_prefix.ops.invariant.norm_triton import rms_norm as on_gpu

        return on_gpu(x, weight, epsilon)
    # PyTorch sums each row by itself on a CPU; tests/kernels/test_invariant.py shows it.
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
