"""`HostPages`: host memory in pages, pinned if there is a GPU, and the tags and checksums of the entries there."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.units import BlockTransfer, EntryKind, Tag

_ALIGNMENT_BYTES = 512
_MOST_PAGES_AN_ENTRY = 16
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSizes:
    """Sizes of a host tier: the same on all ranks. Without arguments: there is none.

    Attributes:
        pages: Number of pages.
        page_bytes: Bytes per page.
        pages_of: Pages per entry, by kind.
    """

    pages: int = 0
    page_bytes: int = 0
    pages_of: Mapping[EntryKind, int] = field(default_factory=lambda: dict.fromkeys(EntryKind, 1))


class HostPages:
    """Memory in pages of one size, and what is known of the entries there.

    Args:
        sizes: Their number and size.
        device: Device that copies to and from the pages.
        for_threads: Whether threads read checksums.

    Attributes:
        sizes: See Args.
        memory: (bytes of all pages,) uint8.
        rows: The same, (pages, bytes).
        page_bytes: Bytes per page.
        tags: Tags of the entries that were copied there, by first page. Entries that were lost or overwritten have none.
        sums: (pages,) int64 on the device: checksums of what was copied there, without the tag, by first page.
        sums_seen: (pages,) int64 on the host: `sums` as of the last store from the device; only kept for threads.

    Raises:
        RuntimeError, MemoryError: The host lacks the memory, or the driver refuses to pin it.
    """

    def __init__(self, sizes: HostSizes, device: torch.device, *, for_threads: bool) -> None:
        self.sizes, self.page_bytes = sizes, sizes.page_bytes
        size, on_gpu = sizes.pages * sizes.page_bytes, device.type == "cuda"
        self.memory = allocate(size) if on_gpu else torch.empty(size, dtype=torch.uint8)
        self.rows = self.memory.view(sizes.pages, sizes.page_bytes)
        self._unpin: weakref.finalize[[torch.Tensor, torch.device], HostPages] | None = None
        if on_gpu:
            pin(self.memory, device)
            # Unpin before freeing: else the next memory at this address cannot be pinned.
            self._unpin = weakref.finalize(self, unpin, self.memory, device)
            self._unpin.atexit = False
        self._view = memoryview(self.memory.numpy())
        self.tags: dict[int, Tag] = {}
        self.sums = torch.zeros(sizes.pages, dtype=torch.int64, device=device)
        self.sums_seen = self.sums
        if for_threads and on_gpu:
            self.sums_seen = torch.zeros(sizes.pages, dtype=torch.int64).pin_memory()

    def close(self) -> None:
        """Free the memory; garbage collection does so, too."""
        if self._unpin is not None:
            self._unpin()
        self.memory, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        self.rows = self.memory.view(0, self.page_bytes)

    def views(self, pages: Sequence[int], size: int) -> list[memoryview]:
        """An entry's bytes in its pages, one view after the other.

        At least one view, which is empty on a pipeline stage without such layers: all ranks wait for the same entries.
        """
        parts = self.ranges([(0, pages)], size)
        return [self._view[first : first + length] for _, first, length in parts] or [self._view[:0]]

    def ranges(self, rows: Iterable[tuple[int, Sequence[int]]], size: int) -> Iterator[tuple[int, int, int]]:
        """The bytes of entries: (first in a buffer, first in the pages, count). Adjacent ones are one range.

        Args:
            rows: Where in the buffer each entry begins, and its pages.
            size: Bytes of an entry.
        """
        start = first = length = 0  # of the range that may grow
        for row, pages in rows:
            for page, at in zip(pages, range(0, size, self.page_bytes), strict=False):
                if start + length != row + at or first + length != page * self.page_bytes:
                    if length:
                        yield start, first, length
                    start, first, length = row + at, page * self.page_bytes, 0
                length += min(self.page_bytes, size - at)
        if length:
            yield start, first, length

    # -- entries, by their first page ----------------------------------------------------------------------------------

    def holds(self, unit: BlockTransfer) -> bool:
        """Whether the entry of this transfer is in its pages."""
        return self.tags.get(unit.pages[0]) == unit.tag

    def put_tags(self, units: Iterable[BlockTransfer]) -> None:
        """The entries of these transfers are in their pages, once the current stream gets here."""
        self.tags |= {unit.pages[0]: unit.tag for unit in units}

    def put_sums(self, first_pages: torch.Tensor, sums: torch.Tensor) -> None:
        """Note the checksums of entries, once the current stream gets here.

        Args:
            first_pages: (entries,) int64 on the device; all differ.
            sums: (entries,) int64 on the device.
        """
        self.sums.index_copy_(0, first_pages, sums)

    def drop(self, units: Iterable[BlockTransfer]) -> None:
        """Nothing is known of the pages of these transfers."""
        for unit in units:
            self.tags.pop(unit.pages[0], None)

    def show_sums(self) -> None:
        """The current stream copies all checksums to `sums_seen`."""
        if self.sums_seen is not self.sums:
            self.sums_seen.copy_(self.sums, non_blocking=True)

    def seen_checksum(self, page: int, tag: Tag) -> int:
        """The checksum of an entry over its tag and bytes; `show_sums` has run after it was stored."""
        return int(self.sums_seen[page]) ^ tag.digest


# -- the memory ---------------------------------------------------------------------------------------------------------


def choose_page_bytes(entry_bytes: Iterable[int]) -> int:
    """Page size for entries of these sizes: little waste in an entry's last page, and few pages per entry.

    Args:
        entry_bytes: Bytes of a KV block and of a state; 0 if there is none.
    """
    sizes = [size for size in entry_bytes if size]
    parts = range(1, _MOST_PAGES_AN_ENTRY + 1)
    choices = {ceil_div(size, part * _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes for part in parts}
    choices = {page for page in choices if page * _MOST_PAGES_AN_ENTRY >= min(sizes)}

    def waste(page: int) -> float:
        return max(ceil_div(size, page) * page / size for size in sizes)

    # Waste below 5 % is not worth more copies.
    return min(choices, key=lambda page: (max(waste(page), 1.05), -page), default=_ALIGNMENT_BYTES)


def allocate(size: int) -> torch.Tensor:
    """Memory to `pin`, (size,) uint8, zeros. It begins on a multiple of 2 MiB, and lives as long as tensors use it.

    PyTorch's own begins 64 bytes after such a multiple: then every write of a warp ends inside a line of 128 bytes, and takes one
    packet more over the host link: 0.92 of the speed. It is in huge pages, where the system has them, because these are made and pinned
    in half the time. The child of a fork has none of it: Linux would copy pinned memory at once.

    Args:
        size: Bytes.

    Raises:
        MemoryError: The system refuses.
    """
    try:
        space = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    space.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a Linux without them
        space.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(space, dtype=torch.uint8)  # keeps the space
    skip = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[skip : skip + size]


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Register host memory with the driver. (PyTorch's own allocator of pinned memory rounds up to powers of two.)

    Raises:
        RuntimeError: The driver refuses.
    """
    waiting = _to_unpin[:]
    _to_unpin.clear()
    for others in waiting:
        unpin(*others)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    except RuntimeError:
        # The CUDA runtime keeps the error until it is read: the next launch would report it.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo `pin`, after all copies are done."""
    if torch.cuda.is_current_stream_capturing():  # the garbage collector may run during a capture: no driver calls then
        _to_unpin.append((memory, device))
        return
    torch.cuda.synchronize(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


_to_unpin: list[tuple[torch.Tensor, torch.device]] = []  # freed during a capture
