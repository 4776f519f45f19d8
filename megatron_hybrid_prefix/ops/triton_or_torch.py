"""Whether an operation runs its Triton kernel or its PyTorch reference."""

from __future__ import annotations

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton has no CUDA device
    triton = tl = None

__all__ = ["runs_kernel", "tl", "triton"]


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True on a GPU, and if Triton interprets kernels (``TRITON_INTERPRET=1``, which Triton reads, too)."""
    return tensor.is_cuda or (triton is not None and os.environ.get("TRITON_INTERPRET") == "1")
