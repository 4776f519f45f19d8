"""Zeros in place of wrong entries, against a loop."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.wrong_entries import zero_wrong
from tests.kernels.places import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_wrong_entries_are_zeros_and_no_others(device, shape, dtype, wrong):
    """Also where they hold NaN, in tensors that are strided over layers and entries."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(3, 8, 2, *shape, generator=generator).to(dtype)
    entries, ids, pages = memory[:, :, 1], [6, 0, 3, 2], torch.tensor([[5, 0], [2, 0], [9, 0], [4, 0]])
    expected = torch.arange(100, 112)
    sums = expected[pages[:, 0]].clone()
    for row in wrong:
        sums[row] += 1 << 40
        entries[:, ids[row], ..., -1] = float("nan")
    after = memory.clone()
    for row in wrong:
        after[:, ids[row], 1] = 0
    here = memory.to(device)
    places = pages.to(device)[:, 0]
    zero_wrong(here[:, :, 1], torch.tensor(ids, device=device), sums.to(device), expected.to(device), places)
    assert torch.equal(here.cpu(), after)


def test_there_may_be_no_entries_and_no_layers():
    nothing, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    zero_wrong(torch.ones(2, 3, 4), nothing, nothing, one, nothing)
    zero_wrong(torch.ones(0, 3, 4), one, one, one + 1, one)
