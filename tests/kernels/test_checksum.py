"""Checksums of rows, against a loop over Python's integers."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops.checksum import checksum_rows
from tests.kernels.places import DEVICES


def by_hand(row: list[int]) -> int:
    total = sum(word * (2 * index + 1) for index, word in enumerate(row)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [0, 1, 7, 4096, 4097, 9000])
def test_it_is_the_sum_of_weighted_words(device, words):
    generator = torch.Generator().manual_seed(words)
    memory = torch.randint(-(2**63), 2**63 - 1, (3, words + 5), generator=generator)
    rows = memory.to(device)[:, :words]  # strided
    assert checksum_rows(rows).tolist() == [by_hand(row[:words]) for row in memory.tolist()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bit_and_an_exchange_show(device):
    row = torch.arange(5000, device=device)[None] * 977
    right = checksum_rows(row)
    for index in (0, 4095, 4999):
        wrong = row.clone()
        wrong[0, index] ^= 1 << 40
        assert checksum_rows(wrong) != right
    exchanged = row.clone()
    exchanged[0, [3, 4998]] = row[0, [4998, 3]]
    assert checksum_rows(exchanged) != right


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_have_no_sums(device):
    assert checksum_rows(torch.zeros(0, 8, dtype=torch.int64, device=device)).shape == (0,)
