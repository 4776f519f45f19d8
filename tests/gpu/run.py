"""Runs the tests marked ``gpu``, as many at a time as fit the GPUs and the host's cores.

    python -m tests.gpu.run --quick                  # a case of each test function: five minutes on a GPU of 80 GiB
    python -m tests.gpu.run                          # all of them, on all GPUs; those for more GPUs are left out
    python -m tests.gpu.run cuda_graphs host_tier    # tests with one of these words in their names
    python -m tests.gpu.run --list                   # what each needs, also on a machine without a GPU

Each test is a process of pytest, each file of ``tests/kernels`` and ``tests/core`` one. A process starts where the
memory that its tests need (`tests.gpu.packing`) is free. No test asserts a time, so they may share a GPU. Prints a line
as each process ends: seconds, the most that torch reserved in it, where torch can say ("!": more than asked for), and
the memory asked for. Its output is in a file of ``--out``. Exit code 1 if a test failed or did not end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.launch import PEAKS
from tests.gpu.packing import CONTEXT_GIB, Case, Job, Packer, jobs_of, quick

ROOT = Path(__file__).resolve().parents[2]
PLACES = ["tests/gpu", "tests/kernels", "tests/core"]
END_S = 20.0  # for processes that are told to end
_FREE = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]))"
)


class Collector:
    """A plugin of pytest that keeps the collected tests."""

    def __init__(self) -> None:
        self.tests: list[Case] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [Case.of(item) for item in session.items]


def collect(words: list[str]) -> list[Case]:
    """The tests marked ``gpu`` with one of the words in their names. SystemExit: there are none, or pytest cannot import one."""
    collector, said = Collector(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(said):
        options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        code = pytest.main([*options, *PLACES], plugins=[collector])
    tests = [test for test in collector.tests if not words or any(word in test.name for word in words)]
    if code or not tests:
        raise SystemExit(f"no tests of {words or 'pytest'}: {said.getvalue()[-3000:]}")
    return tests


def free_gib() -> list[float]:
    """Free memory of each GPU. In a process of its own, because a context takes memory."""
    found = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=True)
    return [free_bytes / 2**30 for free_bytes in json.loads(found.stdout)]


class Running:
    """A process of pytest that runs a job on these GPUs; its output goes into a file of ``out``."""

    def __init__(self, job: Job, gpus: tuple[int, ...], out: Path) -> None:
        self.job, self._start_s = job, time.monotonic()
        self._log = out / (re.sub(r"[^\w.-]+", "_", job.name).strip("_")[-150:] + f"_{job.gpus}.log")
        self._peaks = self._log.with_suffix(".peaks")
        self._peaks.unlink(missing_ok=True)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # of these, where the variable is set
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) if visible == [""] else visible[gpu] for gpu in gpus),
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # else each process compiles its kernels
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(out / "flash-attention"),
            "TRITON_CACHE_AUTOTUNING": "1",  # else each process times the configurations of its kernels
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            PEAKS: str(self._peaks),
        }
        command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.launch"]
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [*command, *job.tests], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, number: signal.Signals) -> None:
        """A signal for pytest and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def outcome(self, cut: bool) -> tuple[str, str]:
        """Passed, skipped (all tests were), failed or cut; and a line about it."""
        said = self._log.read_text(errors="replace").splitlines()
        summary = next((line for line in reversed(said) if re.search(r"\d (passed|failed|skipped|error)", line)), "")
        ended = "passed" if "passed" in summary else "skipped"
        outcome = "cut" if cut else ended if self._process.returncode == 0 else "failed"
        peaks = self._peaks.read_text().split() if self._peaks.exists() else []
        seconds, gib = time.monotonic() - self._start_s, self.job.gib - CONTEXT_GIB
        peak_gib = max(map(int, peaks)) / 2**30 if peaks else 0.0
        peak = f"{peak_gib:5.1f}{'!' * (peak_gib > gib)}" if peaks else "    ?"
        name = self.job.name.removeprefix("tests/")
        return outcome, f"{outcome:7} {seconds:6.1f} s  {peak} of {gib:4.1f} GiB  {name}  ({summary.strip('= ')})"


def run_all(packer: Packer, out: Path, limit_s: float) -> Counter[str]:
    """Runs the jobs of a packer. Returns how many passed, were skipped, failed, were cut, and did not begin."""
    start_s, running = time.monotonic(), []
    found: Counter[str] = Counter()

    def say(one: Running, cut: bool = False) -> None:
        outcome, line = one.outcome(cut)
        found[outcome] += 1
        print(f"[{time.monotonic() - start_s:5.0f} s] {line}", flush=True)

    try:
        while (running or packer.waiting) and time.monotonic() - start_s < limit_s:
            running += [Running(job, gpus, out) for job, gpus in packer.start()]
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                packer.end(one.job)
                say(one)
            time.sleep(0.2)
    finally:
        end(running)
    for one in running:
        say(one, cut=True)
    found["not begun"] = len(packer.waiting)
    return found


def end(running: list[Running]) -> None:
    """Ends what still runs: torchrun ends its workers, if it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in running:
            one.tell(number)
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s and not all(one.has_ended() for one in running):
            time.sleep(0.2)


def table(jobs: list[Job]) -> str:
    """What each job needs."""
    return "\n".join(
        f"{job.gpus} x {job.gib - CONTEXT_GIB:4.1f} GiB, about {job.seconds:4.0f} s  {job.name}"
        + (f" ({len(job.tests)} tests)" if len(job.tests) > 1 else "")
        for job in sorted(jobs, key=lambda job: job.seconds)
    )


def main(argv: Any = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="run tests with one of them in their names; default: all")
    parser.add_argument("--quick", action="store_true", help="a case of each test function, and of those for one GPU")
    parser.add_argument("--gpus", type=int, help="use only the first of them")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help=f"processes at a time (default: cores, {cores} here)")
    parser.add_argument("--limit-s", type=float, help="of all (default: 300 with --quick, else 1,800)")
    parser.add_argument("--list", action="store_true", help="only say what each process would need")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    arguments = parser.parse_args(argv)
    tests = collect(arguments.words)
    if arguments.quick:
        tests = quick(test for test in tests if test.gpus == 1)
    jobs = jobs_of(tests)
    if arguments.list:
        print(table(jobs))
        return 0
    free = free_gib()[: arguments.gpus]
    if not free:
        raise SystemExit("there is no GPU here; --list says what each test needs")
    packer = Packer(jobs, free, arguments.jobs)
    for job in packer.too_large:
        print(f"left out: {job.name}: needs {job.gib:.1f} GiB on {job.gpus} GPUs", flush=True)
    here = ", ".join(f"{gib:.1f}" for gib in free)
    print(
        f"{len(packer.waiting)} processes, {len(tests)} tests; GiB free: {here}; {arguments.jobs} at a time", flush=True
    )
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    found = run_all(packer, out, arguments.limit_s or (300.0 if arguments.quick else 1800.0))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.items() if count)
    print(f"{counts or 'nothing'}, {time.monotonic() - start_s:.0f} s", flush=True)
    return 0 if set(+found) <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
