"""Sums of samples of tensors, to notice that weights have changed, at next to no cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

SAMPLES = 1024  # of a tensor; the kernel needs a power of two
_SPREAD = 2654435761  # Knuth's multiplicative hash of 32 bits
_MIX = -7046029254386353131  # an odd number of 64 bits without structure
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class SampledSums:
    """Sums 1,024 words of each tensor; a tensor of fewer is read whole.

    A word has 8 bytes, less in tensors of an odd size or address. Words are spread over the whole tensor, one at a pseudo-random
    place in each of 1,024 equal parts, always the same. Each is mixed with its number before the sum. On a GPU all tensors take
    one launch per word size. A table of their addresses is kept for the next call, the tensors are not.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._tables: list[_Table] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """One sum per tensor; equal contents at equal sizes have equal sums. Waits for the device.

        Args:
            tensors: Any shapes, dtypes and devices, without gaps between their elements.
        """
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if places != self._places:
            self._places, self._tables = places, _tables(tensors)
        sums = [0] * len(tensors)
        for table in self._tables:
            for row, value in zip(table.rows, table.sums(tensors).tolist(), strict=True):
                sums[row] = value
        return sums


class _Table:
    """The tensors of one device and word size: their numbers, and where they are.

    Args:
        rows: Which of the tensors.
        tensors: These tensors.
        word_bytes: Divides their addresses and sizes.
    """

    def __init__(self, rows: list[int], tensors: Sequence[torch.Tensor], word_bytes: int) -> None:
        self.rows, self._word = rows, _WORDS[word_bytes]
        self._uses_kernel = runs_kernel(tensors[0])
        if self._uses_kernel:
            numbers = [(tensor.data_ptr(), tensor.nbytes // word_bytes) for tensor in tensors]
            self._addresses, self._words = torch.tensor(numbers, device=tensors[0].device).T.contiguous()

    def sums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """(rows,) int64. Of ``tensors``, all that `SampledSums` was called with, the reference reads those of the table."""
        if not self._uses_kernel:
            return torch.stack([_sum_reference(_as_words(tensors[row], self._word)) for row in self.rows])
        sums = torch.empty_like(self._addresses)
        word = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}[self._word]
        _sample_kernel[(len(self.rows),)](
            self._addresses, self._words, sums, WORD=word, SAMPLES=SAMPLES, SPREAD=_SPREAD, MIX=_MIX
        )
        return sums


def _tables(tensors: Sequence[torch.Tensor]) -> list[_Table]:
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for row, tensor in enumerate(tensors):
        if tensor.nbytes and tensor.data_ptr():  # a storage may have been resized to nothing
            word_bytes = next(size for size in _WORDS if not (tensor.data_ptr() | tensor.nbytes) % size)
            groups.setdefault((tensor.device, word_bytes), []).append(row)
    return [_Table(rows, [tensors[row] for row in rows], size) for (_, size), rows in groups.items()]


def _as_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """The memory of a tensor without gaps, in the order of addresses: (words,)."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8).view(word)


def _sum_reference(words: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch: () int64."""
    number = torch.arange(min(SAMPLES, len(words)), device=words.device)
    at = number
    if len(words) > SAMPLES:
        at = number * len(words) // SAMPLES + (((number * _SPREAD) & 0xFFFFFFFF) * (len(words) // SAMPLES) >> 32)
    mixed = words[at].to(torch.int64) * (2 * number + 1)
    return ((mixed ^ (mixed >> 32)) * _MIX).sum()


if triton is not None:

    @triton.jit
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
