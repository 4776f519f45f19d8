"""`TierThreads`: threads that write entries to the tier below the host, and read entries from it into the host's pages.

A page may be given to another entry while a thread still uses it, because no decision of the cache may depend on how long a thread
takes. `overwrite` says so, before the page changes. A store that was not done by then is dropped: a thread copies the bytes first,
and looks afterwards. So is a read that has not begun. One that runs cannot be stopped: `overwrite` returns the page, and nothing may
be put there until it is over.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, Tier, copy_bytes, finish_at_exit
from megatron_hybrid_prefix.tiers.units import Tag
from megatron_hybrid_prefix.transfers.queue import Mark

logger = logging.getLogger(__name__)

_WRITERS = 2
_END_S = 1.0  # a thread that hangs in a read must not keep the process from ending


class JobGroup:
    """Jobs that were started together. The engine is woken once: threads that wake each other often are slow."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left, self._lock = len(jobs), threading.Lock()
        self._over = threading.Event()
        if not jobs:
            self._over.set()

    def end_one(self) -> None:
        """A job is over."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether all are over."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until all are over, at most this long. Returns whether they are."""
        return self._over.wait(max(0.0, seconds))


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """An entry that is being stored or read.

    Attributes:
        namespace: Its namespace; empty if the weights have changed since.
        tag: Its name.
        entry_bytes: Bytes of the entry.
        pages: Its pages.
        views: Its bytes there, one after the other.
        after: The thread waits for these before it touches the pages.
        sum_of: Of a store: returns the entry's checksum, once ``after`` is reached.
        checksum: Of a read that is over: what came with the entry; None if the entry is not in the pages.
        cancelled: The pages belong to another entry.
        is_running: A thread writes to the pages.
        is_over: The thread is done with it.
        group: The jobs that were started with it; not before it is started.
    """

    namespace: bytes
    tag: Tag
    entry_bytes: int
    pages: tuple[int, ...]
    views: Sequence[memoryview]
    after: Sequence[Callable[[], None]]
    sum_of: Callable[[], int] | None = None
    checksum: int | None = None
    cancelled: bool = False
    is_running: bool = False
    is_over: bool = False
    group: JobGroup = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Whether a read may write to the pages, until `end`."""
        with self.lock:
            self.is_running = not self.cancelled
            return self.is_running

    def give_up(self) -> bool:
        """The pages get other bytes. Returns whether they can: nothing writes to them any more."""
        with self.lock:
            self.cancelled = True
            return not self.is_running

    def end(self) -> None:
        """The thread is done with it."""
        with self.lock:
            self.is_running, self.is_over = False, True
            self.views, self.after = (), ()  # and with them the host's memory
        self.group.end_one()


@dataclass(slots=True)
class _Shared:
    """The objects that the threads use. They keep them alive, but not the `TierThreads`, which ends them."""

    tier: Tier
    lock: threading.Lock = field(default_factory=threading.Lock)
    stores: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)  # None: the thread ends
    reads: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    ended: bool = False
    stats: TierStats = field(default_factory=TierStats)


class TierThreads:
    """Threads that write entries to a tier and read entries from it.

    Args:
        tier: The tier.
        largest_bytes: Bytes of the largest entry.

    Attributes:
        stats: Bytes that were written, seconds of all moves, and entries that were not written (``full``): the tier refused
            them, or their pages were needed before.
        close: Called without arguments, ends the threads, once they have written all entries.
    """

    def __init__(self, tier: Tier, largest_bytes: int) -> None:
        shared = self._shared = _Shared(tier)
        self.stats = shared.stats
        self._of_page: dict[int, list[Job]] = {}  # jobs that may still touch a page
        self._stores: list[JobGroup] = []
        reads = [("tier-read", shared.reads, partial(_read, tier))] * tier.threads
        # Memory for the copies is made once: new memory costs as much time as the copy.
        memories = [memoryview(bytearray(largest_bytes)) for _ in range(_WRITERS)]
        writes = [("tier-write", shared.stores, partial(_write, shared, memory)) for memory in memories]
        self._threads = [
            threading.Thread(target=_serve, args=(shared, jobs, work), name=name, daemon=True)
            for name, jobs, work in (*reads, *writes)
        ]
        self.close = weakref.finalize(self, _end_of_work, shared, len(self._threads))
        self.close.atexit = False
        finish_at_exit(self)
        for thread in self._threads:
            thread.start()

    def store(self, jobs: Sequence[Job]) -> None:
        """Write entries to the tier, in this order."""
        self._stores = [group for group in self._stores if not group.is_over]
        self._stores.append(self._start(jobs, self._shared.stores))

    def read(self, jobs: Sequence[Job]) -> None:
        """Read entries from the tier into their pages, after those of earlier calls."""
        self._start(jobs, self._shared.reads)

    def _start(self, jobs: Sequence[Job], queue: SimpleQueue[Job | None]) -> JobGroup:
        group = JobGroup(jobs)
        for job in jobs:
            job.group = group
            for page in job.pages:
                of_page = self._of_page.setdefault(page, [])
                # A read stays until other bytes go there: loads wait for what it brought.
                of_page[:] = [other for other in of_page if not other.is_over or other.sum_of is None]
                of_page.append(job)
        for job in jobs:
            queue.put(job)
        return group

    def overwrite(self, pages: Iterable[int]) -> set[int]:
        """These pages are about to get other bytes. Returns those that cannot, because they are being read into."""
        busy = set()
        for page in pages:
            left = [job for job in self._of_page.pop(page, ()) if not job.give_up()]
            if left:
                self._of_page[page] = left
                busy.add(page)
        return busy

    def is_moving(self, tag: Tag, page: int) -> bool:
        """Whether a job with this tag uses the page and is not over."""
        return any(job.tag == tag and not job.is_over for job in self._of_page.get(page, ()))

    def read_of(self, tag: Tag, page: int) -> Job | None:
        """The last read of this entry into the page; None if there was none, or other bytes went there since."""
        return next(
            (job for job in reversed(self._of_page.get(page, ())) if job.sum_of is None and job.tag == tag), None
        )

    def drain(self, seconds: float) -> bool:
        """Wait until all entries are written, at most this long. Returns whether they are."""
        late = time.monotonic() + seconds
        return all([group.wait(late - time.monotonic()) for group in self._stores])

    def finish(self) -> None:
        """The process ends: write what can be written in the time that a request may wait, and end the threads.

        A thread that is in the middle of a copy when the interpreter is gone would abort the process.
        """
        self.drain(self._shared.tier.wait_s)
        self._shared.ended = True
        self.close()
        late = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, late - time.monotonic()))


def _end_of_work(shared: _Shared, threads: int) -> None:
    for _ in range(threads):
        shared.stores.put(None)
        shared.reads.put(None)


def marks(*queues: tuple[Callable[[Mark], None], Mark]) -> list[Callable[[], None]]:
    """For `Job.after`: waits for marks of queues, without those that are reached by now. Each wait costs a thread its turn.

    Args:
        queues: For each queue: what waits for a mark, and the mark.
    """
    return [partial(wait, mark) for wait, mark in queues if mark is not None and not mark.query()]


def _serve(shared: _Shared, jobs: SimpleQueue[Job | None], work: Callable[[Job], bool]) -> None:
    """A thread that does jobs, each once its pages may be used. ``work`` returns whether the entry has moved or need not move."""
    while (job := jobs.get()) is not None and not shared.ended:
        start, done = time.perf_counter(), False
        try:
            for wait in job.after:
                wait()
            done = work(job)
        except Exception as error:  # a tier's code may raise anything
            logger.error("the tier behind the host: a move of %s failed: %r", job.tag.kind.name, error)
        finally:
            with shared.lock:
                shared.stats.seconds += time.perf_counter() - start
                shared.stats.full += job.sum_of is not None and not done
            job.end()
        del job


def _read(tier: Tier, job: Job) -> bool:
    if job.begin():
        job.checksum = tier.get(job.namespace, job.tag, job.views)
    return True


def _write(shared: _Shared, memory: memoryview, job: Job) -> bool:
    if not shared.tier.wants(job.namespace, job.tag):
        return True
    if job.cancelled:
        return False
    row, at = memory[: job.entry_bytes], 0
    for view in job.views:
        copy_bytes(view, row[at : at + len(view)])
        at += len(view)
    assert job.sum_of is not None
    checksum = job.sum_of()
    # From here on the copy is used.
    if job.cancelled or not shared.tier.put(job.namespace, Entry(job.tag, row, checksum)):
        return False
    with shared.lock:
        shared.stats.bytes_stored += job.entry_bytes
    return True
