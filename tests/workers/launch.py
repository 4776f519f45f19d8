"""Start a worker script on several ranks, and read what its rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.limits import HANG_S, THREADS

WORKERS = Path(__file__).parent


def environment(device: str = "cpu") -> dict[str, str]:
    """This process's, for ranks on ``device``."""
    path = os.pathsep.join(filter(None, (str(WORKERS.parents[1]), os.environ.get("PYTHONPATH"))))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": path} | hidden


def run_ranks(
    script: str | Path, out: Path, *arguments: Any, ranks: int = 2, timeout_s: float = HANG_S, device: str = "cpu"
) -> Any:
    """Run ``torchrun tests/workers/SCRIPT OUT ARGUMENTS...`` on the host's CPU or GPUs; returns what OUT holds (JSON)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, str(WORKERS / script), str(out), *map(str, arguments)],
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
        raise AssertionError(f"{what} hung:\n{process.communicate(timeout=HANG_S)[1][-6000:]}") from None
    finally:
        process.terminate()  # not kill: torchrun then ends its workers, which are in sessions of their own
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
