"""The gated norm of Mamba2 and of heads: against loops in float64, as PyTorch and as a kernel (`test_interpreted.py`, or on a GPU)."""

import pytest
import torch

from megatron_hybrid_prefix.ops import gated_norm
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.platform.gated_norm import GatedRMSNorm
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED

# The interpreter cuts bfloat16 off rather than rounding it.
TYPES = [torch.float32, *([] if INTERPRETED else [torch.bfloat16])]


def make(seed, rows, dim, dtype, weights=None):
    """(x, weight, z); z is a slice of wider rows of NaN, as a mixer's is."""
    generator = torch.Generator().manual_seed(seed)
    x, z, weight = (
        torch.randn(*shape, generator=generator) for shape in ((*rows, dim), (*rows, dim), (weights or dim,))
    )
    wide = torch.cat([torch.full((*rows, 3), float("nan")), z, x], -1).to(dtype)
    return x.to(dtype), weight.to(dtype), wide[..., 3 : 3 + dim]


def check(seed, rows, dim, dtype, group_size, gate=True, norm_before_gate=False, shared=False, device="cpu"):
    """Raises AssertionError if an element exceeds its rounding bound."""
    x, weight, z = make(seed, rows, dim, dtype, group_size if shared else dim)
    z = z if gate else None
    args = [None if each is None else each.to(device) for each in (x, weight, z)]
    with torch.no_grad():
        out = gated_rms_norm(*args, 1e-3, group_size, norm_before_gate).cpu()
    assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
    wide = [None if each is None else each.double().reshape(-1, dim) for each in (x, z)]
    weight = weight.double().repeat(dim // len(weight))
    exact = naive.gated_rms_norm(wide[0], weight, wide[1], 1e-3, group_size, norm_before_gate)
    bound = rounding.allowed(exact, rounding.gated_norm(exact, group_size), dtype)
    rounding.check(out.reshape(-1, dim), exact, bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("gate", "norm_before_gate"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("rows", "dim", "group_size"), [((5,), 12, 12), ((2, 3), 12, 4), ((5,), 40, 20), ((5,), 96, 96), ((0,), 8, 8)]
)
def test_matches_the_loops(rows, dim, group_size, gate, norm_before_gate, dtype, device, monkeypatch):
    monkeypatch.setattr(gated_norm, "_MOST_FEATURES", 32)  # groups of 96 are walked in three parts
    check(0, rows, dim, dtype, group_size, gate, norm_before_gate, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), [((0,), 2, 8), ((1,), 3, 16), ((5,), 40, 64), ((2, 3), 4, 24)])
def test_of_heads_with_one_weight(rows, heads, size, dtype, device):
    check(0, rows, heads * size, dtype, size, norm_before_gate=True, shared=True, device=device)


@pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mutant", [None, "in_bfloat16", "a_dropped_gate"])
def test_the_error_is_that_of_the_precision_and_mutants_are_seen(monkeypatch, mutant, dtype):
    if mutant == "in_bfloat16":
        monkeypatch.setattr(gated_norm, "compute_dtype", lambda tensor: torch.bfloat16)
    elif mutant == "a_dropped_gate":
        monkeypatch.setattr(gated_norm, "silu", torch.ones_like)
    for seed in range(8):
        with rounding.only(mutant):
            check(seed, (2, 3), 12, dtype, 4)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gradients(norm_before_gate):
    given = [each.detach().requires_grad_() for each in make(2, (2, 3), 12, torch.float64)]
    assert torch.autograd.gradcheck(lambda *each: gated_rms_norm(*each, 1e-3, 4, norm_before_gate), given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_size", [None, 4])
def test_the_module_is_the_function_and_trains(group_size, device):
    x, weight, z = (each.to(device) for each in make(2, (5,), 12, torch.float32))
    norm = GatedRMSNorm(12, eps=1e-3, group_size=group_size, norm_before_gate=False, device=device)
    assert [name for name, _ in norm.named_parameters()] == ["weight"] and norm.bias is None
    norm.weight.data = weight
    with torch.no_grad():
        expected = gated_rms_norm(x, weight, z, 1e-3, group_size or 12, False)
    torch.testing.assert_close(norm(x, z).detach(), expected)
    norm(x, z).sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.abs().min() > 0


@pytest.mark.gpu(gib=1)
@pytest.mark.parametrize("shape", [(5, 1, 2048), (7, 4, 256), (0, 64)])
def test_a_norm_with_a_float32_weight_is_rounded_once(shape, monkeypatch):
    from megatron_hybrid_prefix.models import norms

    x, weight, _ = make(4, shape[:-1], shape[-1], torch.bfloat16)
    x, norm, calls = x.cuda(), norms.Float32RMSNorm(shape[-1], eps=1e-6, device="cuda"), []
    norm.weight.data = 1 + weight.cuda().float() / 7
    monkeypatch.setattr(norms, "gated_rms_norm", lambda *args: calls.append(1) or gated_rms_norm(*args))
    with torch.inference_mode():
        out = norm(x)
    assert len(calls) == 1 and out.dtype == torch.bfloat16
    expected = torch.nn.functional.rms_norm(x.double(), shape[-1:], norm.weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8 * 1.01, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(norm(x.float()), torch.nn.functional.rms_norm(x.float(), shape[-1:], norm.weight, 1e-6))
    assert len(calls) == 1
