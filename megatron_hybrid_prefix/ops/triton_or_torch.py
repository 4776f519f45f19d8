"""Whether an operation runs its Triton kernel or its PyTorch reference."""

from __future__ import annotations

import os
from functools import cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton has no CUDA device
    triton = tl = None

__all__ = ["multiprocessors", "runs_kernel", "tl", "triton"]


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True on a GPU, and if Triton interprets kernels (``TRITON_INTERPRET=1``, which Triton reads, too)."""
    return tensor.is_cuda or (triton is not None and os.environ.get("TRITON_INTERPRET") == "1")


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors; 2 for Triton's interpreter, so that there is more than one."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
