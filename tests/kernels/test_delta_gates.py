"""The gates of the delta rule and the gated norm of its heads, against float64; rows are strided, and beside them is NaN."""

import os

import pytest
import torch

from megatron_hybrid_prefix.ops.delta_gates import gated_head_norm, gates
from tests.kernels import rounding

NAN = float("nan")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
# The interpreter cuts bfloat16 off rather than rounding it.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def wide(seed, rows, width, dtype, device, scale=1.0):
    """(..., width), a slice of wider rows of NaN."""
    g = torch.Generator().manual_seed(seed)
    held = torch.full((*rows, width + 5), NAN, dtype=torch.float64)
    held[..., 2 : 2 + width] = scale * torch.randn(*rows, width, generator=g, dtype=torch.float64)
    return held.to(dtype).to(device)[..., 2 : 2 + width]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(0,), (1,), (19,), (3, 4)])
def test_gates(device, dtype, rows):
    heads = 6
    alpha, beta = (wide(seed, rows, heads, dtype, device, scale=12.0) for seed in (0, 1))
    g = torch.Generator().manual_seed(2)
    a_log, dt_bias = (torch.randn(heads, generator=g, dtype=torch.float64).to(dtype).to(device) for _ in range(2))
    log_decay, rate = gates(alpha, beta, a_log, dt_bias)
    assert log_decay.shape == rate.shape == alpha.shape and log_decay.is_contiguous() and rate.is_contiguous()
    assert log_decay.dtype == torch.float32 and rate.dtype == dtype
    argument = alpha.cpu().double() + dt_bias.cpu().double()
    scale = a_log.cpu().double().exp()
    expected = -scale * torch.nn.functional.softplus(argument, threshold=40)
    weighted = expected.abs() * (rounding.softplus_roundings(argument) + rounding.EXP + 2 + a_log.cpu().abs())
    rounding.check(log_decay.cpu(), expected, rounding.allowed(expected, weighted, torch.float32))
    expected = torch.sigmoid(beta.cpu().double())
    weighted = expected * (rounding.EXP + 2 + beta.cpu().double().abs())
    rounding.check(rate.cpu(), expected, rounding.allowed(expected, weighted, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), [((0,), 2, 8), ((1,), 3, 16), ((5,), 40, 64), ((2, 3), 4, 24)])
def test_gated_head_norm(device, dtype, rows, heads, size):
    g = torch.Generator().manual_seed(0)
    y = torch.randn(*rows, heads, size, generator=g, dtype=torch.float64).to(dtype).to(device)
    z = wide(1, rows, heads * size, dtype, device).unflatten(-1, (heads, size))
    weight = torch.randn(size, generator=g, dtype=torch.float64).to(dtype).to(device)
    out = gated_head_norm(y, z, weight, 1e-3)
    assert out.dtype == dtype and out.shape == (*rows, heads * size) and out.is_contiguous()
    exact = [x.cpu().double() for x in (y, z, weight)]
    expected = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-3) * exact[2]
    expected = (expected * torch.nn.functional.silu(exact[1])).flatten(-2)
    weighted = expected.abs() * (size + rounding.EXP + rounding.SILU + 4 + exact[1].abs().flatten(-2))
    rounding.check(out.cpu(), expected, rounding.allowed(expected, weighted, dtype))


@pytest.mark.parametrize("damage", ["alpha", "beta", "y", "z"])
def test_the_bounds_see_rounded_inputs(damage):
    """The tests above with one input rounded to bfloat16 fail."""
    kinds = {"alpha": 0, "beta": 1, "y": 0, "z": 1}

    def rounded(function):
        def call(*args):
            args = list(args)
            args[kinds[damage]] = args[kinds[damage]].bfloat16().to(args[0].dtype)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="times the bound"):
        if damage in ("alpha", "beta"):
            patch.setitem(globals(), "gates", rounded(gates))
            test_gates("cpu", torch.float32, (19,))
        else:
            patch.setitem(globals(), "gated_head_norm", rounded(gated_head_norm))
            test_gated_head_norm("cpu", torch.float32, (5,), 40, 64)
