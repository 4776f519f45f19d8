"""What is kept, and what goes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy.boundaries import Boundary, Reason, boundaries_in_span, prompt_boundaries
from megatron_hybrid_prefix.policy.eviction import make_eviction_policy

JUNCTION, TAIL, REPLAY = Reason.JUNCTION, Reason.TAIL, Reason.REPLAY


def kept(prompt_tokens: int, resume_tokens: int = 0, kv_depth_blocks: int = 0, min_computed_tokens: int = 1):
    return prompt_boundaries(
        prompt_tokens=prompt_tokens,
        block_tokens=256,
        resume_tokens=resume_tokens,
        kv_depth_blocks=kv_depth_blocks,
        min_computed_tokens=min_computed_tokens,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((255,), []),
        ((256,), [(256, TAIL)]),
        ((257,), [(256, TAIL)]),
        ((767,), [(512, TAIL)]),
        ((768,), [(512, REPLAY), (768, TAIL)]),
        ((769,), [(768, TAIL)]),
        ((769, 0, 0, 2), [(512, REPLAY), (768, TAIL)]),
        ((770, 0, 0, 2), [(768, TAIL)]),
        ((1000, 256), [(768, TAIL)]),
        ((1000, 768), []),  # already had
        ((1000, 0, 2), [(512, JUNCTION), (768, TAIL)]),
        ((1000, 512, 2), [(768, TAIL)]),  # the state is where KV ends
        ((1024, 0, 3), [(768, JUNCTION), (1024, TAIL)]),  # a junction is worth more than a replay
        ((1024, 768, 4), [(1024, JUNCTION)]),
        ((0,), []),
    ],
)
def test_boundaries_of_a_prompt(arguments, expected):
    assert list(kept(*arguments)) == expected


@given(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 20), st.integers(1, 300))
def test_boundaries_are_sorted_unique_aligned_and_still_to_come(prompt, resume, depth, min_computed):
    positions = [boundary.position_tokens for boundary in kept(prompt, 256 * resume, depth, min_computed)]
    assert positions == sorted(set(positions))
    assert all(position % 256 == 0 and position > 256 * resume for position in positions)


@given(st.lists(st.integers(1, 50), unique=True), st.lists(st.integers(1, 49), unique=True))
def test_each_boundary_is_in_one_span_whatever_the_cuts(positions, cuts):
    boundaries = [Boundary(position, TAIL) for position in sorted(positions)]
    edges = [0, *sorted(cuts), 50]
    spans = [boundaries_in_span(boundaries, *span) for span in itertools.pairwise(edges)]
    assert [boundary for span in spans for boundary in span] == boundaries
    for start, end, span in zip(edges, edges[1:], spans, strict=False):
        assert all(start < boundary.position_tokens <= end for boundary in span)


def test_lru_forgets_what_was_used_longest_ago():
    policy = make_eviction_policy("lru", Node)
    nodes = [Node(bytes([index]), None, index) for index in range(4)]
    for node in nodes:
        policy.added(node)
    policy.used(nodes[0])
    policy.removed(nodes[2])
    order = []
    while (victim := policy.victim(lambda node: True)) is not None:
        assert policy.victim(lambda node: True) is victim, "asking changes nothing"
        policy.removed(victim)
        order.append(victim.block_id)
    assert order == [1, 3, 0] and len(policy) == 0


def test_lru_steps_over_what_is_pinned():
    policy = make_eviction_policy("lru", Node)
    nodes = [Node(bytes([index]), None, index) for index in range(3)]
    for node in nodes:
        policy.added(node)
    assert policy.victim(lambda node: node.block_id > 0) is nodes[1]
    assert policy.victim(lambda node: False) is None
    assert list(policy) == nodes
    policy.clear()
    assert list(policy) == []


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="eviction_policy='random'"):
        make_eviction_policy("random", Node)


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_gb": -1},
        {"mamba_gb": float("nan")},
        {"mamba_gb": float("inf")},
        {"mamba_gb": 1, "eviction_policy": "fifo"},
        {"mamba_gb": 1, "state_dtype": "float16"},
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
