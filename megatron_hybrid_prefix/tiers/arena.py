"""`HostArena`: runs transfers between the device and pinned host memory, and verifies what is loaded.

On the device an entry is spread over all layers; on the host it is in pages. A store gathers entries into a staging buffer
on the device, and a kernel copies that to the pages. If no store is on its way, the kernel copies the first entries straight to their
pages, so the host link is busy while the others are gathered. A load does the reverse, but the copy engines fill the buffer. Pages that
are too small for them are read by the kernel, straight into their places. (The ways over the host link: ``ops/page_copies.py``.) The
halves of a buffer are used in turn. Stores and loads have separate streams, because the host link has two directions. What overwrites
a stored block (a forward, a load) waits until it is gathered, or was copied straight, but not for the other copies to the host.

A store gives every entry a tag and a checksum over all its bytes, computed by the kernel that reads it first. Expected checksums stay
on the device.

The CPU copies entries to and from a tier behind the host, with their tags and checksums. It first waits until no transfer uses
their pages. A `SharedTier` has threads for that (``background.py``). Then a load to the device that uses pages
which are still being read is put off. Entries that have arrived go to the device in groups, while others are read (`fetched`); the model
uses them after all ranks have agreed (`run_put_off`).

Longer than 400 lines because all transfers order each other here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.ops.page_copies import WORD_BYTES, copy_pages, copy_ranges
from megatron_hybrid_prefix.ops.slot_copies import ids_on_device
from megatron_hybrid_prefix.tiers.background import BackgroundMoves, Job, JobGroup, marks
from megatron_hybrid_prefix.tiers.base import Entry, SharedTier, Tier
from megatron_hybrid_prefix.tiers.pinned import allocate, pin, unpin
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue, HostQueue, Mark
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag

logger = logging.getLogger(__name__)

STORE_STAGING_BYTES = 512 * 2**20  # this much can be evicted at once without waiting for the host link
LOAD_STAGING_BYTES = 128 * 2**20
FIRST_BYTES = 24 * 2**20  # of a store: go straight to the host; the model waits 0.5 ms for them
ENGINE_BYTES = 2**19  # smaller pages are not loaded by the copy engines, which pause 3 us after each
GROUP_BYTES = 64 * 2**20  # entries from behind go to the device in groups of this size, while others are read
_LOADS = 4096  # at most this many loads are known at a time


@dataclass(slots=True)
class _Batch:
    """Entries of one kind that are copied together. Ids are int64 on the device, and there once they are uploaded."""

    units: list[BlockTransfer]
    half: int  # of the staging buffer
    start: int  # byte of the staging buffer
    device_ids: torch.Tensor  # (units,) KV blocks or slots
    pages: torch.Tensor  # (units, pages of an entry)
    sums: torch.Tensor  # (units,) checksums of what is copied; zeros before
    is_here: bool = True  # False: it could not be copied to the staging buffer
    is_direct: bool = False  # a store that does not use the staging buffer

    @property
    def kind(self) -> EntryKind:
        return self.units[0].tag.kind


class _Staging:
    """A buffer on the device. Its halves are used in turn.

    Args:
        size: Bytes of both halves, at most; each holds an entry at least.
        entry_bytes: Bytes of the largest entry.
        device: The device.
    """

    def __init__(self, size: int, entry_bytes: int, device: torch.device) -> None:
        self.half_bytes = max(1, size // 2 // max(1, entry_bytes)) * entry_bytes
        self.memory = torch.zeros(2 * self.half_bytes, dtype=torch.uint8, device=device)
        self.used_last = 1  # half


@dataclass(frozen=True, slots=True)
class _PutOff:
    """A load that waits for entries from behind: all its transfers, and those that are not launched yet."""

    units: list[BlockTransfer]
    left: list[BlockTransfer]


@dataclass(frozen=True, slots=True)
class _Loading:
    """Loads that are ready to be launched. Ids are int64, on the device."""

    rounds: list[list[_Batch]]  # batches of one half of the buffer after the other
    sums: torch.Tensor  # (units,) checksums of what is copied, of all batches
    first_pages: torch.Tensor  # (units,)
    load_of: torch.Tensor  # (units,) place in `_bad_rows`
    new_loads: torch.Tensor  # (loads,) those of loads that have not begun


@dataclass(frozen=True, slots=True)
class _Coming:
    """An entry that a load needs, and what reads it."""

    unit: BlockTransfer
    is_here: bool  # on the host, and nothing reads it
    digest: int = 0  # of its tag
    job: Job | None = None  # None: a page belongs to another entry by now

    @property
    def group(self) -> JobGroup | None:
        return None if self.job is None else self.job.group


class HostArena:
    """Pinned memory in pages, and the transfers to and from it.

    Args:
        tensors: Called at each transfer. Returns the device tensors by kind, each (layers, KV blocks or slots, *shape) and
            contiguous inside a block or slot. (Their addresses change when the engine is suspended.)
        pages: Number of pages.
        page_bytes: Bytes per page.
        pages_of: Pages per entry, by kind.
        device: Device of the tensors.
        verify: Whether to compute and compare checksums.
        behind: The tier behind the host, or None.

    Raises:
        RuntimeError, MemoryError: The host lacks the memory, or the driver refuses to pin it.
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
        self._bytes = {kind: sum(each[:, 0].nbytes for each in own) for kind, own in tensors().items()}
        self._verify = verify
        self._behind = behind
        on_gpu = self._device.type == "cuda"
        own_bytes = pages * page_bytes
        self.memory = allocate(own_bytes) if on_gpu else torch.empty(own_bytes, dtype=torch.uint8)
        self._unpin: weakref.finalize[[torch.Tensor, torch.device], HostArena] | None = None
        if on_gpu and pages:
            pin(self.memory, self._device)
            # Unpin before freeing: else the next memory at this address cannot be pinned.
            self._unpin = weakref.finalize(self, unpin, self.memory, self._device)
            self._unpin.atexit = False
        self.stores, self.loads = (
            DeviceQueue(self._device, ahead=ahead) if on_gpu else HostQueue() for ahead in (1, BUFFERS)
        )
        most_bytes = max(self._row_bytes.values(), default=0)
        self._store_staging, self._load_staging = (
            _Staging(min(size, pages * page_bytes), most_bytes, self._device)
            for size in (STORE_STAGING_BYTES, LOAD_STAGING_BYTES)
        )
        self._load_by_engine = page_bytes >= ENGINE_BYTES
        self._sums = torch.zeros(max(1, pages), dtype=torch.int64, device=self._device)  # by first page
        self._row_ids = torch.arange(
            max(self._store_staging.half_bytes, self._load_staging.half_bytes)
            // max(1, min(self._row_bytes.values(), default=1)),
            device=self._device,
        )
        self._view = memoryview(self.memory.numpy())
        self._background: BackgroundMoves | None = None
        self._sums_seen = self._sums  # on the host, as of the last store from the device; only for threads
        self._given_sums: dict[int, int] = {}  # by first page: checksums of entries that came from behind
        if isinstance(behind, SharedTier):
            self._background = BackgroundMoves(behind, most_bytes)
            if on_gpu:
                self._sums_seen = torch.zeros(max(1, pages), dtype=torch.int64).pin_memory()
        self._fetching: dict[int, Job] = {}  # by page: entries from behind that nobody has settled since
        self._put_off: dict[int, _PutOff] = {}  # loads that wait for them
        self._bad_rows = torch.zeros(_LOADS, dtype=torch.int32, device=self._device)  # by load
        self._bad_rows_seen = torch.zeros(_LOADS, dtype=torch.int32)
        if on_gpu:
            self._bad_rows_seen = self._bad_rows_seen.pin_memory()
        self._tags: dict[int, Tag] = {}  # by first page
        self._failed: set[int] = set()  # loads
        self._sent: Mark = None  # end of the last direct copy to the host; None once the model waits for it
        self._gathered: Mark = None  # end of the last gather; likewise
        self._stored: Mark = None  # end of the last stores
        self._last_load: Mark = None
        self._new_pages: set[int] = set()  # first pages of entries that may still be in flight to the host
        self._loaded: dict[int, Mark] = {}  # by load
        self._in_flight: dict[int | None, set[int]] = {}  # pages and places on the device, by load
        self.bytes_stored = self.bytes_loaded = 0
        self._behind_stats = TierStats()

    def close(self) -> None:
        """Free the memory; garbage collection of the arena does so, too."""
        if self._background is not None:
            self._background.close()
        if self._unpin is not None:
            self._unpin()
        self.memory, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")

    def bytes_of(self, kind: EntryKind) -> int:
        """Bytes of one entry on this rank."""
        return self._bytes[kind]

    def carry_out(self, units: Sequence[BlockTransfer]) -> None:
        """Launch transfers in order. The model may overwrite stored entries after `wait_for_stores`.

        A transfer that fails is logged. Its load counts as failed, on this rank.
        """
        for (source, target), group in groupby(units, key=attrgetter("source", "target")):
            run = list(group)
            if source == DEVICE:
                busy = self._overwrite(run)
                self._run_stores([unit for unit in run if busy.isdisjoint(unit.pages)] if busy else run)
            elif target == DEVICE:
                self._run_loads(self._without_put_off(run))
            elif self._background is None:
                self._run_behind(run, store=source == HOST)
            elif source == HOST:
                self._begin_stores(self._background, run)
            else:
                for different in _without_shared_pages(run):
                    self._begin_fetches(self._background, different, self._overwrite(different))

    def _run_stores(self, units: Sequence[BlockTransfer]) -> None:
        kinds = [unit.tag.kind for unit in units]
        if kinds != sorted(kinds):
            places = [place for unit in units for place in _places(unit)]
            if len(set(places)) == len(places):  # their order does not matter: sort for fewer batches
                units = sorted(units, key=lambda unit: unit.tag.kind)
        after = None
        if self._in_flight:
            touched = set().union(*self._in_flight.values())  # places that unfinished loads read or write
            after = self._last_load if any(not touched.isdisjoint(_places(unit)) for unit in units) else None
        for unit in units:
            self._tags.pop(unit.pages[0], None)  # set again by `_store`
        is_idle = self._stored is None or self._stored.query()  # changes the way, but nothing that arrives
        with self.stores.running(after):
            count = self._direct_count(units) if is_idle else 0
            direct = list(self._batches(units[:count], None))
            batches = list(self._batches(units[count:], self._store_staging))
            first = batches[0].half if batches else self._store_staging.used_last
            with self.stores.ahead(first):
                sums, *_ = self._upload([*direct, *batches])
            self.stores.use(first)
            if sums.is_cuda:
                sums.record_stream(torch.cuda.current_stream())  # the memory of all that was uploaded
            for batch in direct:
                self._try(partial(self._store, batch), batch)
                self._sent = self.stores.mark()
            for half, round_ in groupby(batches, key=attrgetter("half")):
                try:
                    for batch in round_:
                        with self.stores.ahead(half):
                            gathered = self._try(partial(self._gather, batch), batch)
                            self._gathered = self.stores.mark()
                        self.stores.use(half)
                        if gathered:
                            self._try(partial(self._store, batch), batch)
                finally:
                    self.stores.free(half)
            if self._sums_seen is not self._sums:
                self._sums_seen.copy_(self._sums, non_blocking=True)
            self._stored = self.stores.mark()
        self._new_pages.update(unit.pages[0] for unit in units)

    def _run_loads(self, units: Sequence[BlockTransfer], loading: _Loading | None = None) -> None:
        """Launches loads. ``loading``: from `_prepare_loads`, if they were prepared before their entries arrived."""
        if not units:
            return
        new = any(unit.pages[0] in self._new_pages for unit in units)
        with self.loads.running(self._sent, self._gathered, self._stored if new else None):
            if new:
                self._new_pages.clear()
            if loading is None:
                loading = self._prepare_loads(units, bring=True)
            else:
                self._bring(*loading.rounds[:BUFFERS])
            rounds = loading.rounds
            self._bad_rows.index_fill_(0, loading.new_loads, 0)  # the other loads have begun with other entries
            for number, round_ in enumerate(rounds):
                self.loads.use(round_[0].half)
                for batch in round_:
                    if batch.is_here:
                        self._try(partial(self._load, batch), batch)
                self.loads.free(round_[0].half)
                self._bring(*rounds[number + BUFFERS :][:1])
            if self._verify:
                wrong = loading.sums != self._sums.index_select(0, loading.first_pages)
                self._bad_rows.index_add_(0, loading.load_of, wrong.to(torch.int32))
            self._bad_rows_seen.copy_(self._bad_rows, non_blocking=True)
            self._last_load = self.loads.mark()
            for unit in units:
                self._in_flight.setdefault(unit.load_id, set()).update(_places(unit))
            self._loaded |= dict.fromkeys(_load_ids(units), self._last_load)

    def _prepare_loads(self, units: Sequence[BlockTransfer], *, bring: bool) -> _Loading:
        """Makes batches and uploads ids; call it inside `running`.

        Args:
            units: The loads, at least one.
            bring: Whether to begin with the copies to the staging buffer, so that the host link is busy.
        """
        later = groupby(self._batches(units, self._load_staging), key=attrgetter("half"))
        rounds = [list(next(later)[1])]
        if bring:
            self._bring(rounds[0])
        rounds += [list(round_) for _, round_ in later]
        if bring:
            self._bring(*rounds[1:BUFFERS])
        load_ids = _load_ids(units)
        uploaded = self._upload(
            list(chain(*rounds)),
            [unit.pages[0] for unit in units],
            [load_id % _LOADS for load_id in load_ids],
            sorted({load_id % _LOADS for load_id in load_ids if load_id not in self._loaded}),
        )
        return _Loading(rounds, *uploaded)

    # -- a tier behind the host, in the background ---------------------------------------------------------------------

    def is_put_off(self, load_id: int) -> bool:
        """Whether the load waits for entries from behind. The same on all ranks."""
        return load_id in self._put_off

    def fetched(self, load_id: int, wait_s: float = 0.0) -> bool | None:
        """Whether all entries that this load waits for have arrived on the host; None: not all are known yet.

        Entries that have arrived go to the device at once, group by group, while others are still being read. All that
        can be done for a group before it has arrived is done by then.

        Args:
            load_id: A load that is put off.
            wait_s: Wait at most this long for them.
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
            with self.loads.running():
                loading = self._prepare_loads(units, bring=False)
            start = time.perf_counter()
            is_over = group is None or group.wait(late - start)
            self._behind_stats.seconds_waited += time.perf_counter() - start if wait_s else 0.0
            if not is_over:
                return None
            if not self._note_arrived([coming for coming in entries if not coming.is_here]):
                return False
            self._run_loads(units, loading)
            launched = {id(coming.unit) for coming in entries}
            left[:] = [unit for unit in left if id(unit) not in launched]
        return True

    def _coming(self, unit: BlockTransfer) -> _Coming:
        if self._tags.get(unit.pages[0]) == unit.tag:
            return _Coming(unit, is_here=True)
        # A page may have gone to another entry: a load that shares this entry was late, and so it was dropped.
        job = self._fetching.get(unit.pages[0])
        if job is not None and (job.tag != unit.tag or any(self._fetching.get(page) is not job for page in unit.pages)):
            job = None
        return _Coming(unit, is_here=False, digest=unit.tag.digest, job=job)

    def _note_arrived(self, entries: Sequence[_Coming]) -> bool:
        """Note which of these entries have arrived, now that nothing reads them any more. Returns whether all have."""
        arrived = [(each, checksum) for each in entries if (checksum := _checksum_of(each.job)) is not None]
        if arrived:
            units = [each.unit for each, _ in arrived]
            firsts = [unit.pages[0] for unit in units]
            first_pages, expected = self._ids(firsts, [checksum ^ each.digest for each, checksum in arrived])
            self._sums.index_copy_(0, first_pages, expected)
            self._given_sums |= {first: checksum for first, (_, checksum) in zip(firsts, arrived, strict=True)}
            self._tags |= {first: unit.tag for first, unit in zip(firsts, units, strict=True)}
            self._behind_stats.bytes_loaded += sum(self._entry_bytes(unit.tag.kind) for unit in units)
        return len(arrived) == len(entries)

    def drain(self, seconds: float) -> bool:
        """Wait until the shared tier has been given all entries, at most this long. Returns whether it has."""
        return self._background is None or self._background.drain(seconds)

    def run_put_off(self, load_id: int) -> None:
        """All ranks have its entries: launch what is left of the load."""
        put_off = self._put_off.pop(load_id)
        for page in (page for unit in put_off.units for page in unit.pages):
            self._fetching.pop(page, None)
        self._run_loads(put_off.left)

    def drop_put_off(self, load_id: int, *, zero: bool = False) -> None:
        """The load is given up. Its entries may still arrive on the host.

        The model's later launches run after what was launched of it: its blocks and slots may be reused.

        Args:
            load_id: The load; nothing happens if it is not put off.
            zero: The next forward reads its blocks and its slot all the same: they hold zeros by then. What was there before may
                be anything, and a request cannot be sampled from NaN.
        """
        put_off = self._put_off.pop(load_id, None)
        if put_off is None:
            return
        self.wait_for_load(load_id)
        self.forget(load_id)
        if zero:
            for kind, tensors in self._tensors().items():
                (ids,) = self._ids(_device_ids([unit for unit in put_off.units if unit.tag.kind == kind]))
                for tensor in tensors:
                    tensor.index_fill_(1, ids, 0)

    @property
    def behind_stats(self) -> TierStats:
        """Transfers to and from the tier behind the host."""
        stats = dataclasses.replace(self._behind_stats)
        if self._background is not None:
            stats.full += self._background.refused
            stats.bytes_stored += self._background.stored_bytes
            stats.seconds = self._background.seconds
        return stats

    def _without_put_off(self, units: Sequence[BlockTransfer]) -> Sequence[BlockTransfer]:
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

    def _overwrite(self, units: Sequence[BlockTransfer]) -> set[int]:
        """The pages of these transfers are about to get other bytes. Returns those that cannot.

        These are pages that a thread is still filling, for a load that was given up. An entry that is lost so has no tag, so
        its load fails.
        """
        if self._background is None:
            return set()
        pages = [page for unit in units for page in unit.pages]
        busy = self._background.overwrite(pages)
        for page in pages:
            self._fetching.pop(page, None)
            self._given_sums.pop(page, None)
        if busy:
            logger.warning("%d pages of the host are still being filled by a load that was given up", len(busy))
            for unit in units:
                if not busy.isdisjoint(unit.pages):
                    self._tags.pop(unit.pages[0], None)
                    self._behind_stats.full += 1
        return busy

    def _begin_stores(self, background: BackgroundMoves, units: Sequence[BlockTransfer]) -> None:
        after = marks((self.stores.finish, self._stored))
        jobs = []
        for unit in units:
            first = unit.pages[0]
            if self._tags.get(first) != unit.tag:
                self._behind_stats.full += 1
                continue
            if background.is_moving(unit.tag, first):
                continue  # offered twice
            size = self._entry_bytes(unit.tag.kind)
            job = Job(unit.tag, size, unit.pages, self._views(unit.pages, size), after)
            given = self._given_sums.get(first)
            job.checksum = partial(self._seen_checksum, first, unit.tag) if given is None else partial(int, given)
            jobs.append(job)
        background.store(jobs)

    def _begin_fetches(self, background: BackgroundMoves, units: Sequence[BlockTransfer], busy: set[int]) -> None:
        after = marks((self.stores.finish, self._stored), (self.loads.finish, self._last_load))
        background.forget_ended()
        jobs: list[Job] = []
        group_bytes = 0
        # States first: they are the longest.
        for unit in sorted(units, key=lambda unit: unit.tag.kind is EntryKind.KV):
            self._tags.pop(unit.pages[0], None)  # set again by `fetched`
            size = self._entry_bytes(unit.tag.kind)
            if group_bytes and group_bytes + size > GROUP_BYTES:
                background.load(jobs)
                jobs, group_bytes = [], 0
            group_bytes += size
            job = Job(unit.tag, size, unit.pages, self._views(unit.pages, size), after)
            job.cancelled = not busy.isdisjoint(unit.pages)
            self._fetching |= dict.fromkeys(unit.pages, job)  # also then: all ranks put off the same loads
            jobs.append(job)
        background.load(jobs)

    def _seen_checksum(self, page: int, tag: Tag) -> int:
        return int(self._sums_seen[page]) ^ tag.digest

    def _views(self, pages: Sequence[int], size: int) -> list[tuple[int, memoryview]]:
        """An entry's bytes in its pages: (offset in the entry, view).

        At least one view, which is empty on a pipeline stage without such layers: all ranks wait for the same entries.
        """
        views: list[tuple[int, memoryview]] = []
        at = start = 0
        while at < len(pages) and (start < size or not views):
            first = at
            while at + 1 < len(pages) and pages[at + 1] == pages[at] + 1:  # adjacent pages are one view
                at += 1
            at += 1
            length = min((at - first) * self.page_bytes, size - start)
            begin = pages[first] * self.page_bytes
            views.append((start, self._view[begin : begin + length]))
            start += length
        return views

    # -- a tier behind the host, at once -------------------------------------------------------------------------------

    def _run_behind(self, units: Sequence[BlockTransfer], *, store: bool) -> None:
        start = time.perf_counter()
        # The CPU uses these pages next: wait for all transfers in flight.
        for queue, mark in ((self.stores, self._stored), (self.loads, self._last_load)):
            if mark is not None:
                queue.finish(mark)
        for _, group in groupby(units, key=lambda unit: unit.tag.kind):
            batch = list(group)
            try:
                if store:
                    self._store_behind(batch)
                else:
                    self._load_behind(batch)
            except Exception as error:  # a plugin's code may raise anything
                logger.error("the tier behind the host: %d %s failed: %s", len(batch), _kinds(batch[0]), error)
                if store:
                    self._behind_stats.full += len(batch)
        seconds = time.perf_counter() - start
        self._behind_stats.seconds += seconds
        self._behind_stats.seconds_waited += seconds

    def _store_behind(self, units: Sequence[BlockTransfer]) -> None:
        """Offer the entries in these pages to the tier behind the host."""
        assert self._behind is not None
        stored = [unit for unit in units if self._tags.get(unit.pages[0]) == unit.tag]
        sums = self._sums[self._ids([unit.pages[0] for unit in stored])[0]].tolist()
        size = self._entry_bytes(units[0].tag.kind)
        entries = []
        for unit, checksum in zip(stored, sums, strict=True):
            row = torch.empty(size, dtype=torch.uint8)
            for start, page, length in self._pieces([unit], size):
                row[start : start + length] = self._host(page, length)
            entries.append(Entry(unit.tag, memoryview(row.numpy()), checksum ^ unit.tag.digest))
        kept = sum(self._behind.put(entries)) if entries else 0
        self._behind_stats.full += len(units) - kept
        self._behind_stats.bytes_stored += size * kept

    def _load_behind(self, units: Sequence[BlockTransfer]) -> None:
        """Read entries from the tier behind the host into their pages. A missing entry fails its load, by its tag."""
        assert self._behind is not None
        for unit in units:
            self._tags.pop(unit.pages[0], None)  # set again below
        size = self._entry_bytes(units[0].tag.kind)
        rows = [torch.empty(size, dtype=torch.uint8) for _ in units]
        sums = self._behind.get([unit.tag for unit in units], [memoryview(row.numpy()) for row in rows])
        given = [(unit, row, found) for unit, row, found in zip(units, rows, sums, strict=True) if found is not None]
        for unit, row, _ in given:
            for start, page, length in self._pieces([unit], size):
                self._host(page, length).copy_(row[start : start + length])
        (pages,) = self._ids([unit.pages[0] for unit, *_ in given])
        expected = [found ^ unit.tag.digest for unit, _, found in given]
        self._sums[pages] = torch.tensor(expected, dtype=torch.int64).to(self._device)
        self._tags |= {unit.pages[0]: unit.tag for unit, *_ in given}
        self._behind_stats.bytes_loaded += size * len(given)

    def _try(self, move: Callable[[], None], batch: _Batch) -> bool:
        """Calls ``move()``, which copies the batch; returns whether it succeeded."""
        try:
            move()
        except (RuntimeError, OSError) as error:
            logger.error("a copy of %d %s failed: %s", len(batch.units), _kinds(batch.units[0]), error)
            for unit in batch.units:
                self._tags.pop(unit.pages[0], None)
                if unit.load_id is not None:
                    self._failed.add(unit.load_id)
            return False
        return True

    def wait_for_stores(self) -> None:
        """The model's later launches run after all stores have read their entries."""
        for mark in (self._sent, self._gathered):
            if mark is not None:
                self.stores.wait(mark)
        self._sent = self._gathered = None

    def wait_for_load(self, load_id: int) -> None:
        """The model's later launches run after this load."""
        if load_id in self._loaded:
            self.loads.wait(self._loaded[load_id])

    def forget(self, load_id: int) -> None:
        """Forget a load that the model has waited for, and whose result is not needed."""
        self._loaded.pop(load_id, None)
        self._in_flight.pop(load_id, None)
        self._failed.discard(load_id)

    def finish(self) -> None:
        """The CPU waits for all transfers between the device and the host."""
        for queue in (self.stores, self.loads):
            with queue.running():
                mark = queue.mark()
            queue.finish(mark)

    def has_failed(self, load_id: int) -> bool:
        """Whether an entry of the load differs from what was stored. Forgets the load.

        Call it after the model has used the loaded entries: the load is over by then, and the call does not wait.
        """
        mark, failed = self._loaded.get(load_id), load_id in self._failed
        self.forget(load_id)
        if mark is None and not isinstance(self.loads, HostQueue):
            return failed
        self.loads.finish(mark)
        return failed or bool(self._bad_rows_seen[load_id % _LOADS])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _direct_count(self, units: Sequence[BlockTransfer]) -> int:
        """How many of these stores, the first ones, go straight to the host: as many as the staging buffer has no room for.

        The model waits for the host link for those, and would wait longer for half of the buffer. At least those that fit in
        `FIRST_BYTES`, so that the link is busy while the others are gathered.
        """
        sizes = [self._row_bytes[unit.tag.kind] for unit in units]
        count = len(sizes)
        for _ in range(BUFFERS):
            used = 0
            while count and used + sizes[count - 1] <= self._store_staging.half_bytes:
                count -= 1
                used += sizes[count]
        first_bytes = sum(sizes[:count])
        while count < len(sizes) and first_bytes + sizes[count] <= FIRST_BYTES:
            first_bytes += sizes[count]
            count += 1
        return count

    def _batches(self, units: Sequence[BlockTransfer], staging: _Staging | None) -> Iterator[_Batch]:
        """Batches, in the order of the transfers. Those that follow each other in one half of the buffer fit there together.

        A batch has consecutive transfers of one kind that write to different places.

        Args:
            units: The transfers.
            staging: The buffer; None for stores that go straight to the host.
        """
        batch: list[BlockTransfer] = []
        written: set[int | None] = set()
        start = used = 0  # of the batch; of the half
        if staging is not None and units:
            staging.used_last = 1 - staging.used_last
        for unit in units:
            target = unit.device_id if unit.target == DEVICE else unit.pages[0]
            size = self._row_bytes[unit.tag.kind]
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

    def _batch(self, units: list[BlockTransfer], staging: _Staging | None, start: int) -> _Batch:
        half = 0 if staging is None else staging.used_last
        place = start if staging is None else half * staging.half_bytes + start
        nothing = self._row_ids[:0]
        return _Batch(units, half, place, nothing, nothing, nothing, is_direct=staging is None)

    def _upload(self, batches: Sequence[_Batch], *more: Sequence[int]) -> list[torch.Tensor]:
        """Uploads the ids of these batches, in one copy with more of them. Returns the batches' sums as one tensor, and the others."""
        parts: list[Sequence[int]] = []
        counts = [len(batch.units) for batch in batches]
        for batch in batches:
            count = max(1, ceil_div(self._bytes[batch.kind], self.page_bytes))
            parts.append(_device_ids(batch.units))
            parts.append([page for unit in batch.units for page in unit.pages[:count]])
        sums, *ids = self._ids([0] * sum(counts), *parts, *more)
        of_batches = iter(ids)
        for batch, own_sums in zip(batches, sums.split_with_sizes(counts), strict=True):
            batch.device_ids, batch.sums = next(of_batches), own_sums
            batch.pages = next(of_batches).view(len(batch.units), -1)
        return [sums, *of_batches]

    def _gather(self, batch: _Batch) -> None:
        """Gathers entries in the staging buffer."""
        self._copy_parts(batch, self._rows(self._store_staging, batch), to_pages=True)

    def _store(self, batch: _Batch) -> None:
        """Copies entries to the host: from the staging buffer, or from their places."""
        size = self._entry_bytes(batch.kind)
        if batch.is_direct:
            self._copy_parts(batch, None, to_pages=True)
        else:
            rows = self._rows(self._store_staging, batch)[None, :, :size]
            copy_pages(rows, self._memory_pages(), self._row_ids[: rows.shape[1]], batch.pages, to_pages=True)
        self._sums.index_copy_(0, batch.pages[:, 0], batch.sums)
        self._tags |= {unit.pages[0]: unit.tag for unit in batch.units}
        self.bytes_stored += size * len(batch.units)

    def _bring(self, *rounds: list[_Batch]) -> None:
        """Copies entries to the staging buffer, if the copy engines do that."""
        for round_ in rounds if self._load_by_engine else ():
            with self.loads.ahead(round_[0].half):
                for batch in round_:
                    batch.is_here = self._try(partial(self._copy_from_pages, batch), batch)

    def _copy_from_pages(self, batch: _Batch) -> None:
        ranges = (
            (batch.start + start, page * self.page_bytes, length)
            for start, page, length in self._pieces(batch.units, self._entry_bytes(batch.kind))
        )
        copy_ranges(self._load_staging.memory, self.memory, ranges, to_host=False)

    def _load(self, batch: _Batch) -> None:
        """Copies entries to their places."""
        for unit in batch.units:
            found = self._tags.get(unit.pages[0])
            if found != unit.tag:
                logger.error("host entry in page %d is %s, expected %s", unit.pages[0], found, unit.tag)
                self._failed.update(_load_ids([unit]))
        self._copy_parts(batch, self._rows(self._load_staging, batch) if self._load_by_engine else None, to_pages=False)
        self.bytes_loaded += self._entry_bytes(batch.kind) * len(batch.units)

    def _copy_parts(self, batch: _Batch, rows: torch.Tensor | None, *, to_pages: bool) -> None:
        """Copies the tensors of entries to or from rows of a staging buffer, or None: the pages. Sums what is copied."""
        memory, pages = self._memory_pages(), batch.pages
        if rows is not None:
            memory, pages = rows, self._row_ids[: len(rows), None]
        start, sums = 0, batch.sums if self._verify else None
        for part in self._parts(batch.kind):
            copy_pages(part, memory, batch.device_ids, pages, to_pages=to_pages, start_bytes=start, sums=sums)
            start += part.shape[0] * part.shape[2]

    def _parts(self, kind: EntryKind) -> list[torch.Tensor]:
        """Each tensor as (layers, entries, bytes)."""
        return [tensor.flatten(2).view(torch.uint8) for tensor in self._tensors()[kind]]

    def _rows(self, staging: _Staging, batch: _Batch) -> torch.Tensor:
        """A batch in a staging buffer, (units, bytes of all pages of an entry)."""
        row_bytes, count = self._row_bytes[batch.kind], len(batch.units)
        return staging.memory[batch.start : batch.start + count * row_bytes].view(count, row_bytes)

    def _entry_bytes(self, kind: EntryKind) -> int:
        """Bytes of an entry, rounded up to whole checksum words."""
        return ceil_div(self._bytes[kind], WORD_BYTES) * WORD_BYTES

    def _pieces(self, units: Sequence[BlockTransfer], valid_bytes: int) -> Iterator[tuple[int, int, int]]:
        """The copies for these rows: (start in the staging buffer, first page, bytes). Adjacent pieces are one copy."""
        page_bytes, row_bytes = self.page_bytes, self._row_bytes[units[0].tag.kind]
        start = first = length = 0  # of the piece that may grow
        for row, unit in enumerate(units):
            for index in range(ceil_div(valid_bytes, page_bytes)):
                at, page = row * row_bytes + index * page_bytes, unit.pages[index]
                if start + length != at or first * page_bytes + length != page * page_bytes:
                    if length:
                        yield start, first, length
                    start, first, length = at, page, 0
                length += min(page_bytes, valid_bytes - index * page_bytes)
        if length:
            yield start, first, length

    def _host(self, page: int, length: int) -> torch.Tensor:
        return self.memory[page * self.page_bytes : page * self.page_bytes + length]

    def _memory_pages(self) -> torch.Tensor:
        """All pages, (pages, bytes)."""
        return self.memory.view(-1, self.page_bytes)

    def _ids(self, *groups: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Each group on the device, (ids,) int64; in one copy."""
        together = ids_on_device(chain(*groups), self._device)
        return together.split_with_sizes([len(group) for group in groups])


def _without_shared_pages(units: Iterable[BlockTransfer]) -> Iterator[list[BlockTransfer]]:
    """Consecutive transfers that use different pages."""
    run: list[BlockTransfer] = []
    used: set[int] = set()
    for unit in units:
        if used.intersection(unit.pages):
            yield run
            run, used = [], set()
        run.append(unit)
        used.update(unit.pages)
    if run:
        yield run


def _checksum_of(job: Job | None) -> int | None:
    """The checksum of an entry that a thread has read; None if it did not arrive."""
    return (
        job.checksum if job is not None and job.found and isinstance(job.checksum, int) and not job.cancelled else None
    )


def _places(unit: BlockTransfer) -> tuple[int, ...]:
    """Pages, and the KV block or slot: below 0, to be another number than any page."""
    assert unit.device_id is not None
    return (*unit.pages, -1 - unit.tag.kind - len(EntryKind) * unit.device_id)


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
