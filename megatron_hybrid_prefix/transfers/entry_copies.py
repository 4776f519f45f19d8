"""`EntryCopies`: copies entries between their places on the device, a staging buffer there, and pages on the host.

On the device an entry is spread over all layers; in a staging buffer and in pages it is a row of bytes. Entries of one kind are
copied in batches, by one launch for each tensor. Everything runs on the current stream: who calls decides on the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice

import torch

from megatron_hybrid_prefix.ops.engine_copies import copy_ranges
from megatron_hybrid_prefix.ops.page_copies import WORD_BYTES, copy_pages
from megatron_hybrid_prefix.ops.slot_copies import as_words
from megatron_hybrid_prefix.ops.triton_or_torch import ids_on_device
from megatron_hybrid_prefix.ops.wrong_entries import zero_wrong
from megatron_hybrid_prefix.support.arithmetic import ceil_div, round_up
from megatron_hybrid_prefix.tiers.units import BlockTransfer, EntryKind
from megatron_hybrid_prefix.transfers.host_pages import HostPages

logger = logging.getLogger(__name__)

FIRST_RANGES = 4  # of a batch to the device: launched before the others
ENGINE_BYTES = 2**19  # the copy engines, which pause 1 to 3 us after each copy, do not copy smaller pages

type Tensors = Mapping[EntryKind, Sequence[torch.Tensor]]
"""The device tensors of each kind, (layers, KV blocks or slots, *shape), contiguous inside a block or slot."""


@dataclass(slots=True)
class Batch:
    """Entries of one kind that are copied together. Ids are int64 on the device, and there once they are uploaded."""

    units: list[BlockTransfer]
    staging: Staging
    half: int  # of the staging buffer
    start: int  # byte of the staging buffer
    device_ids: torch.Tensor = field(init=False)  # (units,) KV blocks or slots
    pages: torch.Tensor = field(init=False)  # (units, pages of an entry)
    sums: torch.Tensor = field(init=False)  # (units,) checksums of what is copied; zeros before
    is_here: bool = True  # False: it could not be copied to the staging buffer

    @property
    def kind(self) -> EntryKind:
        """Kind of its entries."""
        return self.units[0].tag.kind


class Staging:
    """A buffer on the device of at most ``size`` bytes, and no more than the pages of these copies have.

    Its halves are used in turn; each holds an entry at least.
    """

    def __init__(self, copies: EntryCopies, size: int) -> None:
        rows_bytes = copies.row_bytes.values()
        entries = min(size, copies.pages.memory.numel()) // 2 // max(rows_bytes)
        self.half_bytes = max(1, entries) * max(rows_bytes)
        self.memory = torch.zeros(2 * self.half_bytes, dtype=torch.uint8, device=copies.device)
        self.row_ids = torch.arange(self.half_bytes // min(rows_bytes), device=copies.device)
        self.used_last = 1  # half


class EntryCopies:
    """Copies of entries on the device, and between it and the host's pages.

    Args:
        tensors: Called at each copy: the tensors' addresses change when the engine is suspended.
        pages: The pages on the host.
        device: Device of the tensors.

    Attributes:
        tensors, pages, device: See Args.
        entry_bytes: Bytes of an entry on this rank, by kind, rounded up to whole checksum words.
        row_bytes: Bytes of the pages of an entry, by kind.
        by_engine: Whether pages are large enough for the copy engines.
    """

    def __init__(self, tensors: Callable[[], Tensors], pages: HostPages, device: torch.device) -> None:
        self.tensors, self.pages, self.device = tensors, pages, device
        self.by_engine = pages.page_bytes >= ENGINE_BYTES
        self.row_bytes = {kind: count * pages.page_bytes for kind, count in pages.sizes.pages_of.items()}
        sizes = {kind: [each[:, 0].nbytes for each in own] for kind, own in tensors().items()}
        self.entry_bytes = {kind: round_up(sum(own), WORD_BYTES) for kind, own in sizes.items()}
        self._used_pages = {kind: max(1, ceil_div(size, pages.page_bytes)) for kind, size in self.entry_bytes.items()}
        # Of each tensor, in a row.
        self._starts = {kind: list(accumulate(own[:-1], initial=0)) for kind, own in sizes.items()}

    def batches(self, units: Sequence[BlockTransfer], staging: Staging) -> list[Batch]:
        """Batches, in the order of the transfers. Those that follow each other in one half of the buffer fit there together.

        A batch has consecutive transfers of one kind, to or from different places on the device.
        """
        batches: list[Batch] = []
        taken: set[int] = set()  # KV blocks or slots of the batch
        used = staging.half_bytes  # of the half: a new one is begun
        for unit in units:
            size = self.row_bytes[unit.tag.kind]
            full = used + size > staging.half_bytes
            if full:
                staging.used_last, used = 1 - staging.used_last, 0
            if full or unit.device_id in taken or unit.tag.kind != batches[-1].kind:
                half = staging.used_last
                batches.append(Batch([], staging, half, half * staging.half_bytes + used))
                taken.clear()
            batches[-1].units.append(unit)
            taken.add(unit.device_id)
            used += size
        return batches

    def upload(self, batches: Sequence[Batch], *more: Sequence[int]) -> list[torch.Tensor]:
        """Uploads the ids of these batches, in one copy with more of them. Returns the batches' sums as one tensor, and the others."""
        groups: list[Sequence[int]] = []
        for batch in batches:
            count = self._used_pages[batch.kind]
            groups.append([unit.device_id for unit in batch.units])
            groups.append([page for unit in batch.units for page in unit.pages[:count]])
        counts = [len(batch.units) for batch in batches]
        sums, *ids = self.ids([0] * sum(counts), *groups, *more)
        ids_of_batches, own_sums = iter(ids), sums.split_with_sizes(counts) if len(counts) > 1 else (sums,)
        for batch, batch.sums in zip(batches, own_sums, strict=True):
            batch.device_ids, batch.pages = next(ids_of_batches), next(ids_of_batches).view(len(batch.units), -1)
        return [sums, *ids_of_batches]

    def ids(self, *groups: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Each group on the device, (ids,) int64; in one copy."""
        together = ids_on_device(chain(*groups), self.device)
        return together.split_with_sizes([len(group) for group in groups])

    def gather(self, batch: Batch, *, beside: bool = False) -> None:
        """From their places to the staging buffer. Sums what is copied. ``beside``: leaves half of the device to other kernels."""
        self._copy_parts(batch, staged=True, to_pages=True, beside=beside)

    def to_pages(self, batch: Batch) -> None:
        """From the staging buffer to the pages; by the copy engines, if pages are large enough."""
        if self.by_engine:
            copy_ranges(batch.staging.memory, self.pages.memory, self._ranges(batch), to_host=True)
            return
        rows, row_ids = self._rows(batch)
        copy_pages(rows[None, :, : self.entry_bytes[batch.kind]], self.pages.rows, row_ids, batch.pages, to_pages=True)

    def to_staging(self, batch: Batch) -> None:
        """From the pages to the staging buffer, by the copy engines."""
        ranges = self._ranges(batch)
        for few in (islice(ranges, FIRST_RANGES), ranges):  # the host link is busy while the others are prepared
            copy_ranges(batch.staging.memory, self.pages.memory, few, to_host=False)

    def to_places(self, batch: Batch) -> None:
        """From where `to_staging` copies them to, or from the pages if those are small, to their places. Sums what is copied."""
        self._copy_parts(batch, staged=self.by_engine, to_pages=False)

    def _copy_parts(self, batch: Batch, *, staged: bool, to_pages: bool, beside: bool = False) -> None:
        """Copies the tensors of entries to or from the staging buffer, or the pages. Sums what is copied."""
        memory, pages = self.pages.rows, batch.pages
        if staged:
            memory, row_ids = self._rows(batch)
            pages = row_ids[:, None]
        for tensor, start in zip(self.tensors()[batch.kind], self._starts[batch.kind], strict=True):
            where = tensor, memory, batch.device_ids, pages
            copy_pages(*where, to_pages=to_pages, start_bytes=start, sums=batch.sums, beside=beside)

    def _rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch in its staging buffer, (units, bytes of all pages of an entry), and the rows' ids, (units,)."""
        count, row_bytes = len(batch.units), self.row_bytes[batch.kind]
        rows = batch.staging.memory[batch.start : batch.start + count * row_bytes].view(count, row_bytes)
        return rows, batch.staging.row_ids[:count]

    def _ranges(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """See `HostPages.ranges`."""
        row_bytes = self.row_bytes[batch.kind]
        rows = ((batch.start + row * row_bytes, unit.pages) for row, unit in enumerate(batch.units))
        return self.pages.ranges(rows, self.entry_bytes[batch.kind])

    def zero_wrong(self, batch: Batch, sums: torch.Tensor) -> None:
        """Fills the places of the batch's entries with zeros if they have other checksums than ``sums``, by first page."""
        for tensor in self.tensors()[batch.kind]:
            zero_wrong(tensor, batch.device_ids, batch.sums, sums, batch.pages[:, 0])

    def zero(self, units: Sequence[BlockTransfer]) -> None:
        """Fills the places of these transfers with zeros."""
        for kind, tensors in self.tensors().items():
            (ids,) = self.ids([unit.device_id for unit in units if unit.tag.kind == kind])
            for tensor in tensors:
                (words,) = as_words(tensor)  # not every type can be filled
                words.index_fill_(1, ids, 0)


def succeeds(move: Callable[[Batch], None], batch: Batch) -> bool:
    """Calls ``move(batch)``, which copies it; logs its error. Returns whether there was none."""
    try:
        move(batch)
    except (RuntimeError, OSError) as error:
        what, unit = "KV blocks" if batch.kind == EntryKind.KV else "states", batch.units[0]
        logger.error(
            "a copy of %d %s from the %s to the %s failed: %s", len(batch.units), what, unit.source, unit.target, error
        )
        return False
    return True


def places(unit: BlockTransfer) -> tuple[int, ...]:
    """Pages, and the KV block or slot: below 0, to be another number than any page."""
    return (*unit.pages, -1 - unit.tag.kind - len(EntryKind) * unit.device_id)


def without_shared_pages(units: Sequence[BlockTransfer]) -> Iterator[Sequence[BlockTransfer]]:
    """Consecutive transfers that use different pages."""
    first, used = 0, set[int]()
    for number, unit in enumerate(units):
        if not used.isdisjoint(unit.pages):
            yield units[first:number]
            first, used = number, set()
        used.update(unit.pages)
    yield units[first:]
