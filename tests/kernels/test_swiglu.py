"""SwiGLU is as near to float64 as PyTorch's operations are, and an element depends on its gate and its up alone."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_hybrid_prefix.ops.elementwise import swiglu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
# The interpreter cuts bfloat16 off rather than rounding it.
TYPES = [torch.float16, torch.float32, *([] if os.environ.get("TRITON_INTERPRET") == "1" else [torch.bfloat16])]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_error_is_at_most_twice_that_of_pytorch(device, dtype):
    x = values(7, 2 * 2049, dtype=dtype).to(device)
    right = plain(x.double())
    gate, up = x.chunk(2, dim=-1)
    pytorch = (torch.nn.functional.silu(gate) * up - right).abs().max()
    assert (swiglu(x) - right).abs().max() <= 2 * pytorch
    assert swiglu(x).dtype == dtype
    assert (plain(x.roll(1, -1)) - right).abs().max() > 2 * pytorch, "the bound sees a wrong column"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_of_an_element_do_not_depend_on_the_others(device, dtype):
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("PyTorch rounds tails differently; see `silu`")
    x = values(5, 2 * 2100, dtype=dtype).to(device)
    gate, up = x.chunk(2, dim=-1)
    parts = [swiglu(torch.cat([gate[:, at : at + 7], up[:, at : at + 7]], -1)) for at in range(0, 2100, 7)]
    assert torch.equal(torch.cat(parts, -1), swiglu(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1, 2 * 2049), (5, 6)])
def test_any_shape(device, shape):
    x = values(*shape).to(device)
    for given in (x, x[1:], torch.cat([x, x], -1)[..., : shape[-1]]):
        torch.testing.assert_close(swiglu(given), plain(given))


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_and_nan(device):
    inf = float("inf")
    gate = torch.tensor([-inf, -100.0, inf, float("nan"), 1.0], device=device)
    out = swiglu(torch.cat([gate, torch.full_like(gate, 2.0)]))
    assert out[0].isnan() and out[1] == 0 and out[2] == inf and out[3].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    x = values(2, 6).to(device).requires_grad_()
    swiglu(x).sum().backward()
    ours, x.grad = x.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(ours, x.grad)
