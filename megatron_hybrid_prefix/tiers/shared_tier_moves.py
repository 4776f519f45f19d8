"""`SharedTierMoves`: moves entries between host memory and a `SharedTier` behind it, by threads (``background.py``).

A load to the device that uses pages which are still being read is put off. Entries that have arrived go to the device in groups,
while others are read (`fetched`); the model uses them after all ranks have agreed (`run_put_off`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.background import BackgroundMoves, Job, JobGroup, marks
from megatron_hybrid_prefix.tiers.base import SharedTier
from megatron_hybrid_prefix.tiers.entry_copies import EntryCopies, without_shared_pages
from megatron_hybrid_prefix.tiers.host_pages import HostPages, PageContents
from megatron_hybrid_prefix.tiers.loads import Loads
from megatron_hybrid_prefix.tiers.stores import Stores
from megatron_hybrid_prefix.tiers.units import BlockTransfer, EntryKind

PART_BYTES = 4 * 2**20  # threads share an entry from behind in parts of this size, as far as pages allow
GROUP_BYTES = 64 * 2**20  # entries from behind go to the device in groups of this size, while others are read


@dataclass(frozen=True, slots=True)
class _PutOff:
    """A load that waits for entries from behind: all its transfers, and those that are not launched yet."""

    units: list[BlockTransfer]
    left: list[BlockTransfer]


@dataclass(frozen=True, slots=True)
class _Coming:
    """An entry that a load needs, and what reads it: nothing if it is on the host."""

    unit: BlockTransfer
    digest: int  # of its tag
    parts: tuple[Job | None, ...]  # by page; None: the page belongs to another entry by now
    group: JobGroup | None


class SharedTierMoves:
    """See the top of this file.

    Args:
        tier: The tier.
        copies: How entries are copied.
        pages: The pages on the host.
        contents: What they hold.
        stores: The stores, which write to the pages.
        loads: The loads, which read the pages.
    """

    def __init__(
        self,
        tier: SharedTier,
        copies: EntryCopies,
        pages: HostPages,
        contents: PageContents,
        stores: Stores,
        loads: Loads,
    ) -> None:
        self._copies, self._pages, self._contents, self._stores, self._loads = copies, pages, contents, stores, loads
        self._background = BackgroundMoves(tier, max(copies.row_bytes.values(), default=0))
        self._given_sums: dict[int, int] = {}  # by first page: checksums of entries that came from behind
        self._fetching: dict[int, Job] = {}  # by page: entries from behind that nobody has settled since
        self._put_off: dict[int, _PutOff] = {}  # loads that wait for them
        self._stats = TierStats()

    def close(self) -> None:
        """End the threads, once they have written all entries."""
        self._background.close()

    @property
    def stats(self) -> TierStats:
        """Transfers to and from the tier."""
        stats = dataclasses.replace(self._stats)
        stats.full += self._background.refused
        stats.bytes_stored += self._background.stored_bytes
        stats.seconds = self._background.seconds
        return stats

    def drain(self, seconds: float) -> bool:
        """Wait until the tier has been given all entries, at most this long. Returns whether it has."""
        return self._background.drain(seconds)

    def overwrite(self, units: Sequence[BlockTransfer]) -> None:
        """The pages of these transfers are about to get other bytes."""
        pages = [page for unit in units for page in unit.pages]
        self._background.overwrite(pages)
        for page in pages:
            self._fetching.pop(page, None)
            self._given_sums.pop(page, None)

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
            job = Job(unit.tag, size, unit.pages, self._pages.views(unit.pages, 0, size), after)
            given = self._given_sums.get(first)
            seen = partial(self._contents.seen_checksum, first, unit.tag)
            job.checksum = seen if given is None else partial(int, given)
            jobs.append(job)
        self._background.store(jobs)

    def load(self, units: Sequence[BlockTransfer]) -> None:
        """Begin to read entries from the tier into these pages."""
        for different in without_shared_pages(units):
            self.overwrite(different)
            self._begin_fetches(different)

    def _begin_fetches(self, units: Sequence[BlockTransfer]) -> None:
        background = self._background
        after = marks((self._stores.queue.finish, self._stores.stored), (self._loads.queue.finish, self._loads.last))
        part_bytes = max(self._copies.row_bytes.values()) if background.whole_entries else PART_BYTES
        step = max(1, part_bytes // self._pages.page_bytes)
        background.forget_ended()
        self._contents.drop(units)  # until `fetched`
        jobs: list[Job] = []
        group_bytes = 0
        # States first: they are the longest.
        for unit in sorted(units, key=lambda unit: unit.tag.kind is EntryKind.KV):
            size = self._copies.entry_bytes(unit.tag.kind)
            if group_bytes and group_bytes + size > GROUP_BYTES:
                background.load(jobs)
                jobs, group_bytes = [], 0
            group_bytes += size
            used = max(1, ceil_div(size, self._pages.page_bytes))
            for at in range(0, used, step):
                # Another stage of the pipeline may use more of the pages. The last part has all that are left.
                pages = unit.pages[at : at + step] if at + step < used else unit.pages[at:]
                job = Job(unit.tag, size, pages, self._pages.views(pages, at * self._pages.page_bytes, size), after)
                for page in pages:
                    self._fetching[page] = job
                jobs.append(job)
        background.load(jobs)

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

        Entries that have arrived go to the device at once, group by group, while others are still being read. All that
        can be done for a group before it has arrived is done by then.
        """
        left, late = self._put_off[load_id].left, time.perf_counter() + wait_s
        groups: dict[JobGroup | None, list[_Coming]] = {}
        for unit in left:
            coming = self._coming(unit)
            groups.setdefault(coming.group, []).append(coming)
        for group, entries in groups.items():
            if not wait_s and group is not None and not group.wait(0):
                return None
            units = [coming.unit for coming in entries]
            prepared = self._loads.prepare(units)
            start = time.perf_counter()
            is_over = group is None or group.wait(late - start)
            self._stats.seconds_waited += time.perf_counter() - start if wait_s else 0.0
            if not is_over:
                return None
            if not self._note_arrived([coming for coming in entries if coming.parts]):
                return False
            self._loads.run(units, prepared)
            launched = {id(coming.unit) for coming in entries}
            left[:] = [unit for unit in left if id(unit) not in launched]
        return True

    def _coming(self, unit: BlockTransfer) -> _Coming:
        if self._contents.holds(unit):
            return _Coming(unit, 0, (), None)
        jobs = (self._fetching.get(page) for page in unit.pages)
        # A page may have gone to another entry: a load that shares this entry was late, and so it was dropped.
        parts = tuple(job if job is not None and job.tag == unit.tag else None for job in jobs)
        return _Coming(unit, unit.tag.digest, parts, next((job.group for job in parts if job is not None), None))

    def _note_arrived(self, entries: Sequence[_Coming]) -> bool:
        """Note which of these entries have arrived, now that nothing reads them any more. Returns whether all have."""
        arrived = [(each, checksum) for each in entries if (checksum := _checksum_of(each.parts)) is not None]
        if arrived:
            units = [each.unit for each, _ in arrived]
            firsts = [unit.pages[0] for unit in units]
            first_pages, expected = self._copies.ids(firsts, [checksum ^ each.digest for each, checksum in arrived])
            self._contents.put_sums(first_pages, expected)
            self._contents.put_tags(units)
            self._given_sums |= {first: checksum for first, (_, checksum) in zip(firsts, arrived, strict=True)}
            self._stats.bytes_loaded += sum(self._copies.entry_bytes(unit.tag.kind) for unit in units)
        return len(arrived) == len(entries)

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


def _checksum_of(parts: Sequence[Job | None]) -> int | None:
    """The checksum of an entry that threads have read in parts; None if it is not complete, or of two files."""
    sums = {None if part is None or part.cancelled or not part.found else part.checksum for part in parts}
    (checksum, *others) = sums
    return checksum if isinstance(checksum, int) and not others else None
