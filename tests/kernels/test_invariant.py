"""Operations of ``exact="bits"``: a row has the same bits in any batch and at any place in it, on this processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_hybrid_prefix.layers.invariant import InvariantMLP
from megatron_hybrid_prefix.ops.delta_gates import gates
from megatron_hybrid_prefix.ops.elementwise import sigmoid, silu, softplus
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.ops.invariant import linear as invariant_linear
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.invariant.attention import TILE_KEYS, TILE_QUERIES, attend_paged
from megatron_hybrid_prefix.ops.invariant.linear import TILE_ROWS, linear
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.ops.invariant.norm import rms_norm
from megatron_hybrid_prefix.ops.invariant.route import largest, route
from tests.harness.bits import LARGE, by_rows
from tests.harness.selection import mostly_slow
from tests.kernels import naive, rounding

ROWS = 4 * TILE_ROWS + 5
CUTS = [(0, 1), (3, 4), (0, 2), (5, TILE_ROWS), (1, TILE_ROWS + 1), (7, 40), (TILE_ROWS - 1, ROWS), (ROWS - 1, ROWS)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def depends_on_other_rows(compute, rows: torch.Tensor) -> bool:
    """Whether a row's bits change with the rows around it, or with its place among them."""
    whole = compute(rows)
    cut = any(not torch.equal(compute(rows[start:end].clone()), whole[start:end]) for start, end in CUTS)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    return cut or not torch.equal(compute(rows[order]), whole[order])


@pytest.mark.parametrize("shape", mostly_slow([(330, 64), (64, 100), (33, 130), (256, 1024), (16, 4096)], (64, 100)))
def test_a_product_does_not_depend_on_other_rows(shape):
    outputs, inputs = shape
    weight, rows = draw(outputs, inputs, seed=2), draw(ROWS, inputs)
    assert not depends_on_other_rows(lambda x: linear(x, weight), rows)
    strided = draw(ROWS, 2 * inputs)[:, :inputs]
    assert torch.equal(linear(strided, weight), linear(strided.contiguous(), weight))
    right = rows.double() @ weight.double().t()
    weighted = inputs * (rows.double().abs() @ weight.double().abs().t())
    rounding.check(linear(rows, weight), right, rounding.allowed(right, weighted, torch.float32))
    assert linear(rows[:6].view(2, 3, inputs), weight).shape == (2, 3, outputs)


def test_a_place_that_matters_is_found(monkeypatch):
    """As with MKL's AVX2 kernels and two threads: rows in the second half of a tile are summed in another order."""
    weight, mm = draw(64, 100, seed=2), torch.mm

    def halves(tile, transposed):
        sums, at = mm(tile, transposed), len(tile) // 2
        return torch.cat([sums[:at], sums[at:] + LARGE - LARGE])

    monkeypatch.setattr(torch, "mm", halves)
    assert invariant_linear._depends_on_place(weight)


def test_a_product_that_depends_on_other_rows_is_noticed():
    """As products of BLAS do, for sizes and processors that differ."""
    weight = draw(330, 64, seed=2)
    assert depends_on_other_rows(lambda x: by_rows(linear(x, weight)), draw(ROWS, 64))


SIGMOID = {"score_function": "sigmoid", "scaling_factor": 2.5}
ROUTERS = {  # arguments of megatron's function; groups and those of a token
    "softmax": ({"score_function": "softmax"}, ()),
    "softmax first": ({"score_function": "softmax", "use_pre_softmax": True}, ()),
    "sigmoid": (SIGMOID, ()),
    "sigmoid, groups": (SIGMOID, (4, 2)),
    "softmax, groups": ({"score_function": "softmax"}, (4, 1)),
}


def routed(logits, name, function=None):
    """Weights and map of four experts, by ours or by megatron's function."""
    fields, groups = ROUTERS[name]
    fields = fields | {"expert_bias": draw(logits.shape[1], seed=3) if fields is SIGMOID else None}
    if function is not None:
        return function(logits, 4, **fields, **dict(zip(("num_groups", "group_topk"), groups, strict=False)))
    return route(logits, lambda scores: largest(scores, 4, *groups)[1], **fields)


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_megatrons(name):
    logits = draw(ROWS, 60)
    (weights, ours), (right, chosen) = routed(logits, name), routed(logits, name, topk_routing_with_score_function)
    assert torch.equal(ours, chosen)
    torch.testing.assert_close(weights, right, rtol=1e-5, atol=0)


def test_equal_scores_are_chosen_by_number():
    """Of experts and of groups; scores of few digits, as in bfloat16, are often equal."""
    scores = draw(ROWS, 60).round()
    for row, found in zip(scores.tolist(), largest(scores, 7)[1].tolist(), strict=True):
        assert found == sorted(range(60), key=lambda number: (-row[number], number))[:7]
    assert largest(torch.zeros(2, 60), 4, 5, 2)[1].tolist() == [[0, 1, 2, 3]] * 2


ROW_BY_ROW = {
    **{f"routes by {name}": lambda x, name=name: routed(x, name)[0] for name in ROUTERS},
    "a token's experts": lambda x: x.view(len(x), 4, -1).sum(1),
    "rms norm": lambda x: rms_norm(x, draw(x.shape[1], seed=3), 1e-5),
    "gated norm": lambda x: gated_rms_norm(x, draw(x.shape[1], seed=3), x.flip(1), 1e-6, x.shape[1] // 4, True),
    "log softmax": log_softmax, "silu": silu, "sigmoid": sigmoid, "softplus": softplus, "exp": torch.exp,
    "cos": torch.cos, "sin": torch.sin, "rsqrt": lambda x: torch.rsqrt(x.square() + 1e-6),
    "sum of squares": lambda x: x.square().sum(-1),
    "gates": lambda x: torch.cat(gates(x, x.flip(1), draw(x.shape[1], seed=3), draw(x.shape[1], seed=4)), dim=1),
    "head norm": lambda x: gated_rms_norm(x, draw(x.shape[1] // 4), x, 1e-6, x.shape[1] // 4, True),
}  # fmt: skip


@pytest.mark.parametrize("width", mostly_slow([60, 100, 512], 100))
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_surrounds_products_does_not_depend_on_other_rows(name, width):
    assert not depends_on_other_rows(ROW_BY_ROW[name], 3 * draw(ROWS, width))


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, F.softplus])
def test_activations_of_torch_match_ours(function):
    ours = {F.silu: silu, torch.sigmoid: sigmoid, F.softplus: softplus}[function]
    x = torch.linspace(-30, 30, 997, dtype=torch.float64)
    torch.testing.assert_close(ours(x), function(x), rtol=1e-12, atol=0)


class Paged:
    """Keys and values of one request of 200 tokens, in pages that are out of order."""

    BLOCK, HEADS, KV_HEADS, SIZE, TOKENS = 32, 6, 2, 24, 200

    def __init__(self) -> None:
        self.q = draw(self.TOKENS, self.HEADS, self.SIZE, seed=1)
        self.k, self.v = (draw(self.TOKENS, self.KV_HEADS, self.SIZE, seed=seed) for seed in (2, 3))
        self.table = torch.randperm(20, generator=torch.Generator().manual_seed(4))[:10][None].int()
        self.pages = [torch.full((20, self.BLOCK, self.KV_HEADS, self.SIZE), float("nan")) for _ in range(2)]
        for page, block in enumerate(self.table[0].tolist()):
            part = slice(page * self.BLOCK, (page + 1) * self.BLOCK)
            for pages, tokens in zip(self.pages, (self.k, self.v), strict=True):
                pages[block, : len(tokens[part])] = tokens[part]

    def attend(self, *spans: tuple[int, int]) -> torch.Tensor:
        """The outputs of these spans of positions, each as a request of a step."""
        q = torch.cat([self.q[start:end] for start, end in spans])
        starts = [sum(end - start for start, end in spans[:number]) for number in range(len(spans) + 1)]
        return attend_paged(
            q,
            *self.pages,
            starts=starts,
            lengths=[end for _, end in spans],
            block_table=self.table.expand(len(spans), -1),
            scale=self.SIZE**-0.5,
        )


def test_attention_has_the_same_bits_in_any_span_and_beside_any_request():
    paged = Paged()
    whole = paged.attend((0, paged.TOKENS))
    last = slice(-20, None)
    exactly = *(x.double() for x in (paged.q[last], paged.k, paged.v)), paged.SIZE**-0.5
    weighted, _ = rounding.attention(*exactly, rescalings=paged.TOKENS // TILE_KEYS)
    right = naive.attention_rows(*exactly, -1, 0)[0]
    rounding.check(whole[last], right, rounding.allowed(right, weighted, torch.float32))
    for cut in (1, TILE_QUERIES - 1, TILE_QUERIES, TILE_KEYS - 1, TILE_KEYS, 127, paged.TOKENS - 1):
        assert torch.equal(torch.cat([paged.attend((0, cut)), paged.attend((cut, paged.TOKENS))]), whole)
        assert torch.equal(paged.attend((cut, paged.TOKENS), (0, cut), (5, 6))[: paged.TOKENS - cut], whole[cut:])
    decoded = torch.cat([paged.attend((at, at + 1)) for at in range(0, paged.TOKENS, 7)])
    assert torch.equal(decoded, whole[::7])


def test_a_gated_mlp_adds_its_bias():
    rows, bias = draw(3, 8), draw(8, seed=1)
    mlp = InvariantMLP.__new__(InvariantMLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(gated_linear_unit=True)
    # Megatron's first product leaves its bias to the MLP.
    mlp.linear_fc1, mlp.linear_fc2 = (lambda x: (x, bias)), (lambda x: x)
    gate, values = (rows + bias).chunk(2, dim=-1)
    with scope.invariant():
        assert torch.equal(mlp.forward(rows), silu(gate) * values)
