"""`HostArena`: carries out transfers between the device and pinned host memory, and checks what comes back.

On the device an entry is spread over all layers, on the host it lies in a row. So a store gathers entries into a staging
buffer on the device, from where they go to the host in few large copies; a load goes the other way round. Stores and loads
have a stream each, as the link to the host has two directions. What follows a store (a forward that writes to the block, a
load into it) waits for the gathering only, not for the copies to the host.

Every entry has a tag and a checksum, both made when it was stored: the checksum on the device, over every byte, where it
costs a fraction of the copy. The expected ones stay on the device.

With a tier behind the host, entries go there and come back with their tag and checksum. These moves are the CPU's: it waits
until the pages are nobody's, and copies.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.ops.slot_copies import copy_slots, ids_on_device
from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.pinned import pin, unpin
from megatron_hybrid_prefix.tiers.queue import DeviceQueue, HostQueue, Mark
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag

logger = logging.getLogger(__name__)

STORE_STAGING_BYTES = 512 * 2**20  # so much can be evicted at once without waiting for the link
LOAD_STAGING_BYTES = 64 * 2**20
_LOADS = 4096  # that may be known at a time


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
        behind: Takes what the host evicts, and gives it back; None: there is none.

    Raises:
        RuntimeError, MemoryError: The host has not so much memory, or does not let it be pinned.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[EntryKind, Sequence[torch.Tensor]]],
        *,
        pages: int,
        page_bytes: int,
        pages_of: Mapping[EntryKind, int],
        device: torch.device | str,
        verify: bool = True,
        behind: Tier | None = None,
    ) -> None:
        self._tensors = tensors
        self._device = torch.device(device)
        self.page_bytes = page_bytes
        self._row_bytes = {kind: count * page_bytes for kind, count in pages_of.items()}
        self._verify = verify
        self._behind = behind
        self.memory = torch.empty(pages * page_bytes, dtype=torch.uint8)
        on_gpu = self._device.type == "cuda"
        self._unpin: weakref.finalize[[torch.Tensor, torch.device], HostArena] | None = None
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
        self._gathered: Mark = None  # the last time that stores had read all, until somebody waited for it
        self._stored: Mark = None  # the end of the last stores
        self._last_load: Mark = None
        self._new_pages: set[int] = set()  # first pages of what may still be on its way to the host
        self._loaded: dict[int, Mark] = {}  # by load
        self._in_flight: dict[int | None, set[object]] = {}  # pages and places on the device, by load
        self.bytes_stored = self.bytes_loaded = 0
        self.behind_stats = TierStats()  # moves to and from the tier behind: refused ones, bytes, seconds

    def close(self) -> None:
        """Gives the memory back; so does the end of the arena."""
        if self._unpin is not None:
            self._unpin()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def bytes_of(self, kind: EntryKind) -> int:
        """Bytes of an entry on this rank."""
        return sum(part_bytes for _, part_bytes in self._parts(kind))

    def carry_out(self, units: Sequence[BlockTransfer]) -> None:
        """Launches the moves in their order. The model may write to what was stored after `wait_for_stores`.

        What fails is logged; loads of it count as failed, on this rank.
        """
        for (source, target), group in groupby(units, key=lambda unit: (unit.source, unit.target)):
            run = list(group)
            if source == DEVICE:
                self._run_stores(run)
            elif target == DEVICE:
                self._run_loads(run)
            else:
                self._run_behind(run, take=source == HOST)

    def _run_stores(self, units: Sequence[BlockTransfer]) -> None:
        places = [place for unit in units for place in _places(unit)]
        if len(set(places)) == len(places):  # then their order does not matter, and fewer batches cost the host less
            units = sorted(units, key=lambda unit: unit.tag.kind is EntryKind.STATE)
        # Loads that the model has not waited for, and that read these pages or write what is stored.
        touched = set().union(*self._in_flight.values())
        after = self._last_load if any(_places(unit) & touched for unit in units) else None
        with self.stores.running(after):
            for batch in self._batches(units, self._store_staging):
                self._try(self._store, batch)
            self._stored = self.stores.mark()
        self._new_pages.update(unit.pages[0] for unit in units)

    def _run_loads(self, units: Sequence[BlockTransfer]) -> None:
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

    def _run_behind(self, units: Sequence[BlockTransfer], *, take: bool) -> None:
        start = time.perf_counter()
        # Nothing that is on its way may still read or write these pages: from here on the CPU does.
        for queue, mark in ((self.stores, self._stored), (self.loads, self._last_load)):
            if mark is not None:
                queue.finish(mark)
        for _, group in groupby(units, key=lambda unit: unit.tag.kind):
            batch = list(group)
            try:
                if take:
                    self._take(batch)
                else:
                    self._give(batch)
            except Exception as error:  # a plugin's code may raise anything
                logger.error("the tier behind the host: %d %s failed: %s", len(batch), _kinds(batch[0]), error)
                if take:
                    self.behind_stats.full += len(batch)
        seconds = time.perf_counter() - start
        self.behind_stats.seconds += seconds
        self.behind_stats.seconds_waited += seconds

    def _take(self, units: Sequence[BlockTransfer]) -> None:
        """The tier behind is offered what was stored in these pages."""
        assert self._behind is not None
        stored = [unit for unit in units if self._tags.get(unit.pages[0]) == unit.tag]
        sums = self._sums[self._ids([unit.pages[0] for unit in stored])].tolist()
        size = self._entry_bytes(units[0].tag.kind)
        entries = []
        for unit, checksum in zip(stored, sums, strict=True):
            row = torch.empty(size, dtype=torch.uint8)
            for start, page, length in self._pieces([unit], size):
                row[start : start + length] = self._host(page, length)
            entries.append(Entry(unit.tag, memoryview(row.numpy()), checksum ^ unit.tag.digest))
        kept = sum(self._behind.put(entries)) if entries else 0
        self.behind_stats.full += len(units) - kept
        self.behind_stats.bytes_stored += size * kept

    def _give(self, units: Sequence[BlockTransfer]) -> None:
        """What the tier behind has of these entries comes into their pages; the loads of others fail by their tag."""
        assert self._behind is not None
        for unit in units:
            self._tags.pop(unit.pages[0], None)  # until it is there
        size = self._entry_bytes(units[0].tag.kind)
        rows = [torch.empty(size, dtype=torch.uint8) for _ in units]
        sums = self._behind.get([unit.tag for unit in units], [memoryview(row.numpy()) for row in rows])
        given = [(unit, row, found) for unit, row, found in zip(units, rows, sums, strict=True) if found is not None]
        for unit, row, _ in given:
            for start, page, length in self._pieces([unit], size):
                self._host(page, length).copy_(row[start : start + length])
        pages = self._ids([unit.pages[0] for unit, *_ in given])
        expected = [found ^ unit.tag.digest for unit, _, found in given]
        self._sums[pages] = torch.tensor(expected, dtype=torch.int64).to(self._device)
        self._tags |= {unit.pages[0]: unit.tag for unit, *_ in given}
        self.behind_stats.bytes_loaded += size * len(given)

    def _try(self, move: Callable[[Sequence[BlockTransfer]], None], batch: Sequence[BlockTransfer]) -> None:
        try:
            move(batch)
        except (RuntimeError, OSError) as error:
            logger.error("a copy of %d %s failed: %s", len(batch), _kinds(batch[0]), error)
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

    def _batches(self, units: Sequence[BlockTransfer], staging: torch.Tensor) -> Iterator[list[BlockTransfer]]:
        """Runs of units of one kind that fit the staging buffer, and of which no two write to the same place."""
        batch: list[BlockTransfer] = []
        written: set[int | None] = set()
        for unit in units:
            target = unit.device_id if unit.target == DEVICE else unit.pages[0]
            full = (len(batch) + 1) * self._row_bytes[unit.tag.kind] > len(staging)
            if batch and (full or target in written or unit.tag.kind != batch[0].tag.kind):
                yield batch
                batch, written = [], set[int | None]()
            batch.append(unit)
            written.add(target)
        if batch:
            yield batch

    def _store(self, units: Sequence[BlockTransfer]) -> None:
        kind = units[0].tag.kind
        for unit in units:
            self._tags.pop(unit.pages[0], None)  # until it is there
        staging = self._store_staging
        rows, views, valid_bytes = self._rows(staging, kind, len(units))
        sources, targets = self._ids(_device_ids(units)), self._ids(range(len(units)))
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

    def _load(self, units: Sequence[BlockTransfer]) -> None:
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
                self._failed.update(_load_ids([unit]))
        if self._verify and valid_bytes:
            expected = self._sums[self._ids([unit.pages[0] for unit in units])]
            wrong = checksum_rows(rows[:, :valid_bytes].view(torch.int64)) != expected
            loads = self._ids([load_id % _LOADS for load_id in _load_ids(units)])
            self._bad_rows.index_add_(0, loads, wrong.to(torch.int32))
        sources, targets = self._ids(range(len(units))), self._ids(_device_ids(units))
        for (tensor, _), view in zip(self._parts(kind), views, strict=True):
            copy_slots(view, tensor, sources, targets)
        self.bytes_loaded += valid_bytes * len(units)

    def _parts(self, kind: EntryKind) -> list[tuple[torch.Tensor, int]]:
        """The tensors as (layers, entries, bytes), each with its bytes of an entry in all layers."""
        parts = []
        for tensor in self._tensors()[kind]:
            part = tensor.flatten(2).view(torch.uint8)
            parts.append((part, part.shape[0] * part.shape[2]))
        return parts

    def _rows(self, staging: torch.Tensor, kind: EntryKind, count: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        """Rows of a staging buffer, (count, row bytes); the place of each tensor in them, (layers, count, bytes); bytes in use."""
        rows = staging[: count * self._row_bytes[kind]].view(count, -1)
        views, start = [], 0
        for part, part_bytes in self._parts(kind):
            layers = part.shape[0]
            views.append(rows[:, start : start + part_bytes].unflatten(1, (layers, part.shape[2])).transpose(0, 1))
            start += part_bytes
        return rows, views, ceil_div(start, 8) * 8

    def _entry_bytes(self, kind: EntryKind) -> int:
        """Bytes of an entry, as many as are checked."""
        return ceil_div(self.bytes_of(kind), 8) * 8

    def _pieces(self, units: Sequence[BlockTransfer], valid_bytes: int) -> Iterator[tuple[int, int, int]]:
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


def _places(unit: BlockTransfer) -> set[object]:
    """Pages, and the place on the device."""
    return {*unit.pages, (unit.tag.kind, unit.device_id)}


def _device_ids(units: Sequence[BlockTransfer]) -> list[int]:
    """Each transfer's KV block or slot; all begin or end on the device."""
    ids = [unit.device_id for unit in units if unit.device_id is not None]
    assert len(ids) == len(units)
    return ids


def _load_ids(units: Sequence[BlockTransfer]) -> list[int]:
    """Each transfer's load; all end on the device."""
    ids = [unit.load_id for unit in units if unit.load_id is not None]
    assert len(ids) == len(units)
    return ids


def _kinds(unit: BlockTransfer) -> str:
    what = "KV blocks" if unit.tag.kind == EntryKind.KV else "states"
    return f"{what} from the {unit.source} to the {unit.target}"
