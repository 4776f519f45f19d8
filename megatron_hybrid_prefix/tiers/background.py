"""`BackgroundMoves`: threads that move entries between the host's pages and a tier behind the host.

A page may be given to another entry while a thread still reads or writes it, because no decision of the cache may depend on
how long a thread takes. `overwrite` says so, before the page changes. A store that was not done by then is dropped, and so is a
load that has not begun. A load straight into the page (`SharedTier.fill`) cannot be stopped: `overwrite` returns the page, and
nothing may be put there until it is over. A tier of another host reads and writes memory of the threads instead of pages
(`SharedTier.use_memory`).
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from megatron_hybrid_prefix.tiers.base import Entry, SharedTier, copy_bytes
from megatron_hybrid_prefix.tiers.queue import Mark
from megatron_hybrid_prefix.tiers.units import Tag

logger = logging.getLogger(__name__)

type Pieces = Sequence[tuple[int, memoryview]]
"""Bytes of an entry: (offset in the entry, view of pages), without gaps."""

_WRITERS = 2
_GROUPS_AHEAD = 2  # of a load, that are read at a time
_END_S = 1.0  # a thread that hangs in a read must not keep the process from ending


class JobGroup:
    """Jobs that were started together. The engine is woken once: threads that wake each other often are slow.

    Args:
        jobs: The jobs.

    Attributes:
        jobs: The jobs, until all are over.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs: Sequence[Job] = jobs
        self._left, self._lock = len(jobs), threading.Lock()
        self._over = threading.Event()
        if not jobs:
            self._over.set()

    def end_one(self) -> None:
        """A job is over."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self.jobs = ()  # which know this group
                self._over.set()

    def wait(self, seconds: float) -> bool:
        """Wait until all are over, at most this long. Returns whether they are."""
        return self._over.wait(max(0.0, seconds))


@dataclass(slots=True, eq=False)
class Job(AbstractContextManager[bool]):
    """An entry that is being stored or loaded.

    Attributes:
        tag: Its name.
        entry_bytes: Bytes of the entry.
        pages: Its pages.
        pieces: Its bytes there.
        after: The thread waits for these marks before it touches the pages.
        checksum: Of a store: returns the entry's checksum, once the marks are reached. Of a load: what came with it.
        cancelled: The pages belong to another entry.
        found: Of a load that is over: whether the bytes are in the pages.
        is_filled: A load straight into the pages runs.
        is_over: Whether the thread is done with it.
        group: The jobs that were started with it; None until then.
    """

    tag: Tag
    entry_bytes: int
    pages: tuple[int, ...]
    pieces: Pieces
    after: tuple[Callable[[], None], ...]
    checksum: Callable[[], int] | int = 0
    cancelled: bool = False
    found: bool = False
    is_filled: bool = False
    is_over: bool = False
    group: JobGroup | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def writing(self) -> AbstractContextManager[bool]:
        """Whether the thread may write to the pages; if so, they are given to nobody else until the block ends."""
        return self

    def begin_to_fill(self) -> bool:
        """Whether a load may write to the pages, until `end`."""
        with self as is_mine:
            self.is_filled = is_mine
        return is_mine

    def give_up(self) -> bool:
        """The pages get other bytes. Returns whether they can: nothing writes to them any more."""
        with self.lock:
            self.cancelled = True
            return not self.is_filled

    def end(self) -> None:
        """The thread is done with it; called again, it does nothing."""
        with self.lock:
            was_over, self.is_filled, self.is_over = self.is_over, False, True
        if not was_over:
            assert self.group is not None
            self.group.end_one()

    def __enter__(self) -> bool:
        self.lock.acquire()
        return not self.cancelled

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class _Shared:
    """What the threads use. They keep it alive, but not the `BackgroundMoves`, which ends them."""

    def __init__(self, tier: SharedTier) -> None:
        self.tier = tier
        self.lock = threading.Lock()
        self.stores: SimpleQueue[Job | None] = SimpleQueue()  # None: the thread ends
        self.loads: SimpleQueue[Job | None] = SimpleQueue()
        self.fills: SimpleQueue[Sequence[JobGroup]] = SimpleQueue()  # whole loads; no group: the thread ends
        self.ended = False
        self.stored_bytes = self.refused = 0
        self.seconds = 0.0


class BackgroundMoves:
    """See the top of this file.

    Args:
        tier: The tier.
        largest_bytes: Bytes of the largest entry.
    """

    def __init__(self, tier: SharedTier, largest_bytes: int) -> None:
        self._fills = tier.fills
        shared = self._shared = _Shared(tier)
        self._of_page: dict[int, list[Job]] = {}  # jobs that may still touch a page
        self._stores: list[JobGroup] = []
        work: list[tuple[str, Callable[[], None]]] = [
            ("_write", partial(_serve, shared, _write, largest_bytes))
        ] * _WRITERS
        read = partial(_serve_fills, shared) if tier.fills else partial(_serve, shared, _read, largest_bytes)
        work += [("_read", read)] * tier.threads
        threads = [threading.Thread(target=serve, name=name, daemon=True) for name, serve in work]
        self._threads = threads
        self._close = weakref.finalize(self, _end_of_work, shared, len(threads))
        self._close.atexit = False  # see `_at_exit`
        _LIVING.add(self)
        for thread in threads:
            thread.start()

    def store(self, jobs: Iterable[Job]) -> None:
        """Write entries to the tier, in this order."""
        self.forget_ended()
        self._stores = [group for group in self._stores if not group.wait(0)]
        self._stores.append(self._group(jobs))
        for job in self._stores[-1].jobs:
            self._shared.stores.put(job)

    def load(self, groups: Iterable[Sequence[Job]]) -> None:
        """Read entries from the tier into their pages, group after group."""
        self.forget_ended()
        started = [self._group(jobs) for jobs in groups if jobs]
        if self._fills and started:
            self._shared.fills.put(started)
        elif not self._fills:
            for job in [job for group in started for job in group.jobs]:
                self._shared.loads.put(job)

    def forget_ended(self) -> None:
        """Forget the jobs that are over."""
        for page, of_page in list(self._of_page.items()):
            of_page[:] = [job for job in of_page if not job.is_over]
            if not of_page:
                del self._of_page[page]

    def _group(self, jobs: Iterable[Job]) -> JobGroup:
        group = JobGroup(list(jobs))
        for job in group.jobs:
            job.group = group
            for page in job.pages:
                self._of_page.setdefault(page, []).append(job)
        return group

    def overwrite(self, pages: Iterable[int]) -> set[int]:
        """These pages are about to get other bytes. Returns those that cannot, because they are being filled."""
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

    def drain(self, seconds: float) -> bool:
        """Wait until all entries are written, at most this long. Returns whether they are."""
        late = time.monotonic() + seconds
        return all([group.wait(late - time.monotonic()) for group in self._stores])

    def close(self) -> None:
        """End the threads, once they have written all entries."""
        self._close()

    def finish(self) -> None:
        """The process ends: write what can be written in the time that a request may wait, and end the threads.

        A thread that is in the middle of a copy when the interpreter is gone would abort the process.
        """
        self.drain(self._shared.tier.wait_s)
        self._shared.ended = True
        self._close()
        late = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, late - time.monotonic()))

    @property
    def refused(self) -> int:
        """Entries that were not written: the tier refused them, or their pages were needed before."""
        return self._shared.refused

    @property
    def seconds(self) -> float:
        """Seconds that the threads moved entries, added up."""
        return self._shared.seconds

    @property
    def stored_bytes(self) -> int:
        """Bytes written."""
        return self._shared.stored_bytes


_LIVING: weakref.WeakSet[BackgroundMoves] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    for moves in list(_LIVING):
        moves.finish()


def _end_of_work(shared: _Shared, threads: int) -> None:
    for _ in range(threads):
        shared.stores.put(None)
        shared.loads.put(None)
        shared.fills.put(())


def marks(*queues: tuple[Callable[[Mark], None], Mark]) -> tuple[Callable[[], None], ...]:
    """For `Job.after`: waits for marks of queues, without those that are reached by now. Each wait costs a thread its turn.

    Args:
        queues: For each queue: what waits for a mark, and the mark.
    """
    return tuple(partial(wait, mark) for wait, mark in queues if mark is not None and not mark.query())


def _serve(shared: _Shared, work: Callable[[_Shared, Job, memoryview], None], largest_bytes: int) -> None:
    """A thread that writes or reads. Its memory is made once: new memory costs as much time as the copy."""
    memory = memoryview(torch.empty(largest_bytes, dtype=torch.uint8).numpy())
    try:
        shared.tier.use_memory(memory)
    except Exception as error:  # a tier's code may raise anything
        logger.error("the tier behind the host: use_memory failed: %r", error)
    queue = shared.stores if work is _write else shared.loads
    while (job := queue.get()) is not None and not shared.ended:
        with _working(shared, [job], work):
            work(shared, job, memory)
        del job  # and with it the host's memory


def _serve_fills(shared: _Shared) -> None:
    """A thread that reads for a tier which `fills`: a whole load, so that its groups begin and arrive in order."""
    while (groups := shared.fills.get()) and not shared.ended:
        _fill_groups(shared, groups)
        del groups


def _fill_groups(shared: _Shared, groups: Sequence[JobGroup]) -> None:
    """Few groups are read at a time: files are open, and what has begun cannot be given up."""
    begun: deque[_Fill] = deque()
    with _working(shared, [job for group in groups for job in group.jobs], _fill_groups), ExitStack() as stack:
        for group in groups:
            if len(begun) == _GROUPS_AHEAD:
                begun.popleft().finish()
            begun.append(stack.enter_context(closing(_Fill(shared.tier, group.jobs))))
        for fill in begun:
            fill.finish()


class _Fill:
    """A group that is being read straight into its pages."""

    def __init__(self, tier: SharedTier, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._mine = [job for job in jobs if job.begin_to_fill()]
        views = [[view for _, view in job.pieces] for job in self._mine]
        self._filling = tier.fill([job.tag for job in self._mine], views) if self._mine else None

    def finish(self) -> None:
        """Waits for it, and says what has arrived."""
        if self._filling is not None:
            for job, checksum in zip(self._mine, self._filling.wait(), strict=True):
                if checksum is not None:
                    job.checksum, job.found = checksum, True
        for job in self._jobs:
            job.end()
        self.close()

    def close(self) -> None:
        """Tidies up, once nothing writes to the pages any more."""
        if self._filling is not None:
            self._filling.close()
            self._filling = None


@contextmanager
def _working(shared: _Shared, jobs: Sequence[Job], work: Callable[..., object]) -> Iterator[None]:
    """Waits until the pages may be used. At the end the jobs are over, whatever happened."""
    start = time.perf_counter()
    try:
        for wait in jobs[0].after:  # the same for all
            wait()
        yield
    except Exception as error:  # a tier's code may raise anything
        what = f"{work.__name__[1:]} of {jobs[0].tag.kind.name}"
        logger.error("the tier behind the host: %s failed: %r", what, error)
        with shared.lock:
            shared.refused += work is _write
    finally:
        with shared.lock:
            shared.seconds += time.perf_counter() - start
        for job in jobs:
            job.end()


def _write(shared: _Shared, job: Job, memory: memoryview) -> None:
    if not shared.tier.wants(job.tag):
        return
    kept, row = False, memory[: job.entry_bytes]
    if not job.cancelled:
        for start, view in job.pieces:
            copy_bytes(view, row[start : start + len(view)])
        assert callable(job.checksum)
        checksum = job.checksum()
        if not job.cancelled:  # from here on the copy is used
            (kept,) = shared.tier.put([Entry(job.tag, row, checksum)])
    with shared.lock:
        shared.stored_bytes += job.entry_bytes * kept
        shared.refused += not kept


def _read(shared: _Shared, job: Job, memory: memoryview) -> None:
    row = memory[: job.entry_bytes]
    (checksum,) = shared.tier.get([job.tag], [row])
    if checksum is None:
        return
    for start, view in job.pieces:
        with job.writing() as is_mine:
            if not is_mine:
                return
            copy_bytes(row[start : start + len(view)], view)
    job.checksum, job.found = checksum, True
