"""Where transfers run: on a separate CUDA stream; at once if there is no GPU."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

Mark = torch.cuda.Event | None
"""A point in a queue; None in a `HostQueue`."""

BUFFERS = 2  # that `ahead` fills in turn


def not_reached(*marks: Mark) -> list[torch.cuda.Event]:
    """Those of the marks that are not reached yet. Each wait for one takes time."""
    return [mark for mark in marks if mark is not None and not mark.query()]


class DeviceQueue:
    """A CUDA stream next to the model's stream.

    Args:
        device: Device of the stream.
        ahead: Number of streams for `ahead`; with two, each buffer has one.
    """

    def __init__(self, device: torch.device, ahead: int = 1) -> None:
        # Its few programs start before a large launch of the model.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._ahead = [torch.cuda.Stream(device, priority=-1) for _ in range(ahead)]
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._free = [torch.cuda.Event() for _ in range(BUFFERS)]  # when the content of each was used
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=4096)
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=4096)
        self._seconds = self._waited = 0.0

    @contextlib.contextmanager
    def running(self, *after: Mark, after_model: bool = True) -> Iterator[None]:
        """Launches inside the block run after the model's earlier launches, and in parallel with its later ones.

        Args:
            *after: They also run after these marks of other queues.
            after_model: False: they need not run after the model's launches.
        """
        marks = not_reached(*after)
        if after_model:
            marks.append(self._current().record_event())
        for mark in marks:
            for stream in (self._stream, *self._ahead):
                stream.wait_event(mark)
        start = torch.cuda.Event(enable_timing=True)
        start.record(self._stream)
        with self._stream:  # 10 us less of the CPU's time than `torch.cuda.stream`
            yield
        end = torch.cuda.Event(enable_timing=True)
        end.record(self._stream)
        self._timed.append((start, end))

    @contextlib.contextmanager
    def ahead(self, buffer: int) -> Iterator[None]:
        """Launches inside the block fill a buffer while others of the queue run, until `use`.

        Call it inside `running`. They wait until the buffer was freed.
        """
        stream = self._ahead[buffer % len(self._ahead)]
        stream.wait_event(self._free[buffer])
        with stream:
            try:
                yield
            finally:
                self._filled[buffer] = stream.record_event()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launches inside the block run while others of the queue run. Its later ones wait for them; call it inside `running`."""
        stream = self._ahead[0]
        try:
            with stream:
                yield
        finally:
            self._stream.wait_event(stream.record_event())

    def use(self, buffer: int) -> None:
        """The queue's later launches run after those that filled the buffer; call it inside `running`."""
        self._stream.wait_event(self._filled[buffer])

    def free(self, buffer: int) -> None:
        """The queue's launches until now are the last that use the buffer; call it inside `running`."""
        self._free[buffer] = self._stream.record_event()

    def mark(self) -> Mark:
        """Mark the current point of the queue, for `wait` and `finish`; call it inside `running` or `ahead`."""
        event: torch.cuda.Event = self._current().record_event()
        return event

    def wait(self, mark: Mark) -> None:
        """The model's later launches run after the mark."""
        assert mark is not None
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = self._current()
        before.record(stream)
        stream.wait_event(mark)
        after.record(stream)
        self._waits.append((before, after))

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device_index)  # by a number: a device takes the CPU longer

    def finish(self, mark: Mark) -> None:
        """The CPU waits for the mark."""
        assert mark is not None
        mark.synchronize()

    def seconds(self) -> tuple[float, float]:
        """Seconds that finished transfers took, and seconds that the model waited for them."""
        for events, name in ((self._timed, "_seconds"), (self._waits, "_waited")):
            while events and events[0][1].query():  # a statistic only: no decision depends on it
                start, end = events.popleft()
                setattr(self, name, getattr(self, name) + start.elapsed_time(end) / 1e3)
        return self._seconds, self._waited


class HostQueue:
    """As `DeviceQueue`, but runs transfers at once, in order; there is nothing to wait for."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def running(self, *after: Mark, after_model: bool = True) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def ahead(self, buffer: int = 0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def use(self, point: int | Mark = None) -> None:
        """Nothing to wait for."""

    beside = ahead
    free = wait = finish = mark = use

    def seconds(self) -> tuple[float, float]:
        return self._seconds, self._seconds


def queue_for(device: torch.device, ahead: int = 1) -> DeviceQueue | HostQueue:
    """A queue for transfers to and from this device."""
    return DeviceQueue(device, ahead) if device.type == "cuda" else HostQueue()
