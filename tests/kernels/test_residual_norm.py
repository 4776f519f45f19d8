"""The sum with the residual and its norm: bits of both apart, and the error of one rounding; as PyTorch and as a kernel."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.residual_norm import norm_of_sum
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED

# The interpreter cuts bfloat16 off rather than rounding it.
TYPES = [torch.float16, torch.float32, *([] if INTERPRETED else [torch.bfloat16])]


def in_order(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm, its squares added as PyTorch's threads do."""
    width = x.shape[-1]
    fours = torch.nn.functional.pad(x.float(), (0, -width % 512)).view(len(x), -(-width // 512), 128, 4)
    squares = torch.zeros(len(x), 128)
    for part in fours.unbind(1):
        for value in part.unbind(-1):
            squares += value * value
    squares = squares.view(-1, 4, 32)
    while squares.shape[2] > 1:
        squares = sum(squares.chunk(2, 2))
    squares = sum(sum(squares[..., 0].chunk(2, 1)).unbind(1))
    scale = 1 / torch.sqrt(squares / width + epsilon)
    return (weight.float() * (x.float() * scale[:, None])).to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (5, 12), (3, 2688), (2, 4096)])
@pytest.mark.parametrize("of_weight", [None, torch.float32])
def test_sum_and_norm(rows, width, of_weight, dtype, device):
    generator = torch.Generator().manual_seed(width)
    multiplier = 0.22 if device == "cuda" else 0.25  # PyTorch on a CPU, and the interpreter, round the product
    x, residual, weight = ((1 + torch.randn(n, width, generator=generator)).to(device, dtype) for n in (rows, rows, 1))
    weight, apart = weight[0].to(of_weight or dtype), torch.add(residual, x, alpha=multiplier)
    given = x.clone(), residual, weight
    out = norm_of_sum(*given, 1e-3, multiplier)
    assert torch.equal(given[0], apart) and out.dtype == dtype
    if device == "cuda" and of_weight in (None, dtype):
        assert torch.equal(out, torch.nn.functional.rms_norm(apart, (width,), weight, 1e-3))
    out, apart, weight = out.cpu(), apart.cpu(), weight.cpu()
    exact = naive.gated_rms_norm(apart.double(), weight.double(), None, 1e-3, width, True)
    bound = rounding.allowed(exact, rounding.gated_norm(exact, width), dtype)
    rounding.check(out, exact, bound)
    if INTERPRETED and dtype is torch.float16:  # whose squares are float32 numbers
        assert torch.equal(out, in_order(apart, weight, 1e-3))
        wide = in_order(residual.float() + multiplier * x.float(), weight, 1e-3).half()
        assert not rows or not torch.equal(out, wide), "the norm is of the rounded sum"
