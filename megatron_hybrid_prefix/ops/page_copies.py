"""Copies of entries to and from pages, which may be in pinned host memory, with the checksums of what was copied.

Between the device and the host there are two ways. A kernel reads and writes pinned memory itself. Two programs fill the host link;
more would slow the model's kernels down. The copy engines (``engine_copies.py``) are faster if pages are large, begin sooner, because
the device needs no ids, and hardly slow kernels down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.ops.slot_copies import word_type
from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, runs_kernel, tl
from megatron_hybrid_prefix.support.arithmetic import ceil_div

WORD_BYTES = 8  # of a checksum
_BLOCK = 4096  # words
_TO_HOST_PROGRAMS = 2  # fill the host link; kernels beside more are much slower
_FROM_HOST_PROGRAMS = 32
_MOST_PROGRAMS = 4096  # on the device alone


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryGeometry:
    """How a tensor's entries lie on the device and in pages.

    Attributes:
        row_bytes: Bytes of an entry, in all layers.
        row_pages: Pages of a row that hold some of them.
        layer_bytes: Bytes of an entry in a layer.
        layer_step_bytes: From a layer to the next one.
        entry_step_bytes: From an entry to the next one.
        word: The widest integer type that divides all sizes and steps.
        is_contiguous: Whether an entry is, inside a layer.
    """

    row_bytes: int
    row_pages: int
    layer_bytes: int
    layer_step_bytes: int
    entry_step_bytes: int
    word: torch.dtype
    is_contiguous: bool


@lru_cache(maxsize=256)  # the same few tensors again and again; each launch would take the CPU 20 us longer
def _geometry(
    shape: torch.Size, strides: tuple[int, ...], offset: int, item_bytes: int, *, start_bytes: int, page_bytes: int
) -> EntryGeometry:
    layers, _, *inside = shape
    layer_bytes = math.prod(inside) * item_bytes
    layer_step_bytes, entry_step_bytes = (stride * item_bytes for stride in strides[:2])
    row_bytes = layers * layer_bytes
    return EntryGeometry(
        row_bytes=row_bytes,
        row_pages=ceil_div(start_bytes + row_bytes, page_bytes) - start_bytes // page_bytes,
        layer_bytes=layer_bytes,
        layer_step_bytes=layer_step_bytes,
        entry_step_bytes=entry_step_bytes,
        word=word_type(start_bytes, page_bytes, layer_bytes, layer_step_bytes, entry_step_bytes, offset * item_bytes),
        is_contiguous=all(
            size == 1 or stride == math.prod(inside[dim + 1 :])
            for dim, (size, stride) in enumerate(zip(inside, strides[2:], strict=True))
        ),
    )


def copy_pages(
    entries: torch.Tensor,
    memory: torch.Tensor,
    ids: torch.Tensor,
    pages: torch.Tensor,
    *,
    to_pages: bool,
    start_bytes: int = 0,
    sums: torch.Tensor | None = None,
    beside: bool = False,
) -> None:
    """Copies entries to their pages, or pages to their entries: one launch.

    All bytes of an entry, layer by layer, are a row. The pages hold the row from ``start_bytes`` on, so several tensors may
    share pages. Other bytes of the pages stay.

    Args:
        entries: (layers, all entries, *shape) on the device, strided over layers and entries, contiguous inside an entry.
        memory: (all pages, page bytes) uint8, contiguous; on the device, or on the host, and pinned if ``entries`` are on a GPU.
        ids: (rows,) int64 on the device: entries; all differ if they are written.
        pages: (rows, pages of a row) int64 on the device: a row's pages, in order; all differ if they are written.
        to_pages: From the entries to the pages, or back.
        start_bytes: Bytes in the pages of a row before this tensor's.
        sums: (rows,) int64 on the device. What the copied bytes add to `checksum_rows` of all bytes in the pages is added.
        beside: Leave half of the multiprocessors to other kernels, if ``memory`` is on the device, too.

    Raises:
        ValueError: The pages of a row are too few, or hold 2 GiB or more.
    """
    page_bytes = memory.shape[1]
    strides, offset, item_bytes = entries.stride(), entries.storage_offset(), entries.element_size()
    of = _geometry(entries.shape, strides, offset, item_bytes, start_bytes=start_bytes, page_bytes=page_bytes)
    if start_bytes + of.row_bytes > pages.shape[1] * page_bytes:
        raise ValueError(f"{start_bytes} + {of.row_bytes} bytes do not fit in {pages.shape[1]} pages of {page_bytes}")
    if pages.shape[1] * page_bytes >= 2**31:
        raise ValueError(f"{pages.shape[1]} pages of {page_bytes} bytes for one entry: the kernel counts in 31 bits")
    if not len(ids) or not of.row_bytes:
        return
    if not runs_kernel(entries):
        own = entries.flatten(2).view(torch.uint8)  # (layers, entries, bytes)
        for row, (entry, row_pages) in enumerate(zip(ids.tolist(), pages.tolist(), strict=True)):
            end = start_bytes + own[:, entry].numel()
            whole = torch.zeros(end, dtype=torch.uint8)
            if to_pages:
                whole[start_bytes:] = own[:, entry].flatten()
            for number, page in enumerate(row_pages):
                first = number * memory.shape[1]
                at, to = max(first, start_bytes), min(first + memory.shape[1], end)
                if at < to:
                    there, here = memory[page, at - first : to - first], whole[at:to]
                    source, target = (here, there) if to_pages else (there, here)
                    target.copy_(source)
            if not to_pages:
                own[:, entry] = whole[start_bytes:].view(len(own), -1)
            if sums is not None:
                sums[row] += _sum_of(whole[start_bytes:], start_bytes)
        return
    assert of.is_contiguous and memory.is_contiguous() and pages.stride(1) == 1
    word_bytes = of.word.itemsize
    page_words = page_bytes // word_bytes
    blocks = ceil_div(page_words, _BLOCK)
    chunks = len(ids) * of.row_pages * blocks
    if memory.is_cuda:
        programs = ceil_div(multiprocessors(memory.device), 2) if beside else _MOST_PROGRAMS
    elif not to_pages:
        programs = _FROM_HOST_PROGRAMS
    else:
        programs = _TO_HOST_PROGRAMS
    _copy_pages_kernel[(min(programs, chunks),)](
        entries.flatten(2).view(of.word),
        memory.view(of.word),
        ids,
        pages,
        ids if sums is None else sums,
        chunks,
        blocks,
        of.row_pages,
        start_bytes // page_bytes,
        pages.stride(0),
        start_bytes // word_bytes,
        of.row_bytes // word_bytes,
        page_words,
        of.layer_bytes // word_bytes,
        of.layer_step_bytes // word_bytes,
        of.entry_step_bytes // word_bytes,
        TO_PAGES=to_pages,
        SUM=sums is not None,
        WORDS_A_SUM=WORD_BYTES // word_bytes,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _sum_of(part: torch.Tensor, start_bytes: int) -> torch.Tensor:
    """What these bytes, (bytes,) uint8, add to the checksum of a row in which they begin at ``start_bytes``."""
    end = start_bytes + len(part)
    whole = part.new_zeros(end + -end % WORD_BYTES)
    whole[start_bytes:end] = part
    return checksum_rows(whole.view(torch.int64)[None])[0]


@jit(  # else it would be compiled again for some counts, and for parts of an upload of ids
    do_not_specialize=["chunks", "blocks", "row_pages", "first_page", "pages_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "pages_ptr", "sums_ptr"],
)
def _copy_pages_kernel(
    entries_ptr: tl.tensor,  # (layers, all entries, layer_words), strided over layers and entries
    memory_ptr: tl.tensor,  # (all pages, page_words)
    ids_ptr: tl.tensor,  # (rows,)
    pages_ptr: tl.tensor,  # (rows, at least first_page + row_pages)
    sums_ptr: tl.tensor,  # (rows,)
    chunks: tl.tensor,
    blocks: tl.tensor,  # of a page
    row_pages: tl.tensor,  # pages of a row that this tensor uses
    first_page: tl.tensor,  # the first of them
    pages_stride: tl.tensor,
    start: tl.tensor,  # words in the pages before this tensor's
    words: tl.tensor,  # of a row
    page_words: tl.tensor,
    layer_words: tl.tensor,
    stride_layer: tl.int64,
    stride_entry: tl.int64,
    TO_PAGES: tl.constexpr,
    SUM: tl.constexpr,
    WORDS_A_SUM: tl.constexpr,  # words that are one word of the checksum
    BLOCK: tl.constexpr,
) -> None:
    """Each program: every n-th chunk. A chunk is up to BLOCK words of one page."""
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        at = chunk // blocks  # in pages
        row, number = at // row_pages, first_page + at % row_pages
        inside = (chunk % blocks) * BLOCK + tl.arange(0, BLOCK)
        there = number * page_words + inside  # in all pages of the row
        word = there - start
        mask = (inside < page_words) & (word >= 0) & (word < words)
        entry = tl.load(ids_ptr + row).to(tl.int64)
        page = tl.load(pages_ptr + row * pages_stride + number).to(tl.int64)
        layer = (word // layer_words).to(tl.int64)
        in_entry = entries_ptr + entry * stride_entry + layer * stride_layer + word % layer_words
        in_page = memory_ptr + page * page_words + inside
        if TO_PAGES:
            values = tl.load(in_entry, mask=mask, other=0)
            tl.store(in_page, values, mask=mask)
        else:
            values = tl.load(in_page, mask=mask, other=0)
            tl.store(in_entry, values, mask=mask)
        if SUM:
            tl.atomic_add(sums_ptr + row, _sum_of_words(values, there, WORDS_A_SUM))


@jit
def _sum_of_words(values: tl.tensor, at: tl.tensor, WORDS_A_SUM: tl.constexpr) -> tl.tensor:
    """What words at these places of a row add to its checksum."""
    parts = values.to(tl.int64)
    weights = 2 * (at // WORDS_A_SUM).to(tl.int64) + 1
    if WORDS_A_SUM > 1:
        bits: tl.constexpr = 64 // WORDS_A_SUM
        parts = (parts & ((1 << bits) - 1)) << (at % WORDS_A_SUM * bits).to(tl.int64)
    return tl.sum(parts * weights, axis=0)
