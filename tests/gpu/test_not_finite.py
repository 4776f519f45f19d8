"""One bad token: attention, scans and sampling on a GPU keep it from all others, and no assertion of the device ends the process."""

from __future__ import annotations

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu(gib=4, seconds=60)


@pytest.mark.parametrize("preset", ["small", "small-gdn", "tiny-nemotron-3"])
def test_earlier_tokens_keep_their_bits_and_others_their_answers(preset):
    print(run_script("not_finite.py", preset))
