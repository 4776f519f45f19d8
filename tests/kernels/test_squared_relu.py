"""The squared ReLU has the bits of PyTorch's two operations."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_hybrid_prefix.ops.elementwise import squared_relu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
# The interpreter cuts bfloat16 off rather than rounding it.
TYPES = [torch.float16, torch.float32, *([] if os.environ.get("TRITON_INTERPRET") == "1" else [torch.bfloat16])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_are_those_of_pytorch(device, dtype):
    """Each value of 16 bits, NaN and infinities included; of 32 bits as many."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    x = (bits << 16 | 0x5A5A).view(torch.float32) if dtype is torch.float32 else bits.to(torch.int16).view(dtype)
    x = x.to(device)
    right = torch.pow(torch.relu(x), 2)
    assert torch.equal(squared_relu(x).isnan(), right.isnan())
    assert torch.equal(squared_relu(x).nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1, 2049), (5, 7)])
def test_any_shape(device, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    for given in (x, x.mT, x[1:]):
        out = squared_relu(given)
        assert out.shape == given.shape and torch.equal(out, given.clamp(min=0) ** 2)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    x = torch.tensor([-1.0, 0.0, 3.0], device=device, requires_grad=True)
    squared_relu(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 6.0]
