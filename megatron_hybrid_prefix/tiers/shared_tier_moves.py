"""`SharedTierMoves`: moves entries between host memory and a `SharedTier` behind it, by threads (``background.py``).

A load to the device that uses pages which are still being read is put off. Entries that have arrived go to the device in groups,
while others are read (`fetched`); the model uses them after all ranks have agreed (`run_put_off`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.background import BackgroundMoves, Job, JobGroup, marks
from megatron_hybrid_prefix.tiers.base import SharedTier
from megatron_hybrid_prefix.tiers.entry_copies import EntryCopies, without_shared_pages
from megatron_hybrid_prefix.tiers.host_pages import HostPages, PageContents
from megatron_hybrid_prefix.tiers.loads import Loads, PreparedLoads
from megatron_hybrid_prefix.tiers.stores import Stores
from megatron_hybrid_prefix.tiers.tier_moves import MovesBehind
from megatron_hybrid_prefix.tiers.units import BlockTransfer, EntryKind

logger = logging.getLogger(__name__)

_GROUP_ENTRIES = 32  # at most: each is an open file
GROUP_BYTES = 64 * 2**20  # entries from behind go to the device in groups of this size, while others are read


@dataclass(frozen=True, slots=True)
class _PutOff:
    """A load that waits for entries from behind: all its transfers, and those that are not launched yet."""

    units: list[BlockTransfer]
    left: list[BlockTransfer]


@dataclass(frozen=True, slots=True)
class _Coming:
    """An entry that a load needs, and what reads it."""

    unit: BlockTransfer
    is_here: bool  # on the host, and nothing reads it
    job: Job | None = None  # None: a page belongs to another entry by now

    @property
    def group(self) -> JobGroup | None:
        return None if self.job is None else self.job.group


class SharedTierMoves(MovesBehind):
    """See the top of this file.

    Args:
        tier: The tier.
        *parts: See `MovesBehind`.
    """

    def __init__(self, tier: SharedTier, *parts: *tuple[EntryCopies, HostPages, PageContents, Stores, Loads]) -> None:
        super().__init__(*parts)
        self._background = BackgroundMoves(tier, max(self._copies.row_bytes.values(), default=0))
        self._given_sums: dict[int, int] = {}  # by first page: checksums of entries that came from behind
        self._fetching: dict[int, Job] = {}  # by page: entries from behind that nobody has settled since
        self._put_off: dict[int, _PutOff] = {}  # loads that wait for them

    def close(self) -> None:
        """End the threads, once they have written all entries."""
        self._background.close()

    @property
    def stats(self) -> TierStats:
        """Transfers to and from the tier."""
        stats = super().stats
        stats.full += self._background.refused
        stats.bytes_stored += self._background.stored_bytes
        stats.seconds = self._background.seconds
        return stats

    def drain(self, seconds: float) -> bool:
        """Wait until the tier has been given all entries, at most this long. Returns whether it has."""
        return self._background.drain(seconds)

    def overwrite(self, units: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        """The pages of these transfers are about to get other bytes. Returns the transfers that can be done.

        The others have a page that a thread is still filling, for a load that was given up. An entry that is lost so has no tag,
        so its load fails.
        """
        pages = [page for unit in units for page in unit.pages]
        busy = self._background.overwrite(pages)
        for page in pages:
            self._fetching.pop(page, None)
            self._given_sums.pop(page, None)
        if not busy:
            return list(units)
        refused = [unit for unit in units if not busy.isdisjoint(unit.pages)]
        logger.warning("%d entries have no place: a load that was given up is still being read there", len(refused))
        self._contents.drop(refused)
        return [unit for unit in units if busy.isdisjoint(unit.pages)]

    # -- to and from the tier ------------------------------------------------------------------------------------------

    def store(self, units: Sequence[BlockTransfer]) -> None:
        """Begin to write the entries in these pages to the tier."""
        after = marks((self._stores.queue.finish, self._stores.stored))
        jobs = []
        for unit in units:
            first = unit.pages[0]
            if not self._contents.holds(unit):
                self._stats.full += 1
                continue
            if self._background.is_moving(unit.tag, first):
                continue  # offered twice
            size = self._copies.entry_bytes(unit.tag.kind)
            job = Job(unit.tag, size, unit.pages, self._pages.views(unit.pages, size), after)
            given = self._given_sums.get(first)
            seen = partial(self._contents.seen_checksum, first, unit.tag)
            job.checksum = seen if given is None else partial(int, given)
            jobs.append(job)
        self._background.store(jobs)

    def load(self, units: Sequence[BlockTransfer]) -> None:
        """Begin to read entries from the tier into these pages."""
        for different in without_shared_pages(units):
            self._begin_fetches(different, {unit.pages for unit in self.overwrite(different)})

    def _begin_fetches(self, units: Sequence[BlockTransfer], free: set[tuple[int, ...]]) -> None:
        background = self._background
        after = marks((self._stores.queue.finish, self._stores.stored), (self._loads.queue.finish, self._loads.last))
        self._contents.drop(units)  # until `fetched`
        groups: list[list[Job]] = [[]]
        group_bytes = 0
        # States first: they are the longest.
        for unit in sorted(units, key=lambda unit: unit.tag.kind is EntryKind.KV):
            size = self._copies.entry_bytes(unit.tag.kind)
            if group_bytes and (group_bytes + size > GROUP_BYTES or len(groups[-1]) == _GROUP_ENTRIES):
                groups.append([])
                group_bytes = 0
            group_bytes += size
            job = Job(unit.tag, size, unit.pages, self._pages.views(unit.pages, size), after)
            job.cancelled = unit.pages not in free
            self._fetching |= dict.fromkeys(unit.pages, job)  # also then: all ranks put off the same loads
            groups[-1].append(job)
        background.load(groups)

    # -- loads that wait for entries from the tier ---------------------------------------------------------------------

    def without_put_off(self, units: Sequence[BlockTransfer]) -> Sequence[BlockTransfer]:
        """Puts off the loads that use pages which are still being read from behind; returns the others."""
        if not self._fetching:
            return units
        late = {unit.load_id for unit in units if any(page in self._fetching for page in unit.pages)}
        for unit in units:
            if unit.load_id is not None and unit.load_id in late:
                put_off = self._put_off.setdefault(unit.load_id, _PutOff([], []))
                put_off.units.append(unit)
                put_off.left.append(unit)
        return [unit for unit in units if unit.load_id not in late]

    def is_put_off(self, load_id: int) -> bool:
        """See `HostArena`."""
        return load_id in self._put_off

    def fetched(self, load_id: int, wait_s: float = 0.0) -> bool | None:
        """See `HostArena`.

        Entries that have arrived go to the device at once, the others group by group, while more are being read. All that
        can be done for a group before it has arrived is done by then.
        """
        left, late = self._put_off[load_id].left, time.perf_counter() + wait_s
        arrived: list[_Coming] = []
        groups: dict[JobGroup, list[_Coming]] = {}
        for unit in left:
            coming = self._coming(unit)
            if coming.group is None or coming.group.wait(0):
                arrived.append(coming)
            else:
                groups.setdefault(coming.group, []).append(coming)
        if arrived and not self._launch(left, arrived):
            return False
        prepared: dict[JobGroup, PreparedLoads] = {}
        for group, entries in groups.items() if wait_s else ():
            prepared[group] = self._loads.prepare([coming.unit for coming in entries], begun=bool(prepared))
        for group, entries in groups.items():
            start = time.perf_counter()
            is_over = group.wait(late - start)
            self._stats.seconds_waited += time.perf_counter() - start if wait_s else 0.0
            if not is_over:
                return None
            if not self._launch(left, entries, prepared.get(group)):
                return False
        return True

    def _launch(
        self, left: list[BlockTransfer], entries: Sequence[_Coming], prepared: PreparedLoads | None = None
    ) -> bool:
        """Launch transfers whose entries nothing reads any more, and take them out of ``left``. Returns whether all have arrived."""
        coming = [each for each in entries if not each.is_here]
        arrived = [(each.unit, checksum) for each in coming if (checksum := _checksum_of(each.job)) is not None]
        self._note_arrived(arrived)
        self._given_sums |= {unit.pages[0]: checksum for unit, checksum in arrived}
        if len(arrived) < len(coming):
            return False
        self._loads.run([each.unit for each in entries], prepared)
        launched = {id(each.unit) for each in entries}
        left[:] = [unit for unit in left if id(unit) not in launched]
        return True

    def _coming(self, unit: BlockTransfer) -> _Coming:
        if self._contents.holds(unit):
            return _Coming(unit, is_here=True)
        # A page may have gone to another entry: a load that shares this entry was late, and so it was dropped.
        job = self._fetching.get(unit.pages[0])
        if job is not None and (job.tag != unit.tag or any(self._fetching.get(page) is not job for page in unit.pages)):
            job = None
        return _Coming(unit, is_here=False, job=job)

    def run_put_off(self, load_id: int) -> None:
        """See `HostArena`."""
        put_off = self._put_off.pop(load_id)
        for page in (page for unit in put_off.units for page in unit.pages):
            self._fetching.pop(page, None)
        self._loads.run(put_off.left)

    def drop_put_off(self, load_id: int, *, zero: bool = False) -> None:
        """See `HostArena`."""
        put_off = self._put_off.pop(load_id, None)
        if put_off is None:
            return
        self._loads.wait_for(load_id)
        self._loads.forget(load_id)
        if zero:
            self._copies.zero(put_off.units)


def _checksum_of(job: Job | None) -> int | None:
    """The checksum of an entry that a thread has read; None if it did not arrive."""
    return (
        job.checksum if job is not None and job.found and isinstance(job.checksum, int) and not job.cancelled else None
    )
