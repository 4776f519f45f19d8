"""The Triton kernels on a machine without a GPU: Triton's interpreter runs them, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S

FOLDER = Path(__file__).parent
pytest.importorskip("triton")


@pytest.mark.slow
def test_the_kernels_do_what_the_loops_do():
    result = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_slot_ops.py", "test_chunk_outputs.py",
            "test_delta_rule.py", "test_delta_gates.py", "test_mamba_decode.py", "test_paged_attention.py",
            "test_checksum.py", "test_samples.py", "test_page_copies.py", "test_wrong_entries.py", "test_finite.py",
            "test_elementwise.py", "test_gated_norm.py", "test_invariant_triton.py", "test_open_chunk.py",
            "test_one_memory.py", "test_residual_norm.py", "test_experts.py", "test_state_codes.py",
        ],
        cwd=FOLDER,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
    assert " passed" in result.stdout
