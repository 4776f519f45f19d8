"""The cache adds nothing that makes the CPU wait for the GPU."""

from __future__ import annotations

import json

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu(gib=3, seconds=60)


@pytest.mark.parametrize("preset", ["small", "small-gdn"])
def test_plan_publish_and_forward_do_not_wait_and_steps_wait_no_more_often_than_without(preset):
    printed = run_script("syncs.py", preset).strip().splitlines()[-1]
    print(printed)
    found = json.loads(printed)
    called = found["ours, called"]
    cache, step = "match admit plan publish release", "prepare_prefill prepare copy show launch"
    for name in (*cache.split(), *step.split()):
        assert called[name] >= 3, name
    assert called["prefill" if preset == "small" else "slot_prefill"] >= 9
    assert found["ours, reused"] == 4 * 1024 and found["ours, published"] > 0
    for kind in ("whole", "short tail", "long tail"):
        off, ours = found[f"off, {kind}"], found[f"ours, {kind}"]
        assert ours["prefill"] <= off["prefill"], kind
        assert ours["decode"] <= off["decode"], kind
    moved = found["memory use"]
    assert min(moved["pages_to_states"], moved["pages_to_kv"], moved["moved_blocks"]) > 0
    assert [found[f"async, {sampling}"]["decode"] for sampling in ("greedy", "sampled", "log-probs")] == [0, 0, 0]
    for kind in ("prefill", "decode"):
        assert found["ours, moves"][kind] <= found["off, moves"][kind]
