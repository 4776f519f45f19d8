"""The gates of the delta rule, against float64; rows are strided, and beside them is NaN."""

import pytest
import torch

from megatron_hybrid_prefix.ops.delta_gates import gates
from tests.kernels import rounding
from tests.kernels.places import DEVICES, INTERPRETED, NAN

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
@pytest.mark.parametrize("width", [6, 18])
def test_gates(device, dtype, rows, width):
    heads = 6
    alpha, beta = (wide(seed, rows, size, dtype, device, scale=12.0) for seed, size in ((0, heads), (1, width)))
    g = torch.Generator().manual_seed(2)
    a_log, dt_bias = (torch.randn(heads, generator=g, dtype=torch.float64).to(dtype).to(device) for _ in range(2))
    log_decay, rate = gates(alpha, beta, a_log, dt_bias)
    assert (
        log_decay.shape == alpha.shape
        and rate.shape == beta.shape
        and log_decay.is_contiguous()
        and rate.is_contiguous()
    )
    assert log_decay.dtype == torch.float32 and rate.dtype == dtype
    argument = alpha.cpu().double() + dt_bias.cpu().double()
    scale = a_log.cpu().double().exp()
    expected = -scale * torch.nn.functional.softplus(argument, threshold=40)
    weighted = expected.abs() * (rounding.softplus_roundings(argument) + rounding.EXP + 2 + a_log.cpu().abs())
    rounding.check(log_decay.cpu(), expected, rounding.allowed(expected, weighted, torch.float32))
    expected = torch.sigmoid(beta.cpu().double())
    weighted = expected * (rounding.EXP + 2 + beta.cpu().double().abs())
    rounding.check(rate.cpu(), expected, rounding.allowed(expected, weighted, dtype))
    again, twice = gates(alpha, beta, a_log, dt_bias, scale=2.0)
    assert torch.equal(again, log_decay) and torch.equal(twice, 2 * rate)


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_bounds_see_rounded_inputs(damaged):
    """The test above with alpha or beta rounded to bfloat16 fails."""

    def rounded(*args, right=gates):
        return right(*(each.bfloat16().to(each.dtype) if at == damaged else each for at, each in enumerate(args)))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="times the bound"):
        patch.setitem(globals(), "gates", rounded)
        test_gates("cpu", torch.float32, (19,), 6)
