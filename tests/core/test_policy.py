"""Policies: which states are kept, and which are evicted."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from bisect import bisect_right

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.policy.boundaries import (
    Boundary,
    CheckpointReason,
    boundaries_in_span,
    default_guesses,
    default_interval_tokens,
    prompt_boundaries,
)
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from tests.core.model import expected_boundaries

TAIL = CheckpointReason.TAIL


@given(
    prompt_tokens=st.integers(0, 5000),
    resume_tokens=st.integers(0, 20).map(lambda blocks: 256 * blocks),
    kv_depth_blocks=st.integers(0, 20),
    min_computed_tokens=st.integers(1, 300),
    breakpoints=st.lists(st.integers(-600, 6000), max_size=6),
    interval_tokens=st.sampled_from([None, 0, 256, 512, 1024]),
)
@example(768, 0, 0, 1, [], 0)  # a tail, and the replay
@example(1024, 0, 3, 1, [], 0)  # a junction is worth more than a replay
@example(1024, 0, 4, 1, [256, 512, 10**20], 256)
def test_boundaries_of_a_prompt(
    prompt_tokens, resume_tokens, kv_depth_blocks, min_computed_tokens, breakpoints, interval_tokens
):
    prompt = {
        "prompt_tokens": prompt_tokens,
        "block_tokens": 256,
        "resume_tokens": resume_tokens,
        "kv_depth_blocks": min(kv_depth_blocks, prompt_tokens // 256),
        "min_computed_tokens": min_computed_tokens,
        "breakpoints": breakpoints,
        "interval_tokens": interval_tokens,
    }
    assert list(prompt_boundaries(**prompt)) == expected_boundaries(**prompt)


@given(st.integers(0, 300_000), st.sampled_from([1, 3, 64, 96, 256, 1000]))
def test_the_default_interval(prompt_tokens, block_tokens):
    interval = default_interval_tokens(prompt_tokens, block_tokens)
    assert interval % block_tokens == 0 and interval >= block_tokens
    assert prompt_tokens // interval <= 16
    smaller = interval - block_tokens
    assert not smaller or 16 * smaller < prompt_tokens, "no wider than it has to be"


@given(st.integers(0, 100_000), st.sampled_from([3, 64, 256, 1000]))
def test_the_default_guesses(prompt_tokens, block_tokens):
    found = set(default_guesses(prompt_tokens, block_tokens))
    full_blocks = prompt_tokens // block_tokens
    assert all(position % block_tokens == 0 and 0 < position <= prompt_tokens for position in found)
    assert len(found) <= 16 + 2 * full_blocks.bit_length()
    depths = sorted({position // block_tokens for position in found} | {0})
    for own in (*range(1, min(50, full_blocks)), *range(50, full_blocks, 97)):  # blocks after those that it shares
        junction = full_blocks - own
        resumed = depths[bisect_right(depths, junction) - 1]
        assert 2 * (junction - resumed) < own, (own, junction, resumed)
    interval = default_interval_tokens(prompt_tokens, block_tokens)
    assert set(range(interval, prompt_tokens + 1, interval)) <= found


@given(st.lists(st.integers(1, 50), unique=True), st.lists(st.integers(1, 49), unique=True))
def test_each_boundary_is_in_one_span_whatever_the_cuts(positions, cuts):
    boundaries = [Boundary(position, TAIL) for position in sorted(positions)]
    edges = [0, *sorted(cuts), 50]
    spans = [boundaries_in_span(boundaries, *span) for span in itertools.pairwise(edges)]
    assert [boundary for span in spans for boundary in span] == boundaries
    for start, end, span in zip(edges, edges[1:], spans, strict=False):
        assert all(start < boundary.position_tokens <= end for boundary in span)


@pytest.mark.parametrize("name", ["random", "replay_cost"])
def test_an_unknown_policy_is_refused(name):
    for refuse in (make_eviction_policy, lambda name: HybridPrefixConfig(mamba_gb=1, eviction_policy=name)):
        with pytest.raises(ValueError, match=f"^eviction_policy='{name}': must be 'lru' or 'recompute_cost'"):
            refuse(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_gb": -1},
        {"mamba_gb": float("nan")},
        {"mamba_gb": float("inf")},
        {"mamba_gb": 1, "state_dtype": "float16"},
        {"mamba_gb": 1, "retention_interval_tokens": -1},
    ],
)
def test_config_says_which_field_is_wrong(fields):
    with pytest.raises(ValueError, match=list(fields)[-1]):
        HybridPrefixConfig(**fields)


def test_config_is_frozen_and_by_keyword():
    config = HybridPrefixConfig(mamba_gb=0, state_dtype="bfloat16")
    with pytest.raises(AttributeError):
        config.mamba_gb = 2
    with pytest.raises(TypeError):
        HybridPrefixConfig(1)


def test_settings_can_be_copied():
    config = HybridPrefixConfig(mamba_gb=1, host_gb=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    assert not hasattr(config, "__dict__")
