"""What ``exact="bits"`` asks of a GPU, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.layers.invariant_cuda import cuda_problem


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "family", "problem"),
    [
        (torch.bfloat16, 128, (9, 0), "FA4", None),
        (torch.float32, 12, (9, 0), None, None),
        (torch.float32, 12, (8, 0), None, "Hopper GPUs only, this GPU has capability 8"),
        (torch.bfloat16, 128, (10, 0), "FA4", "Hopper GPUs only, this GPU has capability 10"),
        (torch.bfloat16, 128, (9, 0), None, "needs FlashAttention 4, this machine has none"),
        (torch.bfloat16, 128, (9, 0), "FA3", "needs FlashAttention 4, this machine has FA3"),
        (torch.bfloat16, 72, (9, 0), "FA4", "heads of 72 channels"),
    ],
)
def test_what_is_refused_on_a_gpu(dtype, size, capability, family, problem, platform, monkeypatch):
    from megatron_hybrid_prefix.upstream import packages

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(packages, "attention_family", lambda: family)
    found = cuda_problem(SimpleNamespace(config=SimpleNamespace(params_dtype=dtype, kv_channels=size)))
    assert found is None if problem is None else problem in found and "\n" not in found
