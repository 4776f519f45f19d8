"""Starts a worker script on several ranks, and reads the output of rank 0.

``MHP_RANKS_DEVICE=cuda`` puts ranks on GPUs: `scripts/functional_tests.sh`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.harness.limits import HANG_S, THREADS

WORKERS = Path(__file__).parent
COMMAND = WORKERS / "command.py"
DEVICE = os.environ.get("MHP_RANKS_DEVICE", "cpu")
_numbers = count()


def environment(device: str = "cpu") -> dict[str, str]:
    """This process's environment, changed for ranks on ``device``."""
    path = os.pathsep.join(filter(None, (str(WORKERS.parents[2]), os.environ.get("PYTHONPATH"))))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": path} | hidden


def torchrun(ranks: int) -> list[str]:
    """The start of a command that runs a script on ``ranks`` ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def free_port() -> int:
    """A free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@cache
def _prepared() -> subprocess.Popen[str]:
    """The process of `prepared`. Started once, and ended with this process."""
    process = subprocess.Popen(
        [sys.executable, str(WORKERS / "prepared.py")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        process.stdin.close()
        process.wait()

    atexit.register(end)
    return process


def run_prepared(
    script: str | Path,
    *arguments: Any,
    environments: tuple[dict[str, str], ...] = ({},),
    timeout_s: float = HANG_S,
    cwd: Path | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python SCRIPT ARGUMENTS...`` on the CPU, a process for each of ``environments``, without waiting for imports.

    Args:
        script: The script.
        *arguments: Its arguments.
        environments: What each process has in its environment, beside this process's.
        timeout_s: Limit of all.
        cwd: Working directory; None: this process's when the first was started.

    Raises:
        AssertionError: A process did not end in time.
    """
    process, number = _prepared(), next(_numbers)
    argv = list(map(str, arguments))
    with tempfile.TemporaryDirectory(prefix="prepared-") as folder:
        files = {kind: [f"{folder}/{kind}{at}" for at in range(len(environments))] for kind in ("outputs", "errors")}
        for path in (*files["outputs"], *files["errors"]):
            Path(path).touch()  # a process may be ended before it opens its own
        job = {"number": number, "script": str(script), "argv": argv, "timeout_s": timeout_s} | files
        job["cwd"] = None if cwd is None else str(cwd)
        now = environment()  # what a test has set since the process of `prepared` was started
        process.stdin.write(json.dumps(job | {"environments": [now | own for own in environments]}) + "\n")
        process.stdin.flush()
        answer = {"number": None}
        while answer["number"] != number:  # a test that was given up left its answer
            line = process.stdout.readline()
            assert line, f"the process that prepares others ended with {process.wait()}"
            answer = json.loads(line)
        said = [[Path(path).read_text(errors="replace") for path in files[kind]] for kind in ("outputs", "errors")]
    what = [str(script), *argv]
    assert not answer["hung"], f"{' '.join(what)} hung:\n" + "\n".join(text[-6000:] for text in said[1])
    return [
        subprocess.CompletedProcess(what, code, output, errors)
        for code, output, errors in zip(answer["codes"], *said, strict=True)
    ]


def environments_of(ranks: int) -> tuple[dict[str, str], ...]:
    """The environments that torchrun gives to this many processes."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return tuple(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))


def need_ranks(ranks: int) -> None:
    """Skips the test where ``MHP_RANKS`` says that there are fewer ranks."""
    most = int(os.environ.get("MHP_RANKS", str(ranks)))
    if ranks > most:
        pytest.skip(f"needs {ranks} ranks, there are {most}")


def run_ranks(script: str | Path, out: Path, *arguments: Any, ranks: int = 2, timeout_s: float = HANG_S) -> Any:
    """Run ``tests/harness/workers/SCRIPT OUT ARGUMENTS...`` on ranks on `DEVICE`; returns what OUT holds (JSON)."""
    if DEVICE == "cuda":
        return run_torchrun(script, out, *arguments, ranks=ranks, timeout_s=timeout_s, device=DEVICE)
    for _ in range(3):
        ended = run_prepared(
            WORKERS / script, out, *arguments, environments=environments_of(ranks), timeout_s=timeout_s
        )
        if not any("EADDRINUSE" in one.stderr for one in ended):  # somebody else took the port meanwhile
            break
    if any(process.returncode for process in ended):
        said = (f"rank {at} ended with {one.returncode}:\n{one.stderr[-6000:]}" for at, one in enumerate(ended))
        raise AssertionError(f"{script} {' '.join(map(str, arguments))}:\n" + "\n".join(said))
    return json.loads(out.read_text())


def run_torchrun(
    script: str | Path, out: Path, *arguments: Any, ranks: int = 2, timeout_s: float = HANG_S, device: str = "cpu"
) -> Any:
    """The same with ``torchrun``, on the host's CPU or GPUs."""
    process = subprocess.Popen(
        [*torchrun(ranks), str(WORKERS / script), str(out), *map(str, arguments)],
        env=environment(device),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    what = f"{script} {' '.join(map(str, arguments))}"
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"{what} hung:\n{process.communicate(timeout=60)[1][-6000:]}") from None
    finally:
        process.terminate()  # not kill: torchrun must end its workers, which are in other sessions
    assert process.returncode == 0, f"{what}:\n{errors[-6000:]}"
    return json.loads(out.read_text())


def write_findings(out: str, found: Any) -> None:
    """In a worker: ``found`` of every rank goes into OUT as a JSON list, in the order of the ranks."""
    import torch.distributed as dist

    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, found)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(every_rank))
    dist.barrier()
