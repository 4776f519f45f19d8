"""The invariant operations of a GPU against float64, and their rows one by one; on a GPU, and in Triton's interpreter (`test_interpreted.py`)."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

from megatron_hybrid_prefix.ops.invariant import linear_triton, log_softmax, norm
from megatron_hybrid_prefix.ops.invariant.linear_triton import Tile
from tests.kernels import rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)
# The interpreter knows no bfloat16.
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")),
]
TILES = [None, Tile(64, 32, 32, 4, 2), Tile(64, 64, 64, 4, 2, group=2, persistent=True, parts=2)]
SHAPES = [(1, 40, 64), (70, 130, 200), (5, 33, 51)]  # rows, columns, depth; the last two: not multiples of 16 bytes


def rand(seed, *shape, dtype=torch.float32, gap=0):
    """Values of very different sizes; ``gap`` elements of NaN behind each row."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g))
    wide = torch.full((*shape[:-1], shape[-1] + gap), float("nan"), dtype=dtype)
    wide[..., : shape[-1]] = values.to(dtype)
    return wide.to(DEVICE)[..., : shape[-1]]


@pytest.fixture(autouse=True)
def each_element_summed_alike(monkeypatch):
    """The interpreter multiplies tiles with BLAS. On some processors, the bits of a row depend there on its place in the tile."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        products = np.multiply(a.data[:, :, None], b.data[None], dtype=d.data.dtype)
        return TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN: an element that is not written, or read from it, shows."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(found):
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", lambda *args, **fields: fill(empty(*args, **fields)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **fields: fill(new_empty(self, *args, **fields)))


def parts_of(x):
    """Pieces of the rows: one, several, one at an address that is no multiple of 16 bytes where rows are odd."""
    ends = sorted({0, 1, 2, 7, len(x)} & set(range(len(x) + 1)))
    return [x[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=["chosen", "small", "persistent"])
def test_a_product_is_within_its_bound(rows, columns, depth, tile, dtype):
    if tile is not None and dtype == torch.float32 and DEVICE == "cuda" and tile.persistent:
        pytest.skip("of float32 the GPU has one tile")
    x, weight = rand(0, rows, depth, dtype=dtype, gap=8), rand(1, columns, depth, dtype=dtype)
    y = linear_triton.linear(x.view(1, rows, depth), weight, tile)
    assert y.dtype == dtype and y.shape == (1, rows, columns) and y.is_contiguous()
    exact = x.double().cpu() @ weight.double().cpu().T
    weighted = (x.double().abs() @ weight.double().abs().T).cpu() * (depth + 1)
    # Tensor cores may cut off bits of a sum that float32 would round: twice the roundoff of each addition.
    allowed = rounding.allowed(exact, 2 * weighted, dtype, truncated=DEVICE == "cpu")
    rounding.check(y[0].cpu(), exact, allowed)
    with pytest.raises(AssertionError, match="are off"):
        rounding.check((y[0] + (y.abs().amax() + 1) / 100).cpu(), exact, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=["chosen", "small", "persistent"])
def test_a_row_of_a_product_has_the_same_bits_with_any_others(rows, columns, depth, tile, dtype):
    if tile is None and dtype != torch.float32 and DEVICE == "cpu":
        pytest.skip("the interpreter sums each tile by itself, and the chosen tiles differ in depth")
    x, weight = rand(2, rows, depth, dtype=dtype, gap=8), rand(3, columns, depth, dtype=dtype)
    whole = linear_triton.linear(x, weight, tile)
    assert torch.equal(torch.cat([linear_triton.linear(part, weight, tile) for part in parts_of(x)]), whole)
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
    assert torch.equal(linear_triton.linear(x[shuffled], weight, tile), whole[shuffled])


def test_a_product_of_no_rows():
    x, weight = rand(0, 0, 64), rand(1, 32, 64)
    assert linear_triton.linear(x.view(0, 1, 64), weight).shape == (0, 1, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [12, 64, 300])
def test_a_norm_is_within_its_bound_and_row_by_row(features, dtype, monkeypatch):
    monkeypatch.setattr(norm, "_FEATURES", 128)  # of 300 features it needs three reads, of 12 it takes rows together
    x, weight = rand(5, 11, features, dtype=dtype, gap=4), rand(6, features)
    y = norm.rms_norm(x, weight, 1e-3)
    assert y.dtype == dtype and y.is_contiguous()
    wide, factor = x.double().cpu(), weight.double().cpu()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * factor
    allowed = rounding.allowed(exact, exact.abs() * (features + rounding.EXP + 6), dtype, truncated=DEVICE == "cpu")
    rounding.check(y.cpu(), exact, allowed)
    assert torch.equal(torch.cat([norm.rms_norm(part, weight, 1e-3) for part in parts_of(x)]), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [33, 512, 1000])
def test_log_probs_are_within_their_bound_and_row_by_row(vocabulary, dtype, monkeypatch):
    monkeypatch.setattr(log_softmax, "_COLUMNS", 256)
    logits = rand(7, 9, vocabulary, dtype=dtype, gap=3)
    logits[:, 3] = float("-inf")  # a token that is not allowed
    y = log_softmax.log_softmax(logits)
    assert y.dtype == torch.float32 and bool((y[:, 3] == float("-inf")).all())
    exact = torch.log_softmax(logits.double().cpu(), -1)
    allowed_tokens = [i for i in range(vocabulary) if i != 3]
    exact, wide = exact[:, allowed_tokens], logits.double().cpu()[:, allowed_tokens]
    top = wide.amax(-1, keepdim=True)
    # A difference of logits is off by a rounding of itself, and so is each term of the sum, relative to it.
    spread = ((wide - top).exp() * (top - wide)).sum(-1, keepdim=True) / (wide - top).exp().sum(-1, keepdim=True)
    weighted = (wide - top).abs() + spread + vocabulary + 2 * rounding.EXP + 2 * exact.abs() + 2
    rounding.check(y.cpu()[:, allowed_tokens], exact, rounding.allowed(exact, weighted, torch.float32))
    assert torch.equal(torch.cat([log_softmax.log_softmax(part) for part in parts_of(logits)]), y)


def test_the_bits_of_a_sum_depend_on_its_order():
    """What the tests above compare is not the same in any order of additions."""
    x, weight = rand(8, 3, 512), rand(9, 40, 512)
    backwards = linear_triton.linear(x.flip(1), weight.flip(1))
    assert not torch.equal(backwards, linear_triton.linear(x, weight))
