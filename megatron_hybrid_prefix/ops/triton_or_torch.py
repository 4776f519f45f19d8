"""Whether an operation runs its Triton kernel or its PyTorch reference, and what both need."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # a machine without Triton has no CUDA device, and calls no kernel
    triton = tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        """Keeps the function."""
        return jit if function is None else function

    class constexpr:  # type: ignore[no-redef]
        """Keeps the value."""

        def __init__(self, value: Any) -> None:
            self.value = value


__all__ = ["constexpr", "ids_on_device", "jit", "multiprocessors", "runs_kernel", "tl", "triton"]


_STAGED_IDS = 8192  # 64 KiB: so much pageable memory the driver reads at once, without waiting for the device


def ids_on_device(ids: Iterable[int], device: torch.device) -> torch.Tensor:
    """Ids for a kernel, (ids,) int64 on ``device``; does not synchronise with it."""
    numbers = array("q", ids)  # made and read in less than half the time of a list
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    tensor = torch.frombuffer(numbers, dtype=torch.int64)
    if device.type == "cuda" and len(numbers) > _STAGED_IDS:  # pinning takes the CPU longer than a small copy
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True on a GPU, and if Triton interprets kernels (``TRITON_INTERPRET=1``, which Triton reads, too)."""
    return tensor.is_cuda or (triton is not None and os.environ.get("TRITON_INTERPRET") == "1")


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors; 2 for Triton's interpreter, so that there is more than one."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
