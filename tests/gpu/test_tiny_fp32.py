"""``tiny`` in fp32 on a GPU, Triton kernels and all, against the float64 recompute."""

from __future__ import annotations

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 5e-3), ("ieee", 5e-5)])
def test_matches_the_recompute(precision, tolerance):
    """The scan's ``tl.dot`` uses TF32 on the tensor cores unless told otherwise, and the bound is TF32's then."""
    print(run_script("tiny_fp32.py", tolerance, TRITON_F32_DEFAULT=precision))
