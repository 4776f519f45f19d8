"""A rank is killed: the others end with an error, under torchrun and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.test_prefix_parallel import model_of, session
from tests.harness.lifecycle_helpers import tokens
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import DEVICE, WORKERS, environment, environments_of, run_play, run_torchrun

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RANKS = 2
# gloo sees that a connection is closed; NCCL waits for the collective's limit.
END_S = COLLECTIVE_HANG_S[DEVICE] + (90.0 if DEVICE == "cuda" else 0.0)


def play(out: Path) -> dict[str, Any]:
    """The last rank kills itself between two steps. The others go on, and must not complete."""
    asked = [["ask", tokens(1, 9, seed=seed), 40] for seed in range(3)]
    events = [*asked, ["go", 5], ["rest: kill", str(out), False], ["last: kill", str(out), True], ["run"]]
    pattern = "M*-M*-"
    parts = {"killed": session(pattern, RANKS, 1, events, check_ranks=True)}
    return {"sizes": {"tp": RANKS}, "model": model_of(pattern, 1), "parts": parts}


def test_torchrun_ends_all_ranks(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(AssertionError, match=r"Signal 9 \(SIGKILL\)") as raised:
        run_play(tmp_path, play(out), RANKS, by=run_torchrun, device=DEVICE)
    assert " hung:" not in str(raised.value).partition("\n")[0]
    pids = [int(Path(f"{out}.rank{rank}").read_text()) for rank in range(RANKS)]
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.skipif("MHP_RANKS" not in os.environ, reason="scripts/functional_tests.sh runs it")
def test_ranks_end_without_torchrun(tmp_path):
    out, errors = tmp_path / "out", [tmp_path / f"rank{rank}.err" for rank in range(RANKS)]
    path, processes = tmp_path / "play.json", []
    path.write_text(json.dumps(play(out)))
    try:
        for path, own in zip(errors, environments_of(RANKS), strict=True):
            with path.open("w") as stderr:
                command, env = (
                    [sys.executable, str(WORKERS / "scenario.py"), str(tmp_path / "found.json"), str(path)],
                    environment(DEVICE) | own,
                )
                processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr))
        *others, victim = processes
        assert victim.wait(HANG_S) == -9, errors[-1].read_text()
        for rank, process in enumerate(others):
            assert process.wait(END_S) != 0
            assert Path(f"{out}.rank{rank}").is_file() and errors[rank].read_text().strip()
    finally:
        for process in processes:
            process.kill()
            process.wait()
