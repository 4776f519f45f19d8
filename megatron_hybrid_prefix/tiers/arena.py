"""`HostArena`: carries out transfers between the device and pinned host memory, and checks what comes back.

On the device an entry is spread over all layers, on the host it lies in a row. So a store gathers entries into a staging
buffer on the device, from where they go to the host in few large copies; a load goes the other way round. Stores and loads
have a stream each, as the link to the host has two directions. What follows a store (a forward that writes to the block, a
load into it) waits for the gathering only, not for the copies to the host.

Every entry has a tag and a checksum, both made when it was stored: the checksum on the device, over every byte, where it
costs a fraction of the copy. The expected ones stay on the device.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.ops.slot_copies import copy_slots, ids_on_device
from megatron_hybrid_prefix.tiers.queue import DeviceQueue, HostQueue
from megatron_hybrid_prefix.tiers.units import Kind, Tag, TransferUnit

logger = logging.getLogger(__name__)

STORE_STAGING_BYTES = 512 * 2**20  # so much can be evicted at once without waiting for the link
LOAD_STAGING_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 512
_MOST_PAGES_AN_ENTRY = 16
_LOADS = 4096  # that may be known at a time


def choose_page_bytes(entry_bytes: Iterable[int]) -> int:
    """Size of a page, so that entries of these sizes waste little of their last one, with few pages each.

    Args:
        entry_bytes: Of a KV block and of a state; 0 where there is none.
    """
    sizes = [size for size in entry_bytes if size]
    parts = range(1, _MOST_PAGES_AN_ENTRY + 1)
    choices = {ceil_div(size, part * _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes for part in parts}
    choices = {page for page in choices if page * _MOST_PAGES_AN_ENTRY >= min(sizes)}

    def waste(page: int) -> float:
        return max(ceil_div(size, page) * page / size for size in sizes)

    # Less waste than a twentieth is not worth more copies.
    return min(choices, key=lambda page: (max(waste(page), 1.05), -page), default=_ALIGNMENT_BYTES)


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Registers host memory with the driver. (PyTorch's allocator of pinned memory rounds up to powers of two.)

    Raises:
        RuntimeError: The driver refused.
    """
    late = _pinned[:]
    _pinned.clear()
    for others in late:
        unpin(*others)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    except RuntimeError:
        # It stays the runtime's last error until somebody asks, and the next launch would take it for its own.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undoes `pin`, when all copies are over."""
    if torch.cuda.is_current_stream_capturing():  # where the collector of garbage runs now: no calls to the driver then
        _pinned.append((memory, device))
        return
    torch.cuda.synchronize(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


_pinned: list[tuple[torch.Tensor, torch.device]] = []  # nobody's any more


class HostArena:
    """Pinned memory in pages, and the transfers to and from it.

    Args:
        tensors: Asked at each transfer for the tensors on the device, by kind: each (layers, KV blocks or slots, *shape),
            contiguous inside a block or slot. (They move when the engine is suspended.)
        pages: How many pages.
        page_bytes: Bytes of one.
        pages_of: Pages of an entry, by kind.
        device: Of the tensors.
        verify: Whether checksums are made and compared.

    Raises:
        RuntimeError, MemoryError: The host has not so much memory, or does not let it be pinned.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[Kind, Sequence[torch.Tensor]]],
        *,
        pages: int,
        page_bytes: int,
        pages_of: Mapping[Kind, int],
        device: torch.device | str,
        verify: bool = True,
    ) -> None:
        self._tensors = tensors
        self._device = torch.device(device)
        self.page_bytes = page_bytes
        self._row_bytes = {kind: count * page_bytes for kind, count in pages_of.items()}
        self._verify = verify
        self.memory = torch.empty(pages * page_bytes, dtype=torch.uint8)
        on_gpu = self._device.type == "cuda"
        self._unpin: weakref.finalize | None = None
        if on_gpu and pages:
            pin(self.memory, self._device)
            # Memory that is freed while it is pinned: the next one that lies there could not be.
            self._unpin = weakref.finalize(self, unpin, self.memory, self._device)
            self._unpin.atexit = False
        self.stores, self.loads = (DeviceQueue(self._device) if on_gpu else HostQueue() for _ in range(2))
        most_bytes = max(self._row_bytes.values(), default=0)
        self._store_staging, self._load_staging = (
            torch.zeros(
                max(1, min(size, pages * page_bytes) // max(1, most_bytes)) * most_bytes,
                dtype=torch.uint8,
                device=self._device,
            )
            for size in (STORE_STAGING_BYTES, LOAD_STAGING_BYTES)
        )
        self._sums = torch.zeros(max(1, pages), dtype=torch.int64, device=self._device)  # by first page
        self._bad_rows = torch.zeros(_LOADS, dtype=torch.int32, device=self._device)  # by load
        self._bad_rows_seen = torch.zeros(_LOADS, dtype=torch.int32)
        if on_gpu:
            self._bad_rows_seen = self._bad_rows_seen.pin_memory()
        self._tags: dict[int, Tag] = {}  # by first page
        self._failed: set[int] = set()  # loads
        self._gathered: object | None = None  # the last time that stores had read all, until somebody waited for it
        self._stored: object | None = None  # the end of the last stores
        self._last_load: object | None = None
        self._new_pages: set[int] = set()  # first pages of what may still be on its way to the host
        self._loaded: dict[int, object] = {}  # by load
        self._in_flight: dict[int | None, set[object]] = {}  # pages and places on the device, by load
        self.bytes_stored = self.bytes_loaded = 0

    def close(self) -> None:
        """Gives the memory back; so does the end of the arena."""
        if self._unpin is not None:
            self._unpin()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of an entry on this rank."""
        return sum(part_bytes for _, part_bytes in self._parts(kind))

    def carry_out(self, units: Sequence[TransferUnit]) -> None:
        """Launches the moves in their order. The model may write to what was stored after `wait_for_stores`.

        What fails is logged; loads of it count as failed, on this rank.
        """
        for to_host, group in groupby(units, key=lambda unit: unit.to_host):
            run = list(group)
            if to_host:
                self._run_stores(run)
            else:
                self._run_loads(run)

    def _run_stores(self, units: Sequence[TransferUnit]) -> None:
        places = [place for unit in units for place in _places(unit)]
        if len(set(places)) == len(places):  # then their order does not matter, and fewer batches cost the host less
            units = sorted(units, key=lambda unit: unit.tag.kind is Kind.STATE)
        # Loads that the model has not waited for, and that read these pages or write what is stored.
        touched = set().union(*self._in_flight.values())
        after = self._last_load if any(_places(unit) & touched for unit in units) else None
        with self.stores.running(after):
            for batch in self._batches(units, self._store_staging):
                self._try(self._store, batch)
            self._stored = self.stores.mark()
        self._new_pages.update(unit.pages[0] for unit in units)

    def _run_loads(self, units: Sequence[TransferUnit]) -> None:
        new = any(unit.pages[0] in self._new_pages for unit in units)
        with self.loads.running(self._gathered, self._stored if new else None):
            if new:
                self._new_pages.clear()
            loads = sorted({unit.load_id for unit in units if unit.load_id is not None})
            self._bad_rows[self._ids([load % _LOADS for load in loads])] = 0
            for batch in self._batches(units, self._load_staging):
                self._try(self._load, batch)
            self._bad_rows_seen.copy_(self._bad_rows, non_blocking=True)
            self._last_load = self.loads.mark()
            for unit in units:
                self._in_flight.setdefault(unit.load_id, set()).update(_places(unit))
            self._loaded |= dict.fromkeys(loads, self._last_load)

    def _try(self, move: Callable[[Sequence[TransferUnit]], None], batch: Sequence[TransferUnit]) -> None:
        try:
            move(batch)
        except (RuntimeError, OSError) as error:
            logger.error("a copy of %d %s failed: %s", len(batch), _direction(batch[0]), error)
            for unit in batch:
                self._tags.pop(unit.pages[0], None)
                if unit.load_id is not None:
                    self._failed.add(unit.load_id)

    def wait_for_stores(self) -> None:
        """What the model launches from now on runs after everything that is to be stored was read."""
        if self._gathered is not None:
            self.stores.wait(self._gathered)
            self._gathered = None

    def wait_for_load(self, load_id: int) -> None:
        """What the model launches from now on runs after this load."""
        if load_id in self._loaded:
            self.loads.wait(self._loaded[load_id])

    def forget(self, load_id: int) -> None:
        """Nobody will ask how the load ended; the model has waited for it."""
        self._loaded.pop(load_id, None)
        self._in_flight.pop(load_id, None)
        self._failed.discard(load_id)

    def finish(self) -> None:
        """The CPU waits until all moves are over."""
        for queue in (self.stores, self.loads):
            with queue.running():
                mark = queue.mark()
            queue.finish(mark)

    def has_failed(self, load_id: int) -> bool:
        """Whether something of the load was not what had been stored; it is forgotten with the question.

        Ask after the model has used what was loaded: it does not have to be waited for then.
        """
        mark, failed = self._loaded.get(load_id), load_id in self._failed
        self.forget(load_id)
        if mark is None and not isinstance(self.loads, HostQueue):
            return failed
        self.loads.finish(mark)
        return failed or bool(self._bad_rows_seen[load_id % _LOADS])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _batches(self, units: Sequence[TransferUnit], staging: torch.Tensor) -> Iterator[list[TransferUnit]]:
        """Runs of units of one kind that fit the staging buffer, and of which no two write to the same place."""
        batch: list[TransferUnit] = []
        written: set[int] = set()
        for unit in units:
            target = unit.pages[0] if unit.to_host else unit.device_id
            full = (len(batch) + 1) * self._row_bytes[unit.tag.kind] > len(staging)
            if batch and (full or target in written or unit.tag.kind != batch[0].tag.kind):
                yield batch
                batch, written = [], set()
            batch.append(unit)
            written.add(target)
        if batch:
            yield batch

    def _store(self, units: Sequence[TransferUnit]) -> None:
        kind = units[0].tag.kind
        for unit in units:
            self._tags.pop(unit.pages[0], None)  # until it is there
        staging = self._store_staging
        rows, views, valid_bytes = self._rows(staging, kind, len(units))
        sources, targets = self._ids([unit.device_id for unit in units]), self._ids(range(len(units)))
        for (tensor, _), view in zip(self._parts(kind), views, strict=True):
            copy_slots(tensor, view, sources, targets)
        if self._verify and valid_bytes:
            self._sums[self._ids([unit.pages[0] for unit in units])] = checksum_rows(
                rows[:, :valid_bytes].view(torch.int64)
            )
        self._gathered = self.stores.mark()
        for start, page, length in self._pieces(units, valid_bytes):
            self._host(page, length).copy_(staging[start : start + length], non_blocking=True)
        self._tags |= {unit.pages[0]: unit.tag for unit in units}
        self.bytes_stored += valid_bytes * len(units)

    def _load(self, units: Sequence[TransferUnit]) -> None:
        units = sorted(units, key=lambda unit: unit.pages)  # neighbours on the host become one copy
        kind = units[0].tag.kind
        staging = self._load_staging
        rows, views, valid_bytes = self._rows(staging, kind, len(units))
        for start, page, length in self._pieces(units, valid_bytes):
            staging[start : start + length].copy_(self._host(page, length), non_blocking=True)
        for unit in units:
            found = self._tags.get(unit.pages[0])
            if found != unit.tag:
                logger.error("host entry in page %d is %s, expected %s", unit.pages[0], found, unit.tag)
                self._failed.add(unit.load_id)
        if self._verify and valid_bytes:
            expected = self._sums[self._ids([unit.pages[0] for unit in units])]
            wrong = checksum_rows(rows[:, :valid_bytes].view(torch.int64)) != expected
            loads = self._ids([unit.load_id % _LOADS for unit in units])
            self._bad_rows.index_add_(0, loads, wrong.to(torch.int32))
        sources, targets = self._ids(range(len(units))), self._ids([unit.device_id for unit in units])
        for (tensor, _), view in zip(self._parts(kind), views, strict=True):
            copy_slots(view, tensor, sources, targets)
        self.bytes_loaded += valid_bytes * len(units)

    def _parts(self, kind: Kind) -> list[tuple[torch.Tensor, int]]:
        """The tensors as (layers, entries, bytes), each with its bytes of an entry in all layers."""
        parts = []
        for tensor in self._tensors()[kind]:
            part = tensor.flatten(2).view(torch.uint8)
            parts.append((part, part.shape[0] * part.shape[2]))
        return parts

    def _rows(self, staging: torch.Tensor, kind: Kind, count: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        """Rows of a staging buffer, (count, row bytes); the place of each tensor in them, (layers, count, bytes); bytes in use."""
        rows = staging[: count * self._row_bytes[kind]].view(count, -1)
        views, start = [], 0
        for part, part_bytes in self._parts(kind):
            layers = part.shape[0]
            views.append(rows[:, start : start + part_bytes].unflatten(1, (layers, part.shape[2])).transpose(0, 1))
            start += part_bytes
        return rows, views, ceil_div(start, 8) * 8

    def _pieces(self, units: Sequence[TransferUnit], valid_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Copies that move the rows: (start in the staging buffer, first page, bytes); neighbours are one copy."""
        page_bytes = self.page_bytes
        found: list[list[int]] = []
        for row, unit in enumerate(units):
            for index, page in enumerate(unit.pages):
                length = min(page_bytes, valid_bytes - index * page_bytes)
                if length <= 0:
                    break
                start = row * self._row_bytes[unit.tag.kind] + index * page_bytes
                last = found[-1] if found else None
                if (
                    last is not None
                    and last[0] + last[2] == start
                    and last[1] * page_bytes + last[2] == page * page_bytes
                ):
                    last[2] += length
                else:
                    found.append([start, page, length])
        yield from ((start, page, length) for start, page, length in found)

    def _host(self, page: int, length: int) -> torch.Tensor:
        return self.memory[page * self.page_bytes : page * self.page_bytes + length]

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        return ids_on_device(ids, self._device)


def _places(unit: TransferUnit) -> set[object]:
    """Pages, and the place on the device."""
    return {*unit.pages, (unit.tag.kind, unit.device_id)}


def _direction(unit: TransferUnit) -> str:
    what = "KV blocks" if unit.tag.kind == Kind.KV else "states"
    return f"{what} to the host" if unit.to_host else f"{what} from the host"
