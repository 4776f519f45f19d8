"""Copies between rows and pages of host memory, against loops over Python's integers."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_hybrid_prefix.ops import page_copies
from megatron_hybrid_prefix.ops.page_copies import copy_pages

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGES = 40
# words of a row, words of a page: rows of one page, of several, of a part of the last one
SHAPES = [(1, 64), (64, 64), (65, 64), (200, 64), (4096 * 2 + 3, 4096 + 64), (9000, 640)]


def random_words(generator, *shape):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("words", "page_words"), SHAPES)
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("to_host", [True, False], ids=["to_host", "to_device"])
def test_each_word_is_copied(device, words, page_words, neighbours, to_host):
    generator, dice = torch.Generator().manual_seed(words), random.Random(words)
    count, row_pages = 2, -(-words // page_words)
    memory, staged = random_words(generator, PAGES, page_words), random_words(generator, count, words + 5)
    pages = list(range(3, 3 + count * row_pages)) if neighbours else dice.sample(range(PAGES), count * row_pages)
    of_row = [pages[row * row_pages : (row + 1) * row_pages] for row in range(count)]

    after_memory, after_staged = memory.tolist(), staged.tolist()
    for row, word in ((row, word) for row in range(count) for word in range(words)):
        page, inside = of_row[row][word // page_words], word % page_words
        if to_host:
            after_memory[page][inside] = after_staged[row][word]
        else:
            after_staged[row][word] = after_memory[page][inside]

    memory = memory.pin_memory() if device == "cuda" else memory
    staged = staged.to(device)
    copy_pages(staged[:, :words], memory, of_row, to_host=to_host)
    if device == "cuda":
        torch.cuda.synchronize()
    assert memory.tolist() == after_memory
    assert staged.tolist() == after_staged


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_words_have_no_pages(device):
    memory = torch.arange(128).view(2, 64)
    copy_pages(torch.zeros(2, 0, dtype=torch.int64, device=device), memory, [[], []], to_host=True)
    assert memory.flatten().tolist() == list(range(128))


def test_pages_that_are_too_few_or_too_many_are_refused():
    for count in (1, 3):
        with pytest.raises(ValueError, match=rf"rows of 70 words need 2 pages of 64, not {count}"):
            copy_pages(
                torch.zeros(1, 70, dtype=torch.int64),
                torch.zeros(4, 64, dtype=torch.int64),
                [range(count)],
                to_host=True,
            )


def test_a_refused_copy_is_an_error(monkeypatch):
    monkeypatch.setattr(page_copies, "_copier", lambda rows: lambda target, source, size: 700)
    with pytest.raises(RuntimeError, match="cuMemcpyAsync returned error 700"):
        copy_pages(torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int64), [[0]], to_host=True)
