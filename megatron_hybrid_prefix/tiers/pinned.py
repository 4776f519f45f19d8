"""Pinned host memory, and the page size it is divided by."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div

_ALIGNMENT_BYTES = 512
_MOST_PAGES_AN_ENTRY = 16


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
