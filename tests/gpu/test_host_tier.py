"""The host tier on a GPU: three ways give the same bits, with copies on separate streams beside running requests."""

from __future__ import annotations

import json

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu(gib=3, seconds=60)


@pytest.mark.parametrize(
    ("preset", "mode"), [("small", "legacy"), ("small", "async"), ("small-gdn", "legacy"), ("small-mixed", "async")]
)
def test_cold_device_and_host_agree(preset, mode):
    found = json.loads(run_script("host_tier.py", mode, preset).strip().splitlines()[-1])
    print(found)
    assert preset != "small-gdn" or found["moved_blocks"] > 0
    assert found["reused_tokens_host"] > 20_000 and found["loads"] > 200
    assert found["fallbacks"] == {}
    assert found["bit_equal_states"] >= 10 and found["unequal_states"] == 0
    assert found["tokens_compared"] > 300
    assert found["mean_log_prob_difference"] < 0.03
