"""Runs the tests that need a GPU, several at a time on each GPU. Usage: ``python -m tests.gpu.run [--gpus N] [WORDS...]``.

    python -m tests.gpu.run --gpus 1 --jobs 12 --out out/gpu           # all of them; those for several GPUs are skipped
    python -m tests.gpu.run --gpus 1 --jobs 12 --need 1 --without chunked_prefill as_near       # those that are done in five minutes
    python -m tests.gpu.run --gpus 4 --jobs 4 cuda_graphs host_tier    # tests with one of these words in their names

Each test is a process of pytest: what it does is mostly waiting for the host (imports, compiling of kernels, small steps).
No test asserts a time, so they may share a GPU. Tests for several GPUs run first. Prints a line as each test ends; its output is in a
file of ``--out``. Exit code: 0; 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div

ROOT = Path(__file__).resolve().parents[2]
PLACES = ["tests/gpu", "tests/kernels", "tests/core/test_host_arena.py"]
OWN_PROCESS = "tests/gpu/"  # tests of other folders start no processes; those of one file share one
LONGEST = ("chunked_prefill", "as_near", "nemotron", "test_delta_rule", "agreement", "cuda_graphs", "paged")  # first
TWO = re.compile(r"\b(tp2|pp2|ep2|(tiny|4b)-2)\b")
FOUR = re.compile(r"\b(tp4|2x2)\b")


@dataclass(frozen=True, slots=True)
class Job:
    """Tests that one process runs."""

    name: str
    tests: tuple[str, ...]
    gpus: int


def collect(words: list[str], without: list[str], slow: bool) -> list[Job]:
    """The tests marked ``gpu`` with one of the words in their names and none of others, as jobs; the longest first."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "gpu" if slow else "gpu and not slow",
        *PLACES,
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if not tests:
        raise SystemExit(f"pytest found no tests:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    groups: dict[str, list[str]] = {}
    for test in tests:
        if (not words or any(word in test for word in words)) and not any(word in test for word in without):
            name = test if test.startswith(OWN_PROCESS) else test.partition("::")[0]
            groups.setdefault(name, []).append(test)
    jobs = [Job(name, tuple(own), max(map(gpus_of, own))) for name, own in groups.items()]
    return sorted(jobs, key=lambda job: next((at for at, word in enumerate(LONGEST) if word in job.name), len(LONGEST)))


def gpus_of(test: str) -> int:
    """GPUs that a test needs, by its name."""
    return 4 if FOUR.search(test) else 2 if TWO.search(test) else 1


def run(job: Job, gpus: list[int], out: Path, limit_s: float) -> tuple[bool, str]:
    """Runs the tests of a job on these GPUs. Returns whether they passed, and a line about it."""
    path = out / (re.sub(r"[^\w.-]+", "_", job.name).strip("_")[-150:] + ".log")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # of these, where the variable is set
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) if visible == [""] else visible[gpu] for gpu in gpus),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # else each process compiles its kernels
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(out / "flash-attention"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", *job.tests]
    started_s = time.monotonic()
    with path.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = None
    said = path.read_text(errors="replace")
    summary = next(
        (line for line in reversed(said.splitlines()) if re.search(r"\d (passed|failed|skipped|error)", line)), ""
    )
    outcome = "passed" if code == 0 else "hung" if code is None else "failed"
    seconds = time.monotonic() - started_s
    return code == 0, f"{outcome:6} {seconds:6.1f} s  {job.name.removeprefix('tests/')}  ({summary.strip('= ')})"


def run_all(jobs: list[Job], gpus: int, per_gpu: int, out: Path, limit_s: float) -> int:
    """Runs the jobs, those for several GPUs first. Returns how many failed."""
    failed, started_s = 0, time.monotonic()

    def say(passed: bool, line: str) -> None:
        nonlocal failed
        failed += not passed
        print(f"[{time.monotonic() - started_s:5.0f} s] {line}", flush=True)

    alone = [job for job in jobs if 1 < job.gpus <= gpus]
    for size in (4, 2, 1):
        # A test that needs more GPUs than there are skips itself.
        own = [job for job in jobs if (job in alone and job.gpus == size) or (size == 1 and job not in alone)]
        places: Queue[list[int]] = Queue()
        for _ in range(per_gpu if size == 1 else ceil_div(per_gpu, 2)):
            for first in range(0, gpus - size + 1, size):
                places.put(list(range(first, first + size)))
        _in_places(own, places, out, limit_s, say)
    return failed


def _in_places(jobs: list[Job], places: Queue[list[int]], out: Path, limit_s: float, say: Any) -> None:
    def one(job: Job) -> None:
        gpus = places.get()
        try:
            say(*run(job, gpus, out, limit_s))
        finally:
            places.put(gpus)

    if jobs:
        with ThreadPoolExecutor(places.qsize()) as pool:
            list(pool.map(one, jobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="run tests with one of them in their names; default: all")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=6, help="processes on each GPU")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="but none with one of these")
    parser.add_argument("--need", type=int, nargs="+", default=[1, 2, 4], help="run tests that need so many GPUs")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of a process")
    parser.add_argument("--not-slow", action="store_true", help="without tests marked slow")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        job for job in collect(arguments.words, arguments.without, not arguments.not_slow) if job.gpus in arguments.need
    ]
    print(f"{len(jobs)} processes, {sum(len(job.tests) for job in jobs)} tests", flush=True)
    started_s = time.monotonic()
    failed = run_all(jobs, arguments.gpus, arguments.jobs, arguments.out, arguments.limit_s)
    print(f"{len(jobs) - failed} passed, {failed} failed, {time.monotonic() - started_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
