"""Accuracy of the cache on a GPU, and the copies it makes there."""

from __future__ import annotations

import json

import pytest

from tests.gpu.launch import FIXED_BLOCKS, run_script


def report(script, *arguments, **env):
    """The last JSON that a script prints."""
    line = run_script(script, *arguments, **env).strip().splitlines()[-1]
    print(line)
    return json.loads(line)


@pytest.mark.gpu(gib=6, seconds=150)
@pytest.mark.parametrize(
    ("preset", "prompts"),
    [("small", 200), ("small-gdn", 200), pytest.param("small-mixed", 100, marks=pytest.mark.gpu(seconds=120))],
)
def test_a_hit_is_as_near_to_float32_as_a_miss(preset, prompts):
    found = report("hit_error.py", preset, prompts, **FIXED_BLOCKS)
    assert found["prompts"] >= prompts and found["forced_tokens"] >= 32
    assert found["reused_tokens"] >= (prompts - 2) * 1024
    assert found["hit_over_miss"] <= 1.05


@pytest.mark.gpu(gib=3, seconds=40)
@pytest.mark.parametrize("preset", ["small", "small-gdn"])
def test_keeping_states_moves_no_state(preset):
    found = report("kept_states.py", preset, 8192)
    assert found["hit_reused_tokens"] == 4096
    assert found["kernels"] > 100  # the profiler saw the step
    assert found["moving_operators"] == {}
    assert found["largest_copy_bytes"] < 0.1 * found["state_bytes_of_a_layer"]


@pytest.mark.gpu(gib=8, seconds=60)
def test_a_decode_of_recurrent_layers_is_that_of_float64():
    """And a table of its times, which nothing judges."""
    print(run_script("decode_speed.py"))
