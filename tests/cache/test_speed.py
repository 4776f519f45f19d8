"""Speed and memory of the control plane, with bounds three times the goals (issue 4) so that a busy machine passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import _bench_index


def test_memory_of_a_block():
    assert _bench_index.bytes_per_block(30_000) <= 600


def test_requests_of_a_trace():
    assert _bench_index.requests_per_second(3_000) >= 5_000 / 3
    assert _bench_index.requests_per_second(3_000, kv_blocks=2_048) >= 5_000 / 3


@pytest.mark.slow
def test_long_prompt_and_evictions_with_a_million_blocks():
    cache = _bench_index.filled_cache(1_000_000, 4_096)
    assert min(_bench_index.long_prompt_seconds(cache)["total"]) <= 3 * 3e-3
    assert _bench_index.eviction_seconds(cache, 50_000) <= 3 * 50e-6
    assert _bench_index.state_eviction_seconds(cache, 5_000) <= 3 * 50e-6


@pytest.mark.slow
def test_a_trace_ten_times_as_long_is_no_slower():
    short, long = _bench_index.requests_per_second(10_000), _bench_index.requests_per_second(100_000)
    assert long >= short / 3
