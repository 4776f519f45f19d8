"""Tests marked ``gpu``, as jobs for processes, and which of them run at the same time. No torch here.

The marker says what a test needs::

    @pytest.mark.gpu(gib=4, seconds=60, gpus=2)

``gib`` is the most memory that torch reserves on a GPU, ``gpus`` how many GPUs (default 1), and ``seconds`` about how
long it takes on an H100 beside others (default 1), which only orders the tests. Markers of a module, a function and a
parameter add up; the nearest one counts. `tests.gpu.run` prints what was measured beside ``gib``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OWN_PROCESS = "tests/gpu/"  # tests of other folders start no processes; those of one file share one
CONTEXT_GIB = 1.5
"""What a process takes on a GPU beside torch's memory: contexts, kernels, captured graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A collected test, and what its markers say."""

    name: str
    gib: float
    gpus: int = 1
    seconds: float = 1.0

    @classmethod
    def of(cls, item: Any) -> Case:
        """The test of a pytest item. ValueError: its markers do not say how much memory it needs, or say something else."""
        need: dict[str, Any] = {}
        for node in item.listchain():  # the module first, and of a function's markers those of its parameters last
            for marker in node.own_markers:
                need |= marker.kwargs if marker.name == "gpu" else {}
        if "gib" not in need or need.keys() > {"gib", "gpus", "seconds"}:
            raise ValueError(f"{item.nodeid}: mark it gpu(gib=..., gpus=..., seconds=...), found {need}")
        return cls(name=item.nodeid, **need)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tests that one process of pytest runs; each GPU has to have ``gib`` free, the context included."""

    name: str
    tests: tuple[str, ...]
    gib: float
    gpus: int
    seconds: float


def jobs_of(tests: Iterable[Case]) -> list[Job]:
    """One job for each test of `OWN_PROCESS`, and for each other file and number of GPUs."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for test in tests:
        name = test.name if test.name.startswith(OWN_PROCESS) else test.name.partition("::")[0]
        groups.setdefault((name, test.gpus), []).append(test)
    return [
        Job(
            name=name,
            tests=tuple(test.name for test in own),
            gib=max(test.gib for test in own) + CONTEXT_GIB,
            gpus=gpus,
            seconds=sum(test.seconds for test in own),
        )
        for (name, gpus), own in groups.items()
    ]


def quick(tests: Iterable[Case]) -> list[Case]:
    """Of each test function, a new one too, the case with the fewest GPUs, of these the shortest, then the smallest."""
    best: dict[str, Case] = {}
    for test in tests:
        function = test.name.partition("[")[0]
        best[function] = min(best.get(function, test), test, key=lambda one: (one.gpus, one.seconds, one.gib))
    return list(best.values())


class Packer:
    """Starts jobs where there is room.

    The shortest and the longest job left take turns: results come at once, and no long job is left alone at the end. A job has a
    process for each of its GPUs. Those that do not fit even alone are ``too_large``.
    """

    def __init__(self, jobs: Iterable[Job], free_gib: Sequence[float], processes: int) -> None:
        self.free_gib, self.processes = list(free_gib), max(processes, len(free_gib))
        self.running: dict[Job, tuple[int, ...]] = {}
        ordered = sorted(jobs, key=lambda job: job.seconds)
        self.too_large = [job for job in ordered if self._place(job) is None]
        self._waiting = deque(job for job in ordered if job not in self.too_large)
        self._long = False

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Jobs that have not started."""
        return tuple(self._waiting)

    def start(self) -> Iterator[tuple[Job, tuple[int, ...]]]:
        """Jobs to start now, and on which GPUs."""
        while (found := self._next()) is not None:
            job, gpus = found
            self._waiting.remove(job)
            self._long = not self._long
            self.running[job] = gpus
            self.processes -= job.gpus
            for gpu in gpus:
                self.free_gib[gpu] -= job.gib
            yield job, gpus

    def end(self, job: Job) -> None:
        """The job has ended."""
        self.processes += job.gpus
        for gpu in self.running.pop(job):
            self.free_gib[gpu] += job.gib

    def _next(self) -> tuple[Job, tuple[int, ...]] | None:
        for job in reversed(self._waiting) if self._long else self._waiting:
            gpus = self._place(job)
            if gpus is not None:
                return job, gpus
        return None

    def _place(self, job: Job) -> tuple[int, ...] | None:
        """The GPUs with the most free memory, if they and the processes suffice."""
        roomy = sorted(range(len(self.free_gib)), key=lambda gpu: -self.free_gib[gpu])[: job.gpus]
        fits = len(roomy) == job.gpus <= self.processes and all(self.free_gib[gpu] >= job.gib for gpu in roomy)
        return tuple(sorted(roomy)) if fits else None
