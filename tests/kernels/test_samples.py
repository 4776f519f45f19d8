"""Sums of samples of tensors: against plain Python, and which changes they show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.ops.samples import SAMPLES, SampledSums
from tests.kernels.places import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64),
    *(torch.bool, torch.complex64, torch.complex128, torch.int8),
]


def bytes_of(numbers: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (numbers,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )


def naive_sum(data: bytes, word_bytes: int) -> int:
    """In Python's integers, modulo 2^64."""
    words = [data[at : at + word_bytes] for at in range(0, len(data), word_bytes)]
    count, total = len(words), 0
    for number in range(min(SAMPLES, count)):
        at = number
        if count > SAMPLES:
            at = number * count // SAMPLES + (number * 2654435761 % 2**32 * (count // SAMPLES) >> 32)
        value = int.from_bytes(words[at], "little", signed=word_bytes > 1) * (2 * number + 1)
        value = (value + 2**63) % 2**64 - 2**63
        total += (value ^ (value >> 32)) * -7046029254386353131
    return (total + 2**63) % 2**64 - 2**63


@settings(max_examples=15 if INTERPRETED else 60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.sampled_from(DTYPES)), max_size=6), st.integers(0, 3)
)
def test_sums_are_those_of_plain_python(places, seed):
    """Any dtypes, sizes and addresses."""
    tensors, wanted = [], []
    for size, start, dtype in places:
        data = bytes_of((size + start) * dtype.itemsize, seed)
        tensors.append((data % 2 if dtype == torch.bool else data).view(dtype)[start:])
        memory = tensors[-1].contiguous().view(torch.uint8).cpu().numpy().tobytes() if size else b""
        wanted.append(naive_sum(memory, min(8, dtype.itemsize)))
    sampled = SampledSums()
    assert sampled(tensors) == wanted
    assert sampled(tensors[::-1]) == wanted[::-1]  # other addresses than before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_any_order_of_memory(dtype):
    tensor = bytes_of(96 * 40 * 16)[: 96 * 40 * dtype.itemsize].view(dtype).view(96, 40)
    if dtype == torch.bool:
        tensor = tensor.to(torch.uint8).bitwise_and(1).to(torch.bool)
    sampled = SampledSums()
    assert sampled([tensor]) == sampled([tensor.T]) == sampled([tensor.clone()])
    assert sampled([tensor]) != sampled([tensor.flip(0).contiguous()])


@pytest.mark.parametrize("values", [1, 7, 1000])
def test_each_bit_of_a_small_tensor_counts(values):
    tensor = torch.randn(values, dtype=torch.bfloat16, device=DEVICE)
    sampled = SampledSums()
    before, bits = sampled([tensor]), tensor.view(torch.int16)
    for bit in (0, 9, 15):
        for place in {0, values // 2, values - 1}:
            bits[place] ^= 1 << bit if bit < 15 else -(2**15)
            assert sampled([tensor]) != before, (bit, place)
            bits[place] ^= 1 << bit if bit < 15 else -(2**15)
    assert sampled([tensor]) == before
    tensor.neg_()  # an even number of highest bits
    assert sampled([tensor]) != before


def test_samples_are_spread_over_rows_and_columns():
    """No column, and no band of rows, of a matrix of any usual width stays unseen."""
    for columns in (512, 768, 1000, 4096):
        tensor = torch.zeros(2 * columns, columns, dtype=torch.int64, device=DEVICE)
        sampled = SampledSums()
        clean = sampled([tensor])
        for band in range(8):
            rows = slice(band * columns // 4, (band + 1) * columns // 4)
            tensor[rows] = 1
            assert sampled([tensor]) != clean, (columns, "rows", band)
            tensor.zero_()
            part = slice(band * columns // 8, (band + 1) * columns // 8)
            tensor[:, part] = 1
            assert sampled([tensor]) != clean, (columns, "columns", band)
            tensor.zero_()


def test_storages_that_are_empty_or_freed_are_not_read():
    freed = torch.ones(100, device=DEVICE)
    sampled = SampledSums()
    assert sampled([freed, torch.empty(0, device=DEVICE)])[1] == 0
    freed.untyped_storage().resize_(0)
    assert sampled([freed]) == [0]
    assert sampled([]) == []


def test_tables_hold_no_tensor():
    """A trainer that frees weights gets their memory back."""
    tensor = torch.ones(5000, device=DEVICE)
    sampled = SampledSums()
    sampled([tensor])
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert storage.expired()
