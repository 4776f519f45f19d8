"""Sums of samples of tensors, to notice that weights have changed, at next to no cost."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from megatron_hybrid_prefix.ops.triton_or_torch import jit, runs_kernel, tl

SAMPLES = 1024  # of a tensor; the kernel needs a power of two
_SPREAD = 2654435761  # Knuth's multiplicative hash of 32 bits
_MIX = -7046029254386353131  # an odd number of 64 bits without structure
_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


class SampledSums:
    """Sums 1,024 words of each tensor; a tensor of fewer is read whole.

    A word is an element, or half of one of 16 bytes. Words are spread over the whole tensor, one at a pseudo-random place in each
    of 1,024 equal parts, always the same. Each is mixed with its number before the sum. On a GPU all tensors take one launch per
    word size. A table of their addresses is kept for the next call, the tensors are not.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._tables: list[_Table | _HostTable] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """One sum per tensor; equal contents of equal dtype have equal sums. Waits for the device.

        Args:
            tensors: Any shapes, dtypes and devices, without gaps between their elements.
        """
        places = list(zip(map(torch.Tensor.data_ptr, tensors), map(attrgetter("nbytes"), tensors), strict=True))
        if places != self._places:
            self._places, self._tables = places, _tables(tensors)
        sums = [0] * len(tensors)
        for table in self._tables:
            if len(table.rows) == len(sums):
                return table.sums()
            for row, value in zip(table.rows, table.sums(), strict=True):
                sums[row] = value
        return sums


def _tables(tensors: Sequence[torch.Tensor]) -> list[_Table | _HostTable]:
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for row, tensor in enumerate(tensors):
        if tensor.nbytes and tensor.data_ptr():  # a storage may have been resized to nothing
            groups.setdefault((tensor.device, min(8, tensor.itemsize)), []).append(row)
    return [
        (_Table if runs_kernel(tensors[rows[0]]) else _HostTable)(rows, [tensors[row] for row in rows], word_bytes)
        for (_, word_bytes), rows in groups.items()
    ]


class _HostTable:
    """The tensors of the host that have one word size: their numbers, and their words.

    Args:
        rows: Which of the tensors.
        tensors: These tensors. Their memory is read later, for as long as `SampledSums` finds it at the same addresses.
        word_bytes: 1, 2, 4 or 8.
    """

    def __init__(self, rows: list[int], tensors: Sequence[torch.Tensor], word_bytes: int) -> None:
        self.rows = rows
        self._number = np.arange(SAMPLES)
        raw = ((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) for tensor in tensors)
        self._words = [np.frombuffer(each, dtype=_WORDS[word_bytes]) for each in raw]
        self._at = [self._samples(len(words)) for words in self._words]

    def _samples(self, words: int) -> np.ndarray[Any, Any]:
        if words <= SAMPLES:
            return np.arange(words)
        jitter = ((self._number * _SPREAD) & 0xFFFFFFFF) * (words // SAMPLES) >> 32
        return self._number * words // SAMPLES + jitter

    def sums(self) -> list[int]:
        """One per tensor: the reference of the kernel."""
        values = np.zeros((len(self.rows), SAMPLES), dtype=np.int64)
        for row, words, at in zip(values, self._words, self._at, strict=True):
            row[: len(at)] = words[at]
        values *= 2 * self._number + 1
        total: list[int] = ((values ^ (values >> 32)) * _MIX).sum(axis=1).tolist()
        return total


class _Table:
    """The same for tensors of one device."""

    def __init__(self, rows: list[int], tensors: Sequence[torch.Tensor], word_bytes: int) -> None:
        self.rows = rows
        self._word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}[word_bytes]
        places = [(tensor.data_ptr(), tensor.nbytes // word_bytes) for tensor in tensors]
        self._addresses, self._words = torch.tensor(places, device=tensors[0].device).T.contiguous()

    def sums(self) -> list[int]:
        """One per tensor."""
        sums = torch.empty_like(self._addresses)
        _sample_kernel[(len(self.rows),)](
            self._addresses, self._words, sums, WORD=self._word, SAMPLES=SAMPLES, SPREAD=_SPREAD, MIX=_MIX
        )
        found: list[int] = sums.tolist()
        return found


@jit
def _sample_kernel(
    addresses_ptr: tl.tensor,  # (tensors,)
    words_ptr: tl.tensor,  # (tensors,)
    sums_ptr: tl.tensor,  # (tensors,)
    WORD: tl.constexpr,
    SAMPLES: tl.constexpr,
    SPREAD: tl.constexpr,
    MIX: tl.constexpr,
) -> None:
    """One program: the samples of one tensor."""
    row = tl.program_id(0)
    words = tl.load(words_ptr + row)
    number = tl.arange(0, SAMPLES).to(tl.int64)
    jitter = ((number * SPREAD) & 0xFFFFFFFF) * (words // SAMPLES) >> 32
    at = tl.where(words > SAMPLES, number * words // SAMPLES + jitter, number)
    first = tl.load(addresses_ptr + row).to(tl.pointer_type(WORD))
    mixed = tl.load(first + at, mask=at < words, other=0).to(tl.int64) * (2 * number + 1)
    tl.store(sums_ptr + row, tl.sum((mixed ^ (mixed >> 32)) * MIX, axis=0))
