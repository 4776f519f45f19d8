"""Host memory that is pinned, and the page size it is divided by."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

from megatron_hybrid_prefix.support.arithmetic import ceil_div

_ALIGNMENT_BYTES = 512
_MOST_PAGES_AN_ENTRY = 16
_HUGE_PAGE_BYTES = 2 << 20


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
