"""Copies between entries and pages, against loops over Python's integers."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from megatron_hybrid_prefix.ops import engine_copies, page_copies
from megatron_hybrid_prefix.ops.engine_copies import copy_ranges
from megatron_hybrid_prefix.ops.page_copies import copy_pages
from tests.kernels.places import DEVICES

PAGES, ENTRIES, UNTOUCHED = 40, 5, -7
# layers, shape and type of an entry, bytes of a page, bytes before the entry's: entries of one page, of several, of a part of the
# last one; that begin inside a page; words of 8, 4, 2 bytes and single bytes; chunks that are cut by the end of a page or layer
CASES = [
    (1, (64,), torch.int64, 512, 0), (1, (300,), torch.int32, 512, 4), (2, (4, 9), torch.bfloat16, 512, 0),
    (3, (50,), torch.float32, 512, 1536), (3, (15,), torch.bfloat16, 512, 90), (3, (7,), torch.uint8, 512, 509),
    (2, (5, 900), torch.int64, 33280, 8), (4, (1200,), torch.float32, 5120, 0),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    for name in ("_TO_HOST_PROGRAMS", "_FROM_HOST_PROGRAMS"):
        monkeypatch.setattr(page_copies, name, 3)  # each copies several chunks, the last ones fewer
    monkeypatch.setattr(page_copies, "multiprocessors", lambda device: 5)  # so 3 beside others


def random_bytes(generator, *shape):
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def case(layers, shape, dtype, page_bytes, start):
    """Bytes of entries (layers, entries, 2, bytes) and of pages, two entries, and the pages of each."""
    generator, dice = torch.Generator().manual_seed(start), random.Random(start)
    words = random_bytes(generator, layers, ENTRIES, 2, torch.Size(shape).numel() * dtype.itemsize)
    row_pages = -(-(start + layers * words.shape[-1]) // page_bytes)
    memory = random_bytes(generator, PAGES, page_bytes)
    ids, pages = dice.sample(range(ENTRIES), 2), dice.sample(range(PAGES), 2 * row_pages)
    return words, memory, ids, [pages[:row_pages], pages[row_pages:]]


def entries_of(words, dtype, shape):
    """Entries strided over layers and entries; a single layer with a step of 0, as in one memory."""
    entries = words[:, :, 1].view(dtype).unflatten(2, shape)
    if len(entries) > 1:
        return entries
    return entries.as_strided(entries.shape, (0, *entries.stride()[1:]), entries.storage_offset())


@pytest.mark.parametrize(
    ("device", "pages_on"),
    [
        ("cpu", "device, beside others"),  # where all memory is one
        *(
            pytest.param("cuda", place, marks=pytest.mark.gpu(gib=1))
            for place in ("host", "device", "device, beside others")
        ),
    ],
)
@pytest.mark.parametrize(("layers", "shape", "dtype", "page_bytes", "start"), CASES)
@pytest.mark.parametrize("to_pages", [True, False], ids=["to_pages", "to_entries"])
def test_each_byte_is_copied_and_summed(device, layers, shape, dtype, page_bytes, start, pages_on, to_pages):
    words, memory, ids, of_row = case(layers, shape, dtype, page_bytes, start)
    layer_bytes = words.shape[-1]
    after_memory, after_words, sums = memory.tolist(), words.tolist(), [UNTOUCHED] * 2
    for row, entry in enumerate(ids):
        for at in range(layers * layer_bytes):
            page, inside = of_row[row][(start + at) // page_bytes], (start + at) % page_bytes
            own = after_words[at // layer_bytes][entry][1]
            if to_pages:
                after_memory[page][inside] = own[at % layer_bytes]
            else:
                own[at % layer_bytes] = after_memory[page][inside]
            word, shift = (start + at) // 8, (start + at) % 8 * 8
            sums[row] += (own[at % layer_bytes] << shift) * (2 * word + 1)

    words = words.to(device)
    memory = memory.to(device) if pages_on != "host" else memory.pin_memory() if device == "cuda" else memory
    found = torch.full((2,), UNTOUCHED, device=device)
    entries = entries_of(words, dtype, shape)
    on_device = (torch.tensor(part, device=device) for part in (ids, of_row))
    beside = "beside" in pages_on
    copy_pages(entries, memory, *on_device, to_pages=to_pages, start_bytes=start, sums=found, beside=beside)
    if device == "cuda":
        torch.cuda.synchronize()
    assert memory.tolist() == after_memory
    assert words.tolist() == after_words
    assert [value % 2**64 for value in found.tolist()] == [value % 2**64 for value in sums]


class Stream:
    """A stream of the simulated driver."""

    cuda_stream, device_index = 7, 0


class BatchDriver:
    """What the driver's copy of many ranges does, on the CPU. Returns ``error`` if it is not 0."""

    def __init__(self, error=0):
        self.error, self.calls = error, []

    def __call__(self, targets, sources, sizes, stream):
        assert stream == 7
        if not self.error:
            self.calls.append(list(sizes))
            for each in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(*each)
        return self.error


@pytest.mark.parametrize("device", DEVICES)
def test_without_sums_and_without_words(device):
    memory, entries = torch.arange(128, dtype=torch.uint8).view(2, 64), torch.zeros(1, 1, 70, dtype=torch.uint8)
    memory, entries = memory.pin_memory() if device == "cuda" else memory, entries.to(device)
    ids, pages = torch.tensor([0], device=device), torch.tensor([[1, 0]], device=device)
    copy_pages(entries, memory, ids, pages, to_pages=False)
    assert entries.flatten().tolist() == [*range(64, 128), *range(6)]
    sums = torch.ones(1, dtype=torch.int64, device=device)
    copy_pages(entries[:, :, :0], memory, ids, pages, to_pages=False, sums=sums)
    assert sums.tolist() == [1]


def test_pages_that_are_too_few_or_too_many_are_refused():
    entries, ids = torch.zeros(1, 1, 62, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    memory = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"8 \+ 62 bytes do not fit in 1 pages of 64"):
        copy_pages(entries, memory, ids, torch.zeros(1, 1, dtype=torch.int64), to_pages=True, start_bytes=8)
    pages = torch.zeros(1, 1, dtype=torch.int64).expand(1, 2**25)  # 2 GiB
    with pytest.raises(ValueError, match=r"33554432 pages of 64 bytes for one entry"):
        copy_pages(entries, memory, ids, pages, to_pages=True)


def after_copies(here, there, ranges, to_host):
    """What both hold after copies of ranges: (start here, start there, bytes)."""
    expected = [here.clone(), there.clone()]
    for start, host_start, size in ranges:
        mine, its = slice(start, start + size), slice(host_start, host_start + size)
        expected[to_host][its if to_host else mine] = here[mine] if to_host else there[its]
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to_host", [True, False])
def test_ranges(device, to_host):
    here, there = (torch.arange(100, dtype=torch.uint8) + first for first in (0, 100))
    ranges = [(3, 90, 10), (50, 0, 1), (99, 7, 0)]
    expected = after_copies(here, there, ranges, to_host)
    here, there = (here.to(device), there.pin_memory()) if device == "cuda" else (here, there)
    copy_ranges(here, there, ranges, to_host=to_host)
    if device == "cuda":
        torch.cuda.synchronize()
    assert [here.tolist(), there.tolist()] == [each.tolist() for each in expected]
    for outside in ((91, 0, 10), (0, 91, 10), (-1, 0, 2), (0, -1, 2)):
        with pytest.raises(AssertionError):
            copy_ranges(here, there, [outside], to_host=to_host)


@pytest.mark.parametrize("way", ["together", "not supported", "old driver", "default stream"])
@pytest.mark.parametrize("to_host", [True, False])
def test_ranges_by_the_simulated_driver(way, to_host, monkeypatch):
    """One call for all ranges, or for each turn to the host; one for each range if the driver cannot."""
    here, there = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    ranges = [(0, 100, 5), (20, 30, 64), (90, 0, 27), (199, 199, 1)]
    if not to_host:
        here, there = there, here
    expected = after_copies(here, there, ranges, to_host)
    batch, stream, passed, single = BatchDriver(801 * (way == "not supported")), Stream(), [], []

    def copy(target, source, size, handle):
        assert handle == stream.cuda_stream
        single.append(size)
        ctypes.memmove(target, source, size)
        return 0

    if way == "default stream":
        stream.cuda_stream = 0
    monkeypatch.setattr(engine_copies, "_driver_batch_copy", lambda: None if way == "old driver" else batch)
    monkeypatch.setattr(engine_copies, "_driver_copy", lambda: copy)
    monkeypatch.setattr(engine_copies, "_let_others_pass", passed.append)
    monkeypatch.setattr(engine_copies, "TURN_BYTES", 32)
    engine_copies._copy_by_engines(engine_copies._addresses(here, there, ranges, to_host), stream, to_host=to_host)
    assert torch.equal(here, expected[0]) and torch.equal(there, expected[1])
    turns = [[5, 27], [32], [5, 27], [1]] if to_host else [[5, 64, 27, 1]]
    assert batch.calls == (turns if way == "together" else [])
    assert single == ([] if way == "together" else [size for turn in turns for size in turn])
    assert len(passed) == (len(turns) if to_host else 0)
    batch.error = 700
    if way in ("together", "not supported"):
        with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync returned error 700"):
            engine_copies._copy_by_engines([(1, 2, 3)], stream, to_host=to_host)


def test_others_may_pass_after_a_number_is_written(monkeypatch):
    written, word, errors = [], torch.zeros(1, dtype=torch.int32), iter((0, 801, 700))

    def write(*arguments):
        written.append(arguments)
        return next(errors)

    monkeypatch.setattr(engine_copies, "_driver_write", lambda: write)
    monkeypatch.setattr(engine_copies, "_word", lambda device: word)
    for _ in range(2):  # 801: not supported; they wait longer then
        engine_copies._let_others_pass(Stream())
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 returned error 700"):
        engine_copies._let_others_pass(Stream())
    assert written == [(7, word.data_ptr(), 0, 0)] * 3


@pytest.mark.gpu(gib=1)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_many_ranges_on_a_stream_of_their_own(to_host, batched, monkeypatch):
    """More than a turn, in random places."""
    if not batched:
        monkeypatch.setattr(engine_copies, "_driver_batch_copy", lambda: None)
    size, count = 3 * 2**19 + 24, 23
    dice = random.Random(0)
    here = torch.randint(0, 256, (count * size,), dtype=torch.uint8, device="cuda")
    there = torch.randint(0, 256, (2 * count * size,), dtype=torch.uint8).pin_memory()
    places = dice.sample(range(2 * count), count)
    before, on_device = there.clone(), here.cpu()
    stream = torch.cuda.Stream()
    with stream:
        copy_ranges(here, there, [(at * size, to * size, size) for at, to in enumerate(places)], to_host=to_host)
    stream.synchronize()
    if to_host:
        before.view(2 * count, size)[places] = on_device.view(count, size)
        assert torch.equal(there, before)
    else:
        assert torch.equal(here.cpu(), before.view(2 * count, size)[places].flatten())


@pytest.mark.gpu(gib=1)
def test_a_refused_copy_is_an_error(monkeypatch):
    monkeypatch.setattr(engine_copies, "_driver_batch_copy", lambda: None)
    monkeypatch.setattr(engine_copies, "_driver_copy", lambda: lambda *args: 700)
    with pytest.raises(RuntimeError, match="cuMemcpyAsync returned error 700"):
        copy_ranges(torch.zeros(8, dtype=torch.uint8, device="cuda"), torch.zeros(8), [(0, 0, 8)], to_host=True)
