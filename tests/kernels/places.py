"""Where operations run in tests: on the host in PyTorch, on a GPU as kernels, and with TRITON_INTERPRET=1 as kernels on the host."""

import os

import pytest

NAN = float("nan")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
