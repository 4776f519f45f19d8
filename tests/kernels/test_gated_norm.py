"""The gated norm of a GPU against loops; runs on a GPU, and in Triton's interpreter (`test_interpreted.py`)."""

import os

import pytest
import torch

from megatron_hybrid_prefix.platform.gated_norm import GatedRMSNorm
from tests.kernels import naive, rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


def make(seed, rows, dim, dtype, row_stride=None):
    """Returns (x, weight, z); z is a slice of wider rows, as the mixer's is."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, (row_stride or dim) + 3, generator=g, dtype=torch.float64).to(dtype).to(DEVICE)
    x, weight = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((rows, dim), (dim,)))
    return x.to(DEVICE), weight.to(DEVICE), wide[:, 3 : 3 + dim]


def exact(x, weight, z, *rest):
    """In float64, by loops."""
    x, weight, z = (None if t is None else t.double().cpu() for t in (x, weight, z))
    return naive.gated_rms_norm(x, weight, None, z, *rest)


@runs_triton
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("dim", "group_size"), [(12, 12), (12, 4), (40, 20), (96, 96)])
def test_matches_the_loops(dim, group_size, gate, norm_before_gate, monkeypatch):
    from megatron_hybrid_prefix.platform.kernels import norm_triton

    monkeypatch.setattr(norm_triton, "_MOST_FEATURES", 32)  # groups of 96 are walked in three parts
    x, weight, z = make(0, 5, dim, torch.float32, row_stride=2 * dim)
    z = z if gate else None
    out = norm_triton.gated_rms_norm(x, weight, z, 1e-3, group_size, norm_before_gate)
    expected = exact(x, weight, z, 1e-3, group_size, norm_before_gate)
    rounding.check(out.cpu(), expected, rounding.allowed(expected, rounding.gated_norm(expected, group_size), x.dtype))


@runs_triton
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        # The interpreter cuts bfloat16 off rather than rounding it.
        pytest.param(torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")),
    ],
)
def test_low_precision_is_rounded_once(dtype, seed):
    from megatron_hybrid_prefix.platform.kernels.norm_triton import gated_rms_norm

    x, weight, z = make(seed, 7, 64, dtype)
    out = gated_rms_norm(x, weight, z, 1e-5, 32, False)
    expected = exact(x, weight, z, 1e-5, 32, False)
    assert out.dtype == dtype
    # Half a unit in the last place of the result, and float32's errors before it.
    torch.testing.assert_close(out.double().cpu(), expected, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-6)


@runs_triton
def test_no_rows_and_more_dimensions():
    from megatron_hybrid_prefix.platform.kernels.norm_triton import gated_rms_norm

    x, weight, z = make(1, 6, 16, torch.float32)
    assert gated_rms_norm(x[:0], weight, z[:0], 1e-5, 16, True).shape == (0, 16)
    flat = gated_rms_norm(x, weight, z, 1e-5, 16, True)
    assert torch.equal(gated_rms_norm(x.view(3, 2, 16), weight, z.view(3, 2, 16), 1e-5, 16, True), flat.view(3, 2, 16))


@pytest.mark.parametrize("group_size", [None, 4])
def test_the_module_is_the_function(group_size):
    x, weight, z = make(2, 5, 12, torch.float64)
    norm = GatedRMSNorm(12, eps=1e-3, group_size=group_size, norm_before_gate=False, device=DEVICE, dtype=torch.float64)
    assert [name for name, _ in norm.named_parameters()] == ["weight"] and norm.bias is None
    norm.weight.data = weight
    expected = exact(x, weight, z, 1e-3, group_size or 12, False)
    torch.testing.assert_close(norm(x, z).detach().cpu(), expected, rtol=1e-12, atol=1e-12)
    norm(x, z).sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.abs().min() > 0


@pytest.mark.gpu(gib=1)
@pytest.mark.parametrize("shape", [(5, 1, 2048), (7, 4, 256), (0, 64)])
def test_a_norm_with_a_float32_weight_is_rounded_once(shape, monkeypatch):
    from megatron_hybrid_prefix.models.norms import Float32RMSNorm
    from megatron_hybrid_prefix.platform.kernels import norm_triton

    x, weight, _ = make(4, shape[0] * shape[1], shape[-1], torch.bfloat16)
    x = x.cuda()[: torch.Size(shape).numel() // shape[-1]].view(shape)
    norm = Float32RMSNorm(shape[-1], eps=1e-6, device="cuda")
    norm.weight.data = 1 + weight.cuda().float() / 7
    kernel, calls = norm_triton.gated_rms_norm, []
    monkeypatch.setattr(norm_triton, "gated_rms_norm", lambda *args: calls.append(1) or kernel(*args))
    with torch.inference_mode():
        out = norm(x)
    assert len(calls) == 1 and out.dtype == torch.bfloat16
    expected = torch.nn.functional.rms_norm(x.double(), shape[-1:], norm.weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8 * 1.01, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(norm(x.float()), torch.nn.functional.rms_norm(x.float(), shape[-1:], norm.weight, 1e-6))
    assert len(calls) == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_the_module_takes_the_kernel_without_gradients(monkeypatch):
    from megatron_hybrid_prefix.platform.kernels import norm_triton

    x, weight, z = make(3, 5, 64, torch.bfloat16)
    norm = GatedRMSNorm(64, group_size=32, device=DEVICE, dtype=torch.bfloat16)
    norm.weight.data = weight
    kernel, calls = norm_triton.gated_rms_norm, []
    monkeypatch.setattr(norm_triton, "gated_rms_norm", lambda *args: calls.append(1) or kernel(*args))
    with torch.no_grad():
        fast = norm(x, z)
    assert len(calls) == 1
    torch.testing.assert_close(fast, norm(x, z).detach(), rtol=2.0**-7, atol=1e-6)
    assert len(calls) == 1
