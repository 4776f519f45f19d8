"""KV and states in one buffer of 22 GiB, at the sizes of real models. (``tests/kernels/test_one_memory.py`` has small ones.)"""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu


def test_views_give_the_bits_of_contiguous_tensors():
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of a GPU")
    said = run_script("one_memory.py")
    print(said)
    found = json.loads(said.strip().splitlines()[-1])
    assert found["other_bits"] == []
    assert found["cases"] >= 14


def test_blocks_have_their_bytes_after_many_pages_changed_their_owner_at_once():
    said = run_script("owner_change.py", "--tiny", "--repeats", 2)
    print(said)
    assert json.loads(said.strip().splitlines()[-1]) == {"cases": 10, "wrong": 0}
