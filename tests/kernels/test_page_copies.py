"""Copies between rows and pages of host memory, against loops over Python's integers."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_hybrid_prefix.ops import page_copies
from megatron_hybrid_prefix.ops.page_copies import copy_pages

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGES, UNTOUCHED = 40, -7
# words of a row, words of a page: rows of one page, of several, of a part of the last one; chunks that are cut by a page's end
SHAPES = [(1, 64), (64, 64), (65, 64), (200, 64), (4096 * 2 + 3, 4096 + 64), (9000, 640)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(page_copies, "_PROGRAMS", 3)  # each copies several chunks, the last ones fewer


def random_words(generator, *shape):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("words", "page_words"), SHAPES)
@pytest.mark.parametrize("to_host", [True, False], ids=["to_host", "to_device"])
def test_each_word_is_copied_and_summed(device, words, page_words, to_host):
    generator, dice = torch.Generator().manual_seed(words), random.Random(words)
    count, row_pages = 2, -(-words // page_words)
    memory, staged = random_words(generator, PAGES, page_words), random_words(generator, count, words + 5)
    pages = dice.sample(range(PAGES), count * row_pages)
    of_row = [pages[row * row_pages : (row + 1) * row_pages] for row in range(count)]

    after_memory, after_staged = memory.tolist(), staged.tolist()
    sums = [UNTOUCHED] * count
    for row, word in ((row, word) for row in range(count) for word in range(words)):
        page, inside = of_row[row][word // page_words], word % page_words
        if to_host:
            after_memory[page][inside] = after_staged[row][word]
        else:
            after_staged[row][word] = after_memory[page][inside]
        sums[row] += after_staged[row][word] * (2 * word + 1)

    memory = memory.pin_memory() if device == "cuda" else memory
    staged = staged.to(device)
    found = torch.full((count,), UNTOUCHED, device=device)
    copy_pages(staged[:, :words], memory, torch.tensor(of_row, device=device), to_host=to_host, sums=found)
    if device == "cuda":
        torch.cuda.synchronize()
    assert memory.tolist() == after_memory
    assert staged.tolist() == after_staged
    assert [value % 2**64 for value in found.tolist()] == [value % 2**64 for value in sums]


@pytest.mark.parametrize("device", DEVICES)
def test_without_sums_and_without_words(device):
    memory, rows = torch.arange(128).view(2, 64), torch.zeros(1, 70, dtype=torch.int64, device=device)
    memory = memory.pin_memory() if device == "cuda" else memory
    copy_pages(rows, memory, torch.tensor([[1, 0]], device=device), to_host=False)
    assert rows[0].tolist() == [*range(64, 128), *range(6)]
    sums = torch.ones(1, dtype=torch.int64, device=device)
    copy_pages(rows[:, :0], memory, torch.zeros(1, 0, dtype=torch.int64, device=device), to_host=False, sums=sums)
    assert sums.tolist() == [1]


def test_pages_that_are_too_few_or_too_many_are_refused():
    for count in (1, 3):
        with pytest.raises(ValueError, match=rf"rows of 70 words need 2 pages of 64, not {count}"):
            copy_pages(
                torch.zeros(1, 70, dtype=torch.int64),
                torch.zeros(4, 64, dtype=torch.int64),
                torch.arange(count)[None],
                to_host=True,
            )
