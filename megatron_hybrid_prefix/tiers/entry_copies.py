"""`EntryCopies`: copies entries between their places on the device, a staging buffer there, and pages on the host.

On the device an entry is spread over all layers; in a staging buffer and in pages it is a row of bytes. Entries of one kind are
copied in batches, by one launch for each tensor. Everything runs on the current stream: who calls decides on the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.ops.engine_copies import copy_ranges, copy_to_host
from megatron_hybrid_prefix.ops.page_copies import WORD_BYTES, copy_pages, sum_entries
from megatron_hybrid_prefix.ops.slot_copies import as_words, ids_on_device
from megatron_hybrid_prefix.ops.wrong_entries import zero_wrong
from megatron_hybrid_prefix.tiers.host_pages import HostPages
from megatron_hybrid_prefix.tiers.units import DEVICE, BlockTransfer, EntryKind

logger = logging.getLogger(__name__)

FIRST_RANGES = 4  # of a batch to the device: launched before the others
ENGINE_BYTES = 2**19  # the copy engines, which pause 1 to 3 us after each copy, do not copy smaller pages

type Tensors = Mapping[EntryKind, Sequence[torch.Tensor]]
"""The device tensors of each kind, (layers, KV blocks or slots, *shape), contiguous inside a block or slot."""


@dataclass(slots=True)
class Batch:
    """Entries of one kind that are copied together. Ids are int64 on the device, and there once they are uploaded."""

    units: list[BlockTransfer]
    half: int  # of the staging buffer
    start: int  # byte of the staging buffer
    device_ids: torch.Tensor  # (units,) KV blocks or slots
    pages: torch.Tensor  # (units, pages of an entry)
    sums: torch.Tensor  # (units,) checksums of what is copied; zeros before
    is_here: bool = True  # False: it could not be copied to the staging buffer

    @property
    def kind(self) -> EntryKind:
        """Kind of its entries."""
        return self.units[0].tag.kind


class Staging:
    """A buffer on the device. Its halves are used in turn.

    Args:
        size: Bytes of both halves, at most; each holds an entry at least.
        row_bytes: Bytes of the pages of an entry, by kind.
        device: The device.
    """

    def __init__(self, size: int, row_bytes: Mapping[EntryKind, int], device: torch.device) -> None:
        most_bytes = max(row_bytes.values(), default=0)
        self.half_bytes = max(1, size // 2 // max(1, most_bytes)) * most_bytes
        self.memory = torch.zeros(2 * self.half_bytes, dtype=torch.uint8, device=device)
        self.row_ids = torch.arange(self.half_bytes // max(1, min(row_bytes.values(), default=1)), device=device)
        self.used_last = 1  # half


class EntryCopies:
    """Copies of entries on the device, and between it and the host's pages.

    Args:
        tensors: Called at each copy: the tensors' addresses change when the engine is suspended.
        pages: The pages on the host.
        pages_of: Pages per entry, by kind.
        device: Device of the tensors.

    Attributes:
        bytes: Bytes of an entry on this rank, by kind.
        entry_bytes: The same, rounded up to whole checksum words.
        row_bytes: Bytes of the pages of an entry, by kind.
        by_engine: Whether pages are large enough for the copy engines.
    """

    def __init__(
        self,
        tensors: Callable[[], Tensors],
        pages: HostPages,
        *,
        pages_of: Mapping[EntryKind, int],
        device: torch.device,
    ) -> None:
        self._tensors, self._pages, self._device = tensors, pages, device
        self.by_engine = pages.page_bytes >= ENGINE_BYTES
        self.row_bytes = {kind: count * pages.page_bytes for kind, count in pages_of.items()}
        sizes = {kind: [each[:, 0].nbytes for each in own] for kind, own in tensors().items()}
        self.bytes = {kind: sum(own) for kind, own in sizes.items()}
        self.entry_bytes = {kind: ceil_div(size, WORD_BYTES) * WORD_BYTES for kind, size in self.bytes.items()}
        self._used_pages = {kind: ceil_div(size, pages.page_bytes) for kind, size in self.entry_bytes.items()}
        self._starts = {
            kind: list(accumulate(own[:-1], initial=0)) for kind, own in sizes.items()
        }  # of each tensor, in a row
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)

    def batches(self, units: Sequence[BlockTransfer], staging: Staging | None) -> Iterator[Batch]:
        """Batches, in the order of the transfers. Those that follow each other in one half of the buffer fit there together.

        A batch has consecutive transfers of one kind that write to different places.

        Args:
            units: The transfers.
            staging: The buffer; None for those that do not use it.
        """
        batch: list[BlockTransfer] = []
        written: set[int | None] = set()
        start = used = 0  # of the batch; of the half
        if staging is not None and units:
            staging.used_last = 1 - staging.used_last
        for unit in units:
            target = unit.device_id if unit.target == DEVICE else unit.pages[0]
            size = self.row_bytes[unit.tag.kind]
            full = staging is not None and used + size > staging.half_bytes
            if batch and (full or target in written or unit.tag.kind != batch[0].tag.kind):
                yield self._batch(batch, staging, start)
                batch, written, start = [], set[int | None](), used
            if staging is not None and full:
                staging.used_last, start, used = 1 - staging.used_last, 0, 0
            batch.append(unit)
            written.add(target)
            used += size
        if batch:
            yield self._batch(batch, staging, start)

    def _batch(self, units: list[BlockTransfer], staging: Staging | None, start: int) -> Batch:
        half, nothing = 0 if staging is None else staging.used_last, self._nothing
        place = start if staging is None else half * staging.half_bytes + start
        return Batch(units, half, place, nothing, nothing, nothing)

    def upload(self, batches: Sequence[Batch], *more: Sequence[int]) -> list[torch.Tensor]:
        """Uploads the ids of these batches, in one copy with more of them. Returns the batches' sums as one tensor, and the others."""
        groups: list[Sequence[int]] = []
        for batch in batches:
            count = max(1, self._used_pages[batch.kind])
            groups.append(device_ids(batch.units))
            groups.append([page for unit in batch.units for page in unit.pages[:count]])
        counts = [len(batch.units) for batch in batches]
        sums, *ids = self.ids([0] * sum(counts), *groups, *more)
        ids_of_batches, own_sums = iter(ids), sums.split_with_sizes(counts) if len(counts) > 1 else (sums,)
        for batch, batch.sums in zip(batches, own_sums, strict=True):
            batch.device_ids, batch.pages = next(ids_of_batches), next(ids_of_batches).view(len(batch.units), -1)
        return [sums, *ids_of_batches]

    def ids(self, *groups: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Each group on the device, (ids,) int64; in one copy."""
        together = ids_on_device(chain(*groups), self._device)
        return together.split_with_sizes([len(group) for group in groups])

    def gather(self, batch: Batch, staging: Staging, *, beside: bool = False) -> None:
        """From their places to the staging buffer. Sums what is copied.

        Args:
            batch: The entries.
            staging: The buffer.
            beside: Leave half of the device to other kernels.
        """
        rows = _rows(staging, batch, self.row_bytes[batch.kind])
        self._copy_parts(batch, rows, staging.row_ids, to_pages=True, beside=beside)

    def to_pages(self, batch: Batch, staging: Staging) -> None:
        """From the staging buffer to the pages; by the copy engines, if pages are large enough."""
        (self._to_pages_by_engine if self.by_engine else self._to_pages_by_kernel)(batch, staging)

    def _to_pages_by_engine(self, batch: Batch, staging: Staging) -> None:
        copy_ranges(staging.memory, self._pages.memory, self._ranges(batch), to_host=True)

    def _to_pages_by_kernel(self, batch: Batch, staging: Staging) -> None:
        rows = _rows(staging, batch, self.row_bytes[batch.kind])[None, :, : self.entry_bytes[batch.kind]]
        copy_pages(rows, self._pages.rows, staging.row_ids[: rows.shape[1]], batch.pages, to_pages=True)

    def straight_to_pages(self, batch: Batch) -> None:
        """From their places to the pages, by the copy engines. The batch need not be uploaded yet."""
        moves = list(zip(device_ids(batch.units), (unit.pages for unit in batch.units), strict=True))
        for tensor, start in self._parts(batch.kind):
            copy_to_host(tensor, self._pages.rows, moves, start_bytes=start)

    def sum(self, batch: Batch) -> None:
        """Sums the entries in their places."""
        for tensor, start in self._parts(batch.kind):
            sum_entries(tensor, batch.device_ids, batch.sums, start_bytes=start)

    def to_staging(self, batch: Batch, staging: Staging) -> None:
        """From the pages to the staging buffer, by the copy engines."""
        ranges = self._ranges(batch)
        for few in (islice(ranges, FIRST_RANGES), ranges):  # the host link is busy while the others are prepared
            copy_ranges(staging.memory, self._pages.memory, few, to_host=False)

    def _ranges(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """The bytes of a batch: (first in the staging buffer, first in the pages, count)."""
        for start, page, length in self.pieces(batch.units):
            yield batch.start + start, page * self._pages.page_bytes, length

    def to_places(self, batch: Batch, staging: Staging | None) -> None:
        """From the staging buffer to their places, or from the pages if it is None. Sums what is copied."""
        rows = None if staging is None else _rows(staging, batch, self.row_bytes[batch.kind])
        self._copy_parts(batch, rows, None if staging is None else staging.row_ids, to_pages=False)

    def _copy_parts(
        self,
        batch: Batch,
        rows: torch.Tensor | None,
        row_ids: torch.Tensor | None,
        *,
        to_pages: bool,
        beside: bool = False,
    ) -> None:
        """Copies the tensors of entries to or from rows of a staging buffer, or None: the pages. Sums what is copied."""
        memory, pages = self._pages.rows, batch.pages
        if rows is not None and row_ids is not None:
            memory, pages = rows, row_ids[: len(rows), None]
        for tensor, start in self._parts(batch.kind):
            copy_pages(
                tensor,
                memory,
                batch.device_ids,
                pages,
                to_pages=to_pages,
                start_bytes=start,
                sums=batch.sums,
                beside=beside,
            )

    def _parts(self, kind: EntryKind) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors of a kind, and the byte of an entry's pages from which each lies there."""
        return zip(self._tensors()[kind], self._starts[kind], strict=True)

    def pieces(self, units: Sequence[BlockTransfer]) -> Iterator[tuple[int, int, int]]:
        """The copies for these rows: (start in the rows, first page, bytes). Adjacent pieces are one copy.

        Args:
            units: Transfers of one kind; their rows follow each other.
        """
        kind = units[0].tag.kind
        page_bytes, row_bytes, valid_bytes = self._pages.page_bytes, self.row_bytes[kind], self.entry_bytes[kind]
        start = first = length = 0  # of the piece that may grow
        for row, unit in enumerate(units):
            for index in range(self._used_pages[kind]):
                at, page = row * row_bytes + index * page_bytes, unit.pages[index]
                if start + length != at or first * page_bytes + length != page * page_bytes:
                    if length:
                        yield start, first, length
                    start, first, length = at, page, 0
                length += min(page_bytes, valid_bytes - index * page_bytes)
        if length:
            yield start, first, length

    def zero_wrong(self, batch: Batch, sums: torch.Tensor) -> None:
        """Fills the places of the batch's entries with zeros if they have other checksums than ``sums``, by first page."""
        for tensor in self._tensors()[batch.kind]:
            zero_wrong(tensor, batch.device_ids, batch.sums, sums, batch.pages[:, 0])

    def zero(self, units: Sequence[BlockTransfer]) -> None:
        """Fills the places of these transfers with zeros."""
        for kind, tensors in self._tensors().items():
            (ids,) = self.ids(device_ids([unit for unit in units if unit.tag.kind == kind]))
            for tensor in tensors:
                (words,) = as_words(tensor)  # not every type can be filled
                words.index_fill_(1, ids, 0)


def _rows(staging: Staging, batch: Batch, row_bytes: int) -> torch.Tensor:
    """A batch in a staging buffer, (units, bytes of all pages of an entry)."""
    count = len(batch.units)
    return staging.memory[batch.start : batch.start + count * row_bytes].view(count, row_bytes)


def succeeds(move: Callable[[Batch], None], batch: Batch) -> bool:
    """Calls ``move(batch)``, which copies it; logs its error. Returns whether there was none."""
    try:
        move(batch)
    except (RuntimeError, OSError) as error:
        logger.error("a copy of %d %s failed: %s", len(batch.units), kinds(batch.units[0]), error)
        return False
    return True


def kinds(unit: BlockTransfer) -> str:
    """What such transfers move, for a message."""
    what = "KV blocks" if unit.tag.kind == EntryKind.KV else "states"
    return f"{what} from the {unit.source} to the {unit.target}"


def places(unit: BlockTransfer) -> tuple[int, ...]:
    """Pages, and the KV block or slot: below 0, to be another number than any page."""
    assert unit.device_id is not None
    return (*unit.pages, -1 - unit.tag.kind - len(EntryKind) * unit.device_id)


def device_ids(units: Sequence[BlockTransfer]) -> list[int]:
    """Each transfer's KV block or slot; all begin or end on the device."""
    ids = [unit.device_id for unit in units if unit.device_id is not None]
    assert len(ids) == len(units)
    return ids


def without_shared_pages(units: Sequence[BlockTransfer]) -> Iterator[Sequence[BlockTransfer]]:
    """Consecutive transfers that use different pages."""
    pages = [page for unit in units for page in unit.pages]
    if len(set(pages)) == len(pages):
        yield units
        return
    first, used = 0, set[int]()
    for number, unit in enumerate(units):
        if not used.isdisjoint(unit.pages):
            yield units[first:number]
            first, used = number, set()
        used.update(unit.pages)
    yield units[first:]
