"""Experts of few tokens: against float64, each token alone, weights of other experts; compiled for a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops import experts
from tests.kernels import rounding
from tests.kernels.compiled import compiled
from tests.kernels.places import INTERPRETED, NAN

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu(gib=1)),
]
EXPERTS, TOP_K, HIDDEN, WIDTH = 11, 3, 88, 72


def made(tokens, device, favourite=None, parts=1):
    """Inputs of `experts_of_few`; an expert that no token goes to has NaN for weights."""
    generator = torch.Generator().manual_seed(tokens)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the interpreter knows no bfloat16
    x, up, down = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((tokens, HIDDEN), (EXPERTS, parts * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    )
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if favourite is not None:
        scores[:, favourite] = 1
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    up[~chosen.any(0)] = down[~chosen.any(0)] = NAN
    return x, chosen.to(device), (scores * chosen).to(device), up, down, TOP_K


def reference(x, chosen, probs, up, down, _):
    """Outputs in float64, expert by expert, and their weighted conditions (see `rounding`)."""
    rounded = 1 + rounding.unit_roundoff(x.dtype) / rounding.unit_roundoff(torch.float32)
    output, condition = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    for expert in chosen.any(0).nonzero().flatten().tolist():
        tokens = chosen[:, expert]
        rows, first, second = x[tokens].double(), up[expert].double().T, down[expert].double().T
        inner, prob = rows @ first, probs[tokens, expert, None].double()
        off = (rows.abs() @ first.abs()) * (len(first) + 1)
        if len(second) < first.shape[1]:
            (gate, inner), (gate_off, up_off) = inner.chunk(2, 1), off.chunk(2, 1)
            silu = gate * gate.sigmoid()  # nowhere steeper than 1.1
            off = inner.abs() * (1.1 * gate_off + rounding.SILU * silu.abs()) + silu.abs() * up_off
            inner = silu * inner
        else:
            inner = inner.relu()
            inner, off = inner.square(), 2 * inner * off + inner.square()
        off, inner = off + inner.abs(), inner * prob
        output[tokens] += inner @ second
        condition[tokens] += (off * prob + inner.abs() * (len(second) + 1 + 2 * rounded + TOP_K)) @ second.abs()
    return output, condition


MUTANTS = {
    None: lambda *same: same,
    "another channel": lambda x, *rest: (x.roll(1, 1), *rest),
    "another's probability": lambda x, chosen, probs, *rest: (x, chosen, probs.roll(1, 1), *rest),
    "another sign": lambda x, chosen, probs, up, *rest: (x, chosen, probs, -up, *rest),
}
CASES = [(1, None, None), (5, None, None), (40, 7, None), (150, 0, None), *((40, None, mutant) for mutant in MUTANTS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "favourite", "mutant"), CASES)
@pytest.mark.parametrize("parts", [1, 2], ids=["squared ReLU", "SwiGLU"])
def test_every_token_goes_through_its_experts(tokens, favourite, mutant, parts, device):
    given = made(tokens, device, favourite, parts)
    exact, condition = reference(*given)
    with torch.inference_mode():
        assert experts.can_run(given[0])
        out = experts.experts_of_few(*MUTANTS[mutant](*given))
    with rounding.only(mutant):
        rounding.check(out, exact, rounding.allowed(exact, condition, out.dtype))


@pytest.mark.gpu(gib=1)  # the interpreter's products are BLAS's
@pytest.mark.parametrize("parts", [1, 2])
def test_bits_of_a_token_do_not_depend_on_the_others(parts):
    x, chosen, probs, *weights = made(150, "cuda", 0, parts)
    together = experts.experts_of_few(x, chosen, probs, *weights)
    for some in (slice(0, 1), slice(70, 75), slice(100, 140)):
        assert torch.equal(experts.experts_of_few(x[some], chosen[some], probs[some], *weights), together[some])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_to_products_of_many_rows(device):
    tokens = made(3, device)[0]
    with torch.inference_mode():
        assert experts.can_run(tokens) and not experts.can_run(tokens[:0])
        assert not experts.can_run(tokens[:1].expand(experts.MOST_TOKENS + 1, -1))
    assert not experts.can_run(tokens.requires_grad_())


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize(("up", "parts"), [(True, 1), (True, 2), (False, 1)])
def test_the_products_compile_to_tensor_cores(rows, up, parts, tmp_path):
    kinds = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "probs_ptr": "*fp32"}
    constants = {"EACH": 6 if up else 1, "UP": up, "PARTS": parts, "ROWS": rows, "COLUMNS": 128, "DEPTH": 64}

    def types(name):
        return kinds.get(name, "*i32" if name.endswith("_ptr") else "i32")

    assert "HGMMA" in compiled(experts._product_kernel, types, constants, tmp_path, num_warps=8, num_stages=6)
