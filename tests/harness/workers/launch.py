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
    # Ranks on GPUs decide as one on the CPU, which does not compare how long a load takes with computing.
    own = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"HYBRID_PREFIX_TOKENS_PER_GIB": "0"}
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": path} | own


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


def _ask(**question: Any) -> Any:
    """Asks the process of `prepared`, and waits for its answer."""
    process, number = _prepared(), next(_numbers)
    process.stdin.write(json.dumps(question | {"number": number}) + "\n")
    process.stdin.flush()
    answer = {"number": None}
    while answer["number"] != number:  # a test that was given up left its answer
        line = process.stdout.readline()
        assert line, f"the process that prepares others ended with {process.wait()}"
        answer = json.loads(line)
    return answer


class Prepared:
    """``python SCRIPT ARGUMENTS...`` on the CPU, a process for each of ``environments``, without waiting for imports.

    Their output goes into files of ``folder``, to be read while they run: ``outputs`` of stdout, ``errors`` of stderr. Each has an
    environment beside this process's. ``cwd`` None is this process's working directory when the first was started.
    """

    def __init__(
        self,
        folder: Path,
        script: str | Path,
        *arguments: Any,
        environments: tuple[dict[str, str], ...] = ({},),
        cwd: Path | None = None,
    ) -> None:
        self._argv = [str(script), *map(str, arguments)]
        self.outputs, self.errors = (
            [folder / f"{kind}{at}" for at in range(len(environments))] for kind in ("outputs", "errors")
        )
        for path in (*self.outputs, *self.errors):
            path.touch()  # a process may be ended before it opens its own
        now = environment()  # what a test has set since the process of `prepared` was started
        self.pids: list[int] = _ask(
            script=str(script),
            argv=self._argv[1:],
            environments=[now | own for own in environments],
            outputs=list(map(str, self.outputs)),
            errors=list(map(str, self.errors)),
            cwd=None if cwd is None else str(cwd),
        )["pids"]

    def send_signal(self, number: int) -> None:
        """Sends a signal to those that run. Do not call it after `wait`: their ids may be those of others."""
        for pid in self.pids:
            os.kill(pid, number)

    def wait(self, timeout_s: float = HANG_S) -> list[subprocess.CompletedProcess[str]]:
        """Waits until all have ended, and ends the others if one fails. AssertionError: one did not end in time."""
        answer = _ask(pids=self.pids, timeout_s=timeout_s)
        outputs, errors = ([path.read_text(errors="replace") for path in of] for of in (self.outputs, self.errors))
        assert not answer["hung"], f"{' '.join(self._argv)} hung:\n" + "\n".join(text[-6000:] for text in errors)
        return [
            subprocess.CompletedProcess(self._argv, code, output, error)
            for code, output, error in zip(answer["codes"], outputs, errors, strict=True)
        ]


def run_prepared(
    script: str | Path, *arguments: Any, timeout_s: float = HANG_S, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script as `Prepared` does, to its end; ``timeout_s``: limit of all."""
    with tempfile.TemporaryDirectory(prefix="prepared-") as folder:
        return Prepared(Path(folder), script, *arguments, **options).wait(timeout_s)


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


def run_play(folder: Path, play: dict[str, Any], ranks: int = 2, **options: Any) -> Any:
    """What each rank finds in a play of `scenario`; ``options`` are those of `run_ranks`, or ``by=run_torchrun`` and its."""
    path, run = folder / "play.json", options.pop("by", run_ranks)
    path.write_text(json.dumps(play))
    return run("scenario.py", folder / "found.json", path, ranks=ranks, **options)


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
