"""`BehindCopies`: moves entries between the host's pages and the tier below the host, by threads (``jobs.py``).

Entries that a load needs go to the device in groups as they arrive, while others are read (`fetched`). The model uses them after all
ranks have agreed that they are here (`Mover.fetch`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import batched, groupby

import torch

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.units import DEVICE, BlockTransfer, EntryKind, LoadState
from megatron_hybrid_prefix.transfers.entry_copies import without_shared_pages
from megatron_hybrid_prefix.transfers.jobs import Job, TierThreads, are_over
from megatron_hybrid_prefix.transfers.queue import not_reached
from megatron_hybrid_prefix.transfers.to_device import ToDevice, Transfer
from megatron_hybrid_prefix.transfers.to_host import ToHost

logger = logging.getLogger(__name__)

_GROUP_ENTRIES = 32
GROUP_BYTES = 64 * 2**20  # entries from the tier go to the device in groups of this size, while others are read

type _Read = tuple[BlockTransfer, Job]
"""A transfer that waits for an entry, and the read that brings the entry to its pages."""


class BehindCopies:
    """Moves of entries between the host's pages and the tier below.

    Args:
        behind: The tier.
        stores: The stores, which write to the pages.
        loads: The loads, which read the pages.

    Attributes:
        threads: They move the entries.
    """

    def __init__(self, behind: TierBehind, stores: ToHost, loads: ToDevice) -> None:
        self._behind, self._stores, self._loads = behind, stores, loads
        self._copies, self._pages = stores.copies, stores.copies.pages
        self.threads = TierThreads(behind.tier, max(self._copies.entry_bytes.values()))
        self._refused = self._bytes_loaded = 0
        self._seconds_waited = 0.0

    def count(self, stats: TierStats) -> None:
        """Add this rank's transfers, and what the tier says of itself, to the statistics."""
        moved = self.threads.stats
        stats.full, stats.seconds, stats.bytes_stored = moved.full + self._refused, moved.seconds, moved.bytes_stored
        stats.bytes_loaded, stats.seconds_waited = self._bytes_loaded, self._seconds_waited
        self._behind.tier.describe(stats)

    def overwrite(self, units: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        """The pages of these transfers are about to get other bytes. Returns the transfers that can be done.

        The others have a page that a thread is still reading into, for a load that was given up. An entry that is lost so has no
        tag, so its load fails.
        """
        busy = self.threads.overwrite(page for unit in units for page in unit.pages)
        if not busy:
            return list(units)
        refused = [unit for unit in units if not busy.isdisjoint(unit.pages)]
        logger.warning("%d entries have no place: a load that was given up is still being read there", len(refused))
        self._pages.drop(refused)
        return [unit for unit in units if busy.isdisjoint(unit.pages)]

    # -- to and from the tier ------------------------------------------------------------------------------------------

    def store(self, units: Sequence[BlockTransfer]) -> None:
        """Begin to write the entries in these pages to the tier."""
        after = not_reached(self._stores.stored)
        jobs = []
        for unit in units:
            first = unit.pages[0]
            job = self._job(unit, after)
            if not job.namespace or not self._pages.holds(unit):
                self._refused += 1
            elif not self.threads.is_moving(unit.tag, first):  # else it was offered twice
                given = self.threads.read_of(unit.tag, first).checksum
                seen = partial(self._pages.seen_checksum, first, unit.tag)
                job.sum_of = seen if given is None else partial(int, given)
                jobs.append(job)
        self.threads.start(jobs)

    def read(self, units: Sequence[BlockTransfer]) -> None:
        """Begin to read entries from the tier into these pages."""
        after = not_reached(self._stores.stored, self._loads.last)
        for different in without_shared_pages(units):
            free = {unit.pages for unit in self.overwrite(different)}
            self._pages.drop(different)  # until `fetched`
            # States first: they are the longest.
            jobs = [
                self._job(unit, after) for unit in sorted(different, key=lambda unit: unit.tag.kind is EntryKind.KV)
            ]
            for job in jobs:
                if not job.namespace or job.pages not in free:
                    job.give_up()  # it is missing
            self.threads.start(jobs)

    def _job(self, unit: BlockTransfer, after: Sequence[torch.cuda.Event]) -> Job:
        return Job(
            namespace=self._behind.namespace(unit.tag.epoch),
            tag=unit.tag,
            pages=unit.pages,
            views=self._pages.views(unit.pages, self._copies.entry_bytes[unit.tag.kind]),
            after=after,
        )

    def close(self) -> None:
        """Close the tier, and end the threads."""
        self._behind.tier.close()
        self.threads.close()

    # -- loads whose entries come from the tier ------------------------------------------------------------------------

    def fetched(self, load: Transfer, wait_s: float = 0.0) -> LoadState:
        """COPYING if all entries that the load waits for have arrived on the host, MISSING if one is not there, else FETCHING.

        Entries that have arrived go to the device at once, the others group by group, while more are being read.

        Args:
            load: A load that fetches.
            wait_s: Wait at most this long for them.
        """
        late = time.perf_counter() + wait_s
        over: list[_Read] = []
        running: list[_Read] = []
        for unit in load.left:
            job = self.threads.read_of(unit.tag, unit.pages[0])
            (over if job.over.done() else running).append((unit, job))
        load.left = [unit for unit, _ in (*over, *running)]
        for group in (over, *self._groups(running)):
            start = time.perf_counter()
            is_over = are_over([job for _, job in group], late - start)
            self._seconds_waited += time.perf_counter() - start if wait_s else 0.0
            if not is_over:
                return LoadState.FETCHING
            if not self._launch(group):
                return LoadState.MISSING
            del load.left[: len(group)]
        return LoadState.COPYING

    def _groups(self, reads: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
        """Parts of the reads whose entries go to the device together."""
        for kind, own in groupby(reads, key=lambda read: read[0].tag.kind):
            entries = GROUP_BYTES // max(1, self._copies.entry_bytes[kind])
            yield from batched(own, max(1, min(_GROUP_ENTRIES, entries)))

    def _launch(self, over: Sequence[_Read]) -> bool:
        """Launches transfers whose entries nothing reads any more. Returns whether all have arrived."""
        # A page may have gone to another entry: a load that shares this entry was late, and so it was dropped.
        coming = [(unit, job.checksum) for unit, job in over if not self._pages.holds(unit)]
        here = [(unit, checksum) for unit, checksum in coming if checksum is not None]
        if here:
            first_pages, expected = self._copies.ids(
                [unit.pages[0] for unit, _ in here], [checksum ^ unit.tag.digest for unit, checksum in here]
            )
            self._pages.put_sums(first_pages, expected)
            self._pages.put_tags(unit for unit, _ in here)
            self._bytes_loaded += sum(self._copies.entry_bytes[unit.tag.kind] for unit, _ in here)
        units = [unit for unit, _ in over]
        if not all(map(self._pages.holds, units)):
            return False
        self._loads.run([unit for unit in units if unit.target == DEVICE])
        return True
