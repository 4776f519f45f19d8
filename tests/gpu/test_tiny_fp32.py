"""Tiny models in fp32 on a GPU, Triton kernels and all, against the float64 recompute."""

from __future__ import annotations

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu(gib=2, seconds=60)


@pytest.mark.parametrize(
    ("preset", "precision", "tolerance"),
    [
        ("tiny", "tf32", 5e-3),
        *((name, "ieee", 5e-5) for name in ("tiny", "tiny-gdn", "tiny-mixed", "tiny-granite")),
        *(("gpt:tiny-gdn-pairs", "ieee", 5e-5), ("gpt:tiny-qwen3-next", "ieee", 5e-5)),
    ],
)
def test_matches_the_recompute(preset, precision, tolerance):
    """Mamba2's scan uses TF32 on the tensor cores unless told otherwise, and the bound is TF32's then."""
    print(run_script("tiny_fp32.py", tolerance, preset, TRITON_F32_DEFAULT=precision))
