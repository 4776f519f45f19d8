"""Activations: SwiGLU is as near to float64 as PyTorch's operations are, the squared ReLU has their bits, and no place changes bits."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.elementwise import silu, softplus, squared_relu, swiglu
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED

# The interpreter cuts bfloat16 off rather than rounding it.
TYPES = [torch.float16, torch.float32, *([] if INTERPRETED else [torch.bfloat16])]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


PLAIN = {swiglu: plain_swiglu, squared_relu: lambda x: x.clamp(min=0) ** 2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_error_of_swiglu_is_at_most_twice_that_of_pytorch(device, dtype):
    x = values(7, 2 * 2049, dtype=dtype).to(device)
    right = plain_swiglu(x.double())
    gate, up = x.chunk(2, dim=-1)
    pytorch = (torch.nn.functional.silu(gate) * up - right).abs().max()
    assert (swiglu(x) - right).abs().max() <= 2 * pytorch
    assert swiglu(x).dtype == dtype
    assert (plain_swiglu(x.roll(1, -1)) - right).abs().max() > 2 * pytorch, "the bound sees a wrong column"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_of_an_element_of_swiglu_do_not_depend_on_the_others(device, dtype):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("PyTorch rounds tails differently; see `silu`")
    x = values(5, 2 * 2100, dtype=dtype).to(device)
    gate, up = x.chunk(2, dim=-1)
    parts = [swiglu(torch.cat([gate[:, at : at + 7], up[:, at : at + 7]], -1)) for at in range(0, 2100, 7)]
    assert torch.equal(torch.cat(parts, -1), swiglu(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_of_the_squared_relu_are_those_of_pytorch(device, dtype):
    """Each value of 16 bits, NaN and infinities included; of 32 bits as many."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    x = (bits << 16 | 0x5A5A).view(torch.float32) if dtype is torch.float32 else bits.to(torch.int16).view(dtype)
    x = x.to(device)
    right = torch.pow(torch.relu(x), 2)
    assert torch.equal(squared_relu(x).isnan(), right.isnan())
    assert torch.equal(squared_relu(x).nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1, 2 * 2049), (5, 6)])
@pytest.mark.parametrize("function", PLAIN)
def test_any_shape(function, shape, device):
    x = values(*shape).to(device)
    for given in (x, x[1:], x.flip(-1).mT.contiguous().mT, torch.cat([x, x], -1)[..., : shape[-1]]):
        torch.testing.assert_close(function(given), PLAIN[function](given))


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_and_nan(device):
    inf = float("inf")
    gate = torch.tensor([-inf, -100.0, inf, float("nan"), 1.0], device=device)
    out = swiglu(torch.cat([gate, torch.full_like(gate, 2.0)]))
    assert out[0].isnan() and out[1] == 0 and out[2] == inf and out[3].isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", PLAIN)
def test_gradients(function, device):
    x = values(2, 6).to(device).requires_grad_()
    function(x).sum().backward()
    ours, x.grad = x.grad, None
    PLAIN[function](x).sum().backward()
    torch.testing.assert_close(ours, x.grad)


@pytest.mark.skipif(INTERPRETED, reason="of PyTorch's operations")
@pytest.mark.parametrize(
    "function", [silu, softplus, lambda x: gated_rms_norm(x.view(-1, 1), torch.ones(1), None, 1e-6, 1, True)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_place_of_an_element_does_not_change_its_bits(function, threads, request):
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    x = torch.randn(70001, generator=torch.Generator().manual_seed(0)) * 5
    whole = function(x)
    for first, last in ((1, 6), (3, 20), (17, 40000), (69990, 70001)):
        assert torch.equal(function(x[first:last]), whole[first:last])


def test_far_out():
    x = torch.linspace(-100, 200, 3001)  # exp overflows float32 at 89
    exact = torch.tensor([naive.softplus(v) for v in x.tolist()], dtype=torch.float64)
    rounding.check(softplus(x).double(), exact, rounding.allowed(exact, rounding.SOFTPLUS * exact, torch.float32))
    x = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])
    assert torch.equal(silu(x), torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0]))
