"""Gated RMS norm against loops, its gradient, and the activations it is built from."""

import pytest
import torch

from megatron_hybrid_prefix.ops.elementwise import silu, softplus
from megatron_hybrid_prefix.platform.kernels import norm
from megatron_hybrid_prefix.platform.kernels.norm import rmsnorm_fn
from tests.kernels import naive, rounding


def make(seed, dtype=torch.float64, gate=True, bias=False):
    """Returns (x, weight, bias, z) with x (2, 3, 12)."""
    g = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(2, 3, 12, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    weight, b = (torch.randn(12, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, weight, b if bias else None, z if gate else None


@pytest.mark.parametrize("group_size", [None, 4, 6])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_matches_the_loops(group_size, norm_before_gate, gate, bias):
    x, weight, b, z = make(0, gate=gate, bias=bias)
    out = rmsnorm_fn(x, weight, b, z, 1e-3, group_size, norm_before_gate)
    flat_z = None if z is None else z.reshape(-1, 12)
    expected = naive.gated_rms_norm(x.reshape(-1, 12), weight, b, flat_z, 1e-3, group_size or 12, norm_before_gate)
    torch.testing.assert_close(out, expected.view(2, 3, 12), rtol=1e-12, atol=1e-12)


def check_rounding(dtype, seed):
    """Raises AssertionError if the norm exceeds its rounding bound."""
    x, weight, _, z = make(seed, dtype)
    out = rmsnorm_fn(x, weight, None, z, 1e-5, 4, False)
    assert out.dtype == dtype
    rows, gate = (t.reshape(-1, 12).double() for t in (x, z))
    exact = naive.gated_rms_norm(rows, weight.double(), None, gate, 1e-5, 4, False)
    bound = rounding.allowed(exact, rounding.gated_norm(exact, group_size=4), dtype)
    rounding.check(out.reshape(-1, 12), exact, bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mutant", [None, "in_bfloat16", "a_dropped_gate"])
def test_the_error_is_that_of_the_precision_and_mutants_are_seen(monkeypatch, mutant, dtype):
    if mutant == "in_bfloat16":
        monkeypatch.setattr(norm, "compute_dtype", lambda tensor: torch.bfloat16)
    elif mutant == "a_dropped_gate":
        monkeypatch.setattr(norm, "silu", torch.ones_like)
    for seed in range(8):
        with rounding.only(mutant):
            check_rounding(dtype, seed)


def test_gradients_flow():
    x, weight, b, z = (t.requires_grad_() for t in make(2, bias=True))
    assert torch.autograd.gradcheck(lambda *a: rmsnorm_fn(a[0], a[1], a[2], a[3], 1e-3, 4, False), (x, weight, b, z))


def test_wrong_shapes():
    x, weight, _, z = make(0)
    with pytest.raises(ValueError, match="does not divide"):
        rmsnorm_fn(x, weight, None, group_size=5)
    with pytest.raises(ValueError, match="z has shape"):
        rmsnorm_fn(x, weight, None, z[:1])


@pytest.mark.parametrize("function", [silu, softplus, lambda x: rmsnorm_fn(x.view(-1, 1), torch.ones(1), None)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_place_of_an_element_does_not_change_its_bits(function, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(70001, generator=torch.Generator().manual_seed(0)) * 5
        whole = function(x)
        for first, last in ((1, 6), (3, 20), (17, 40000), (69990, 70001)):
            assert torch.equal(function(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_softplus_is_accurate_far_out():
    x = torch.linspace(-100, 200, 3001)  # exp overflows float32 at 89
    exact = torch.tensor([naive.softplus(v) for v in x.tolist()], dtype=torch.float64)
    rounding.check(softplus(x).double(), exact, rounding.allowed(exact, rounding.SOFTPLUS * exact, torch.float32))


def test_silu_far_out():
    x = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])
    assert torch.equal(silu(x), torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0]))
