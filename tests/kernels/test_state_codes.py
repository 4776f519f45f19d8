"""States in int8: each element against arithmetic of one element, and what is not finite.

Slots are kept and restored in PyTorch, on a GPU by kernels, and with TRITON_INTERPRET=1 (``test_interpreted.py``) by kernels on the host.
"""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.state_codes import decode, encode, keep_slots, restore_slots
from tests.kernels.places import DEVICES, INTERPRETED


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


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rounds_as_kernels(monkeypatch):
    """Triton's interpreter cuts off what bfloat16 does not have."""
    if INTERPRETED:
        monkeypatch.setattr(
            torch.Tensor, "bfloat16", lambda x: (x.view(torch.int32) >> 16 << 16).view(x.dtype).to(torch.bfloat16)
        )


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.bfloat16() if (x.dtype, dtype) == (torch.float32, torch.bfloat16) else x.to(dtype)


def some_slots(shape: tuple[int, ...], dtype: torch.dtype, device: str, values: torch.Tensor | float = 9):
    """(5 slots, 3 layers, *shape), and (2 layers, 5 slots, *shape) of it: strided over layers and over slots."""
    whole = torch.empty(5, 3, *shape, dtype=dtype, device=device).copy_(torch.as_tensor(values))
    return whole, whole[:, 1:].transpose(0, 1)


FLOAT, HALF = torch.float32, torch.bfloat16
SHAPES = [(2, 64, 128), (1, 128, 128), (3, 16, 16), (2, 3, 5, 7), (40, 24)]
CASES = [*((shape, dtype, torch.int8) for shape in SHAPES for dtype in (FLOAT, HALF))]
CASES += [((40, 51), FLOAT, HALF), ((40, 51), HALF, FLOAT), ((40, 51), HALF, HALF)]


@pytest.mark.usefixtures("rounds_as_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dtype", "kept"), CASES)
def test_slots_are_kept_and_restored(device, shape, dtype, kept):
    """As codes or in another type; nothing else is written."""
    values, kinds = outer_products(5, 3, *shape), [(shape, kept)]
    values[2, 1, ..., 1, 3], values[4, 1, ..., 1, 3], values[4, 2, ..., 4, :] = torch.nan, -torch.inf, 0
    if kept == torch.int8:
        kinds += [(shape[:-1], HALF), ((*shape[:-2], shape[-1]), HALF)]
    whole, states = some_slots(shape, dtype, device, values)
    pools, parts = zip(*(some_slots(*kind, device) for kind in kinds), strict=True)
    right, *rights = (each.cpu().clone() for each in (whole, *pools))
    slots = [torch.tensor(each, device=device) for each in ([3, -1, 0, 4, 2], [2, 1, -1, 4, 0])]
    copies = (3, 2), (4, 4), (2, 0)
    for source, slot in copies:
        state = right[source, 1:]
        for part, code in zip(rights, encode(state) if len(kinds) > 1 else [converted(state, kept)], strict=True):
            part[slot, 1:] = code
    keep_slots(states, parts, *slots)
    for slot, target in copies:
        codes = [part[slot, 1:] for part in rights]
        right[target, 1:] = converted(decode(*codes) if len(kinds) > 1 else codes[0], dtype)
    restore_slots(parts, states, *slots)
    for found, expected in zip((whole, *pools), (right, *rights), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_kept_of_no_layers():
    none = torch.zeros(0, 3, 5, 7)
    keep_slots(none, encode(none), *[torch.tensor([1])] * 2)
