"""States in int8: each element against arithmetic of one element, and what is not finite."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.state_codes import decode, encode


def outer_products(*shape: int, seed: int = 0) -> torch.Tensor:
    """Matrices as states are: sums of outer products, rows and columns of very different sizes, float32."""
    *others, rows, columns = shape
    dice = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(*others, size, 5, generator=dice) * (4 * torch.randn(*others, size, 1, generator=dice)).exp()
        for size in (rows, columns)
    )
    return left @ right.mT


def rounded(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


def test_an_element_is_an_integer_times_two_scales():
    states = outer_products(2, 3, 5, 7)
    values, rows, columns = encode(states)
    assert (values.dtype, rows.dtype, columns.dtype) == (torch.int8, torch.bfloat16, torch.bfloat16)
    assert (values.shape, rows.shape, columns.shape) == ((2, 3, 5, 7), (2, 3, 5), (2, 3, 7))
    for place in ((0, 0), (1, 2)):
        x, found = states[place].tolist(), decode(values, rows, columns)[place]
        of_column = [rounded(max(abs(x[i][j]) for i in range(5)) ** 0.5) for j in range(7)]
        of_row = [rounded(max(abs(x[i][j]) / of_column[j] for j in range(7)) / 127) for i in range(5)]
        assert columns[place].tolist() == pytest.approx(of_column, rel=2**-7)
        assert rows[place].tolist() == pytest.approx(of_row, rel=2**-7)
        for i in range(5):
            for j in range(7):
                step = float(rows[place][i] * columns[place][j].float())
                # Scales are rounded by 2**-9 at most, so 127 of them lack a quarter of a step.
                assert abs(float(found[i, j]) - x[i][j]) <= 0.76 * step
    again = encode(states.mT.contiguous().mT)
    assert all(torch.equal(*pair) for pair in zip(again, (values, rows, columns), strict=True))


def test_zeros_stay_zeros_and_tiny_values_are_kept():
    states = outer_products(4, 8, 8)
    states[0] = 0
    states[1, 2] = states[2, :, 3] = 0
    states[3] *= 1e-33
    found = decode(*encode(states))
    assert torch.equal(found == 0, (states == 0) | (found == 0)) and not found[0].any() and not found[1, 2].any()
    assert ((found - states).flatten(1).norm(dim=1) <= 0.02 * states.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_finite_afterwards(wrong):
    states = outer_products(3, 8, 8)
    states[1, 2, 3] = wrong
    found = decode(*encode(states))
    assert found[[0, 2]].isfinite().all() and not found[1].isfinite().all()


def test_scales_of_columns_pay():
    """Else the largest column decides how precisely a row is kept."""
    states = outer_products(16, 64, 128)
    scales = states.abs().amax(-1, keepdim=True) / 127
    of_rows = (states / scales).round() * scales
    assert (of_rows - states).abs().mean() > 1.2 * (decode(*encode(states)) - states).abs().mean()
