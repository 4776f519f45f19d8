"""`TierMoves`: moves entries between host memory and a `Tier` behind it, at once, in the engine's thread."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.entry_copies import EntryCopies, kinds, without_shared_pages
from megatron_hybrid_prefix.tiers.host_pages import HostPages, PageContents
from megatron_hybrid_prefix.tiers.loads import Loads
from megatron_hybrid_prefix.tiers.stores import Stores
from megatron_hybrid_prefix.tiers.units import BlockTransfer

logger = logging.getLogger(__name__)


class MovesBehind:
    """What moves between host memory and any tier behind it share.

    Args:
        copies: How entries are copied.
        pages: The pages on the host.
        contents: What they hold.
        stores: The stores, which write to the pages.
        loads: The loads, which read the pages.
    """

    def __init__(
        self, copies: EntryCopies, pages: HostPages, contents: PageContents, stores: Stores, loads: Loads
    ) -> None:
        self._copies, self._pages, self._contents, self._stores, self._loads = copies, pages, contents, stores, loads
        self._stats = TierStats()

    @property
    def stats(self) -> TierStats:
        """Transfers to and from the tier."""
        return dataclasses.replace(self._stats)

    def _note_arrived(self, arrived: Sequence[tuple[BlockTransfer, int]]) -> None:
        """These entries have arrived in their pages; with the checksum that came with each."""
        if not arrived:
            return
        units = [unit for unit, _ in arrived]
        first_pages, expected = self._copies.ids(
            [unit.pages[0] for unit in units], [checksum ^ unit.tag.digest for unit, checksum in arrived]
        )
        self._contents.put_sums(first_pages, expected)
        self._contents.put_tags(units)
        self._stats.bytes_loaded += sum(self._copies.entry_bytes(unit.tag.kind) for unit in units)


class TierMoves(MovesBehind):
    """See the top of this file.

    Args:
        tier: The tier.
        *parts: See `MovesBehind`.
    """

    def __init__(self, tier: Tier, *parts: *tuple[EntryCopies, HostPages, PageContents, Stores, Loads]) -> None:
        super().__init__(*parts)
        self._tier = tier

    def store(self, units: Sequence[BlockTransfer]) -> None:
        """Offer the entries in these pages to the tier. An error is logged; the entries are not stored then."""
        for batch in self._run(units, self._store):
            self._stats.full += len(batch)

    def load(self, units: Sequence[BlockTransfer]) -> None:
        """Read entries from the tier into these pages. An error is logged. A missing entry fails its load, by its tag."""
        for different in without_shared_pages(units):
            self._run(different, self._load)

    def _run(
        self, units: Sequence[BlockTransfer], move: Callable[[list[BlockTransfer]], None]
    ) -> list[list[BlockTransfer]]:
        """Calls ``move`` with the transfers of one kind at a time. Returns those whose call failed."""
        start = time.perf_counter()
        # The CPU uses these pages next: wait for all transfers in flight.
        for queue, mark in ((self._stores.queue, self._stores.stored), (self._loads.queue, self._loads.last)):
            if mark is not None:
                queue.finish(mark)
        failed = []
        for _, group in groupby(units, key=lambda unit: unit.tag.kind):
            batch = list(group)
            try:
                move(batch)
            except Exception as error:  # a plugin's code may raise anything
                logger.error("the tier behind the host: %d %s failed: %s", len(batch), kinds(batch[0]), error)
                failed.append(batch)
        seconds = time.perf_counter() - start
        self._stats.seconds += seconds
        self._stats.seconds_waited += seconds
        return failed

    def _store(self, units: list[BlockTransfer]) -> None:
        stored = [unit for unit in units if self._contents.holds(unit)]
        (first_pages,) = self._copies.ids([unit.pages[0] for unit in stored])
        sums = self._contents.sums[first_pages].tolist()
        size = self._copies.entry_bytes(units[0].tag.kind)
        entries = []
        for unit, checksum in zip(stored, sums, strict=True):
            row = torch.empty(size, dtype=torch.uint8)
            for start, page, length in self._copies.pieces([unit], size):
                row[start : start + length] = self._pages.part(page, length)
            entries.append(Entry(unit.tag, memoryview(row.numpy()), checksum ^ unit.tag.digest))
        kept = sum(self._tier.put(entries)) if entries else 0
        self._stats.full += len(units) - kept
        self._stats.bytes_stored += size * kept

    def _load(self, units: list[BlockTransfer]) -> None:
        self._contents.drop(units)  # until `put_tags`
        size = self._copies.entry_bytes(units[0].tag.kind)
        rows = [torch.empty(size, dtype=torch.uint8) for _ in units]
        sums = self._tier.get([unit.tag for unit in units], [memoryview(row.numpy()) for row in rows])
        given = [(unit, row, found) for unit, row, found in zip(units, rows, sums, strict=True) if found is not None]
        for unit, row, _ in given:
            for start, page, length in self._copies.pieces([unit], size):
                self._pages.part(page, length).copy_(row[start : start + length])
        self._note_arrived([(unit, found) for unit, _, found in given])
