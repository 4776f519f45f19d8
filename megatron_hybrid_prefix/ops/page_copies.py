"""Copies of rows between the device and pages of pinned host memory, by the GPU's copy engines.

A kernel could do the same in one launch, but it keeps multiprocessors from the model while it waits for the host link (tried on
an H200: a prefill beside it took 4 % longer). PyTorch's ``copy_`` takes the CPU several times as long as the driver's call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div

WORD_BYTES = 8


def copy_pages(rows: torch.Tensor, memory: torch.Tensor, pages: Sequence[Sequence[int]], *, to_host: bool) -> None:
    """Copies every row to its pages, or the pages to their row. The last page of a row may be used in part.

    Runs on the current stream; the CPU does not wait.

    Args:
        rows: (rows, words) int64 on the device, contiguous inside a row.
        memory: (all pages, words of a page) int64 on the host, contiguous; pinned if ``rows`` are on a GPU.
        pages: Each row's pages, in order; different for all rows.
        to_host: From the rows to the pages, or back.

    Raises:
        ValueError: The pages of a row hold fewer or more words than a row has.
        RuntimeError: The driver refuses a copy.
    """
    words, page_words = rows.shape[1], memory.shape[1]
    needed = ceil_div(words, page_words)
    wrong = next((own for own in pages if len(own) != needed), None)
    if wrong is not None:
        raise ValueError(f"rows of {words} words need {needed} pages of {page_words}, not {len(wrong)}")
    assert rows.stride(1) == 1 and memory.is_contiguous()
    copy = _copier(rows)
    first, row_bytes, host_first = rows.data_ptr(), rows.stride(0) * WORD_BYTES, memory.data_ptr()
    for row, page, start, end in _pieces(pages, words, page_words):
        assert page >= 0 and page * page_words + end - start <= memory.numel()  # the driver does not know the bounds
        at_device = first + row * row_bytes + start * WORD_BYTES
        at_host = host_first + page * page_words * WORD_BYTES
        target, source = (at_host, at_device) if to_host else (at_device, at_host)
        error = copy(target, source, (end - start) * WORD_BYTES)
        if error:
            raise RuntimeError(f"cuMemcpyAsync returned error {error}")


def _copier(rows: torch.Tensor) -> Callable[[int, int, int], int]:
    """A function of (target, source, bytes) that copies on the current stream and returns the driver's error, or 0."""
    if not rows.is_cuda:
        return lambda target, source, size: 0 * ctypes.memmove(target, source, size)
    copy, stream = _driver_copy(), torch.cuda.current_stream(rows.device).cuda_stream
    return lambda target, source, size: copy(target, source, size, stream)


def _pieces(pages: Sequence[Sequence[int]], words: int, page_words: int) -> Iterator[tuple[int, int, int, int]]:
    """The copies: (row, first page, first word of the row, end). Neighbouring pages of a row are one copy."""
    for row, own in enumerate(pages):
        index = 0
        while index < len(own):
            end = index + 1
            while end < len(own) and own[end] == own[end - 1] + 1:
                end += 1
            yield row, own[index], index * page_words, min(words, end * page_words)
            index = end


@cache
def _driver_copy() -> Callable[[int, int, int, int], int]:
    """The CUDA driver's ``cuMemcpyAsync(target, source, bytes, stream)``."""
    copy: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    return cast(Callable[[int, int, int, int], int], copy)
