"""Copies of rows between the device and pages of pinned host memory, with the checksums of what was copied: one launch.

A GPU reads and writes pinned memory itself. A few programs fill the host link; the others are left to the model. The copy engines
are no faster, and small copies that a step needs wait in line behind large ones.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

WORD_BYTES = 8
_BLOCK = 4096  # words
_PROGRAMS = 32


def copy_pages(
    rows: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor, *, to_host: bool, sums: torch.Tensor | None = None
) -> None:
    """Copies every row to its pages, or the pages to their row. The last page of a row may be used in part.

    Args:
        rows: (rows, words) int64 on the device, contiguous inside a row.
        memory: (all pages, words of a page) int64 on the host, contiguous; pinned if ``rows`` are on a GPU.
        pages: (rows, pages of a row) int64 on the device: a row's pages, in order; different for all rows.
        to_host: From the rows to the pages, or back.
        sums: (rows,) int64 on the device; `checksum_rows` of what is copied is added to it.

    Raises:
        ValueError: The pages of a row hold fewer or more words than a row has.
    """
    words, page_words, row_pages = rows.shape[1], memory.shape[1], pages.shape[1]
    if ceil_div(words, page_words) != row_pages:
        raise ValueError(
            f"rows of {words} words need {ceil_div(words, page_words)} pages of {page_words}, not {row_pages}"
        )
    if not rows.numel():
        return
    if not runs_kernel(rows):
        _copy_pages_reference(rows, memory, pages, to_host, sums)
        return
    assert rows.stride(1) == 1 and memory.is_contiguous() and pages.is_contiguous()
    blocks = ceil_div(page_words, _BLOCK)
    chunks = rows.shape[0] * row_pages * blocks
    _copy_pages_kernel[(min(_PROGRAMS, chunks),)](
        rows,
        memory,
        pages,
        rows if sums is None else sums,
        chunks,
        blocks,
        row_pages,
        words,
        page_words,
        rows.stride(0),
        TO_HOST=to_host,
        SUM=sums is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _copy_pages_reference(
    rows: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor, to_host: bool, sums: torch.Tensor | None
) -> None:
    """The same in plain PyTorch."""
    for row, own_pages in zip(rows, pages.tolist(), strict=True):
        for part, page in zip(row.split(memory.shape[1]), own_pages, strict=True):
            source, target = (part, memory[page, : len(part)]) if to_host else (memory[page, : len(part)], part)
            target.copy_(source)
    if sums is not None:
        sums += checksum_rows(rows)


if triton is not None:

    @triton.jit
    def _copy_pages_kernel(
        rows_ptr: tl.tensor,  # (rows, words)
        memory_ptr: tl.tensor,  # (all pages, page words)
        pages_ptr: tl.tensor,  # (rows, row pages)
        sums_ptr: tl.tensor,  # (rows,)
        chunks: tl.tensor,
        blocks: tl.tensor,  # of a page
        row_pages: tl.tensor,
        words: tl.tensor,
        page_words: tl.int64,
        row_stride: tl.int64,
        TO_HOST: tl.constexpr,
        SUM: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """Each program: every n-th chunk. A chunk is up to BLOCK words of one page."""
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            at = chunk // blocks  # in pages
            row = (at // row_pages).to(tl.int64)
            first = (at % row_pages) * page_words  # word of the row that this page begins with
            inside = (chunk % blocks) * BLOCK + tl.arange(0, BLOCK)
            mask = (inside < page_words) & (first + inside < words)
            page = tl.load(pages_ptr + at)
            device = rows_ptr + row * row_stride + first + inside
            host = memory_ptr + page * page_words + inside
            if TO_HOST:
                values = tl.load(device, mask=mask, other=0)
                tl.store(host, values, mask=mask)
            else:
                values = tl.load(host, mask=mask, other=0)
                tl.store(device, values, mask=mask)
            if SUM:
                weights = 2 * (first + inside).to(tl.int64) + 1
                tl.atomic_add(sums_ptr + row, tl.sum(values * weights, axis=0))
