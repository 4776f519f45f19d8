"""Runs a script on this machine's GPUs in a new process, because the tests' process has started the CPU platform.

As a module it is that process: ``python -m tests.gpu.launch SCRIPT ARGUMENTS...``.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.workers.launch import torchrun

FOLDER = Path(__file__).parent
PEAKS = "HYBRID_PREFIX_GPU_PEAKS"
"""Names the file that gets the peak of each process; `tests.gpu.run` sets it."""
FIXED_BLOCKS = {"TRITON_F32_DEFAULT": "ieee", "MAMBA_DETERMINISTIC": "1", "TRITON_CACHE_AUTOTUNING": "0"}
"""For comparisons with float32: no TF32, and megatron's kernels take blocks of fixed sizes. Else Triton times many, in
minutes, and the fastest decides in which order is summed. (Where its choice is cached, megatron allows them all.)"""


def run_script(script: str, *arguments: Any, ranks: int = 1, timeout_s: float = 550.0, **env: str) -> str:
    """Runs ``tests/gpu/SCRIPT ARGUMENTS...``, under torchrun for several ranks. Returns its output."""
    launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
    path = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [*launcher, "-m", "tests.gpu.launch", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "4"} | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, f"{script}:\n{result.stdout[-3000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def found_by(script: str, *arguments: Any, **env: str) -> dict[str, Any]:
    """The last line that a script prints, JSON."""
    line = run_script(script, *arguments, **env).strip().splitlines()[-1]
    print(line)
    return json.loads(line)


def note_peak() -> None:
    """Adds the most bytes that torch has reserved on a GPU in this process to the file of `PEAKS`."""
    path, torch = os.environ.get(PEAKS), sys.modules.get("torch")
    if path and torch is not None and torch.cuda.is_initialized():
        peak_bytes = max(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count())))
        with open(path, "a") as file:
            file.write(f"{peak_bytes}\n")


def pytest_sessionfinish() -> None:
    """The same for tests that run in pytest's process, where this module is a plugin."""
    note_peak()


if __name__ == "__main__":
    atexit.register(note_peak)
    del sys.argv[0]
    runpy.run_path(str(FOLDER / sys.argv[0]), run_name="__main__")
