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
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, Tier, copy_bytes, finish_at_exit
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag

logger = logging.getLogger(__name__)

_WRITERS = 2
_END_S = 1.0  # a thread that hangs in a read must not keep the process from ending


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """An entry that is being stored or read.

    Attributes:
        namespace: Its namespace; empty if the weights have changed since.
        tag: Its name.
        pages: Its pages.
        views: Its bytes there, one after the other.
        after: The thread waits for these before it touches the pages.
        sum_of: Of a store: returns the entry's checksum, once ``after`` is reached.
        over: Done once the thread is done with it: of a read, with what came with the entry, or None if the tier does not have it; of a
            store, with whether the tier has it. Running while a thread may write to the pages, cancelled if none will.
        is_lost: The pages belong to another entry.
    """

    namespace: bytes
    tag: Tag
    pages: tuple[int, ...]
    views: Sequence[memoryview]
    after: Sequence[torch.cuda.Event]
    sum_of: Callable[[], int] | None = None
    over: Future[int | None] = field(default_factory=Future)
    is_lost: bool = False

    @property
    def checksum(self) -> int | None:
        """Of a read: what came with the entry; None if the entry is not in the pages."""
        return self.over.result() if self.over.done() and not self.is_lost else None

    def give_up(self) -> bool:
        """The pages get other bytes. Returns whether they can: nothing writes to them any more."""
        self.is_lost = True
        return self.sum_of is not None or self.over.cancel() or self.over.done()


_NO_READ = Job(namespace=b"", tag=Tag(EntryKind.KV, b"", 0, 0), pages=(), views=(), after=())
_NO_READ.give_up()


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
        self._stores: list[Job] = []
        reads = [("tier-read", shared.reads, lambda job: tier.get(job.namespace, job.tag, job.views))] * tier.threads
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

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin jobs, in this order: reads after the reads of earlier calls, stores after their stores."""
        self._stores = [job for job in (*self._stores, *jobs) if job.sum_of is not None and not job.over.done()]
        for job in jobs:
            for page in job.pages:
                of_page = self._of_page.setdefault(page, [])
                # A read stays until other bytes go there: loads wait for what it brought.
                of_page[:] = [other for other in of_page if other.sum_of is None or not other.over.done()]
                of_page.append(job)
        for job in jobs:
            (self._shared.reads if job.sum_of is None else self._shared.stores).put(job)

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
        return any(job.tag == tag and not job.over.done() for job in self._of_page.get(page, ()))

    def read_of(self, tag: Tag, page: int) -> Job:
        """The last read of this entry into the page; `_NO_READ` if there was none, or other bytes went there since."""
        jobs = reversed(self._of_page.get(page, ()))
        return next((job for job in jobs if job.sum_of is None and job.tag == tag), _NO_READ)

    def drain(self, seconds: float) -> bool:
        """Wait until all entries are written, at most this long. Returns whether they are."""
        return are_over(self._stores, seconds)

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


def are_over(jobs: Iterable[Job], seconds: float) -> bool:
    """Wait for these jobs, at most this long. Returns whether all are over. Wakes once: threads that wake each other often are slow."""
    return not wait([job.over for job in jobs if not job.over.done()], max(0.0, seconds)).not_done


def _end_of_work(shared: _Shared, threads: int) -> None:
    for _ in range(threads):
        shared.stores.put(None)
        shared.reads.put(None)


def _serve(shared: _Shared, jobs: SimpleQueue[Job | None], work: Callable[[Job], int | None]) -> None:
    """A thread that does jobs, each once its pages may be used. ``work`` returns its result, see `Job.over`."""
    while (job := jobs.get()) is not None and not shared.ended:
        start, result = time.perf_counter(), None
        try:
            for mark in job.after:
                mark.synchronize()
            if job.over.set_running_or_notify_cancel():
                result = work(job)
        except Exception as error:  # a tier's code may raise anything
            logger.error("the tier behind the host: a move of %s failed: %r", job.tag.kind.name, error)
        with shared.lock:
            shared.stats.seconds += time.perf_counter() - start
            shared.stats.full += job.sum_of is not None and not result
        job.views, job.after = (), ()  # and with them the host's memory
        with suppress(InvalidStateError):  # it is cancelled
            job.over.set_result(result)
        del job


def _write(shared: _Shared, memory: memoryview, job: Job) -> bool:
    """Returns whether the entry is in the tier."""
    if not shared.tier.wants(job.namespace, job.tag):
        return True
    if job.is_lost:
        return False
    size = 0
    for view in job.views:
        copy_bytes(view, memory[size : size + len(view)])
        size += len(view)
    assert job.sum_of is not None
    checksum = job.sum_of()
    # From here on the copy is used.
    if job.is_lost or not shared.tier.put(job.namespace, Entry(job.tag, memory[:size], checksum)):
        return False
    with shared.lock:
        shared.stats.bytes_stored += size
    return True
