"""Runs a script on this machine's GPUs in a new process, because the tests' process has started the CPU platform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.workers.launch import torchrun

FOLDER = Path(__file__).parent


def run_script(script: str, *arguments: Any, ranks: int = 1, timeout_s: float = 550.0, **env: str) -> str:
    """Runs ``tests/gpu/SCRIPT ARGUMENTS...``, under torchrun for several ranks. Returns its output."""
    launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
    path = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [*launcher, str(FOLDER / script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "4"} | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, f"{script}:\n{result.stdout[-3000:]}\n{result.stderr[-4000:]}"
    return result.stdout
