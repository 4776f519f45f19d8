"""The example in ten lines: it has no more, and it hits."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ten_lines.py"


def test_it_has_ten_lines():
    lines = {node.lineno for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.stmt)}
    assert len(lines - {1}) <= 10  # the first is the docstring


@pytest.mark.slow
def test_the_second_prompt_hits():
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (int(line.split()[0]) for line in result.stdout.splitlines())
    assert first == 0 and second == 512
