"""Policies: which states are kept, and which are evicted."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix.config import REMOVED, HybridPrefixConfig
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy.boundaries import (
    Boundary,
    CheckpointReason,
    boundaries_in_span,
    default_guesses,
    default_interval_tokens,
    prompt_boundaries,
)
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.registry import make_eviction_policy

JUNCTION, TAIL, REPEAT = CheckpointReason.JUNCTION, CheckpointReason.TAIL, CheckpointReason.REPEAT
BREAKPOINT, INTERVAL = CheckpointReason.BREAKPOINT, CheckpointReason.INTERVAL


def kept(
    prompt_tokens: int, resume_tokens: int = 0, kv_depth_blocks: int = 0, min_computed_tokens: int = 1, **retention
):
    return prompt_boundaries(
        prompt_tokens=prompt_tokens,
        block_tokens=256,
        resume_tokens=resume_tokens,
        kv_depth_blocks=kv_depth_blocks,
        min_computed_tokens=min_computed_tokens,
        **retention,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((255,), []),
        ((256,), [(256, TAIL)]),
        ((257,), [(256, TAIL)]),
        ((767,), [(512, TAIL)]),
        ((768,), [(512, REPEAT), (768, TAIL)]),
        ((769,), [(768, TAIL)]),
        ((769, 0, 0, 2), [(512, REPEAT), (768, TAIL)]),
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


@pytest.mark.parametrize(
    ("breakpoints", "expected"),
    [
        ((512,), [(512, BREAKPOINT), (1024, TAIL)]),
        ((767,), [(512, BREAKPOINT), (1024, TAIL)]),
        ((700, 300, 700, 256), [(256, BREAKPOINT), (512, BREAKPOINT), (1024, TAIL)]),
        ((0, -1, -256, -10_000, 255, 1280, 10**20), [(1024, TAIL)]),
        ((1024,), [(1024, BREAKPOINT)]),  # the better reason
        ((1100,), [(1024, BREAKPOINT)]),
    ],
)
def test_breakpoints(breakpoints, expected):
    assert list(kept(1100, breakpoints=breakpoints)) == expected


def test_breakpoints_lie_in_what_is_computed():
    assert list(kept(1100, resume_tokens=512, breakpoints=(300, 512, 800))) == [(768, BREAKPOINT), (1024, TAIL)]
    assert list(kept(1100, kv_depth_blocks=2, breakpoints=(512,))) == [(512, JUNCTION), (1024, TAIL)]
    assert list(kept(1024, breakpoints=(768,))) == [(768, BREAKPOINT), (1024, TAIL)]  # not the replay that it is too


def test_intervals_are_counted_from_the_start_of_the_prompt():
    assert list(kept(1300, interval_tokens=512)) == [(512, INTERVAL), (1024, INTERVAL), (1280, TAIL)]
    assert list(kept(1300, resume_tokens=256, interval_tokens=512)) == [(512, INTERVAL), (1024, INTERVAL), (1280, TAIL)]
    assert list(kept(1300, resume_tokens=512, interval_tokens=512)) == [(1024, INTERVAL), (1280, TAIL)]
    assert list(kept(1024, breakpoints=(256,), interval_tokens=256)) == [
        (256, BREAKPOINT),
        (512, INTERVAL),
        (768, REPEAT),
        (1024, TAIL),
    ]


@given(
    st.integers(0, 5000),
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.integers(-600, 6000), max_size=6),
    st.integers(0, 9),
)
def test_retention_adds_to_what_is_kept_anyway(prompt, resume, depth, breakpoints, interval):
    resume = min(256 * resume, prompt // 256 * 256)
    depth = min(depth, prompt // 256)
    before = dict(kept(prompt, resume, depth))
    after = kept(prompt, resume, depth, breakpoints=breakpoints, interval_tokens=256 * interval)
    positions = [boundary.position_tokens for boundary in after]
    assert positions == sorted(set(positions))
    assert all(position % 256 == 0 and resume < position <= prompt for position in positions)
    named = {position // 256 * 256 for position in breakpoints}
    for position, reason in after:
        if reason == BREAKPOINT:
            assert position in named and before.get(position) != JUNCTION
        elif reason == INTERVAL:
            assert position % (256 * interval) == 0 and position not in before
        else:
            assert before[position] == reason
    assert {position for position in before} <= set(positions)
    assert {position for position in named if resume < position <= prompt} <= set(positions)
    if interval:
        assert set(range(256 * interval, prompt + 1, 256 * interval)) - set(range(resume + 1)) <= set(positions)
    assert after == kept(
        prompt, resume, depth, breakpoints=[*breakpoints[::-1], *breakpoints], interval_tokens=256 * interval
    )


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


def test_the_default_interval_of_usual_prompts():
    found = [default_interval_tokens(prompt_tokens, 256) for prompt_tokens in (1, 4096, 4097, 8192, 8500, 100_000)]
    assert found == [256, 256, 512, 512, 768, 6400]


@given(st.lists(st.integers(1, 50), unique=True), st.lists(st.integers(1, 49), unique=True))
def test_each_boundary_is_in_one_span_whatever_the_cuts(positions, cuts):
    boundaries = [Boundary(position, TAIL) for position in sorted(positions)]
    edges = [0, *sorted(cuts), 50]
    spans = [boundaries_in_span(boundaries, *span) for span in itertools.pairwise(edges)]
    assert [boundary for span in spans for boundary in span] == boundaries
    for start, end, span in zip(edges, edges[1:], spans, strict=False):
        assert all(start < boundary.position_tokens <= end for boundary in span)


def test_lru_forgets_what_was_used_longest_ago():
    policy = make_eviction_policy("lru")
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


def test_lru_skips_pinned_states():
    policy = make_eviction_policy("lru")
    nodes = [Node(bytes([index]), None, index) for index in range(3)]
    for node in nodes:
        policy.added(node)
    assert policy.victim(lambda node: node.block_id > 0) is nodes[1]
    assert policy.victim(lambda node: False) is None
    assert list(policy) == nodes
    policy.clear()
    assert list(policy) == []


def guessed_and_asked_for(reasons: str) -> tuple[list[Node], LruEviction[Node]]:
    """One state per letter. g: an interval state; t: a tail."""
    policy = make_eviction_policy("lru")
    nodes = [Node(bytes([index]), None, index) for index in range(len(reasons))]
    for node, letter in zip(nodes, reasons, strict=True):
        node.reason = {"g": INTERVAL, "t": TAIL}[letter]
        policy.added(node)
    return nodes, policy


def lost_in_order(policy: LruEviction[Node], **options: bool) -> list[int]:
    order = []
    while (victim := policy.victim(lambda node: True, **options)) is not None:
        policy.removed(victim)
        order.append(victim.block_id)
    return order


def test_probationary_states_go_first_the_oldest_before_the_others():
    nodes, policy = guessed_and_asked_for("tgtgg")
    assert len(policy) == 5 and set(policy) == set(nodes)
    assert lost_in_order(policy) == [1, 3, 4, 0, 2]


def test_a_used_guess_is_like_any_other():
    nodes, policy = guessed_and_asked_for("gtggt")
    policy.used(nodes[2])
    policy.used(nodes[1])
    assert len(policy) == 5 and set(policy) == set(nodes)
    assert lost_in_order(policy) == [0, 3, 4, 2, 1]


def test_a_guess_takes_the_place_of_a_probationary_state_only():
    nodes, policy = guessed_and_asked_for("gtggt")
    policy.used(nodes[0])
    assert lost_in_order(policy, probationary_only=True) == [2, 3]
    assert lost_in_order(policy) == [1, 4, 0]
    nodes, policy = guessed_and_asked_for("tgg")
    assert policy.victim(lambda node: node is nodes[2], probationary_only=True) is nodes[2]
    assert policy.victim(lambda node: node is nodes[0], probationary_only=True) is None
    policy.clear()
    assert len(policy) == 0 and policy.victim(lambda node: True) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["guess", "tail", "use", "remove", "victim", "probationary"]), st.integers(0, 99))
    )
)
def test_the_order_of_eviction_is_that_of_two_lists(calls):
    policy = make_eviction_policy("lru")
    probationary: list[Node] = []
    others: list[Node] = []
    for number, (what, choice) in enumerate(calls):
        every = probationary + others
        if what in ("guess", "tail"):
            node = Node(number.to_bytes(2), None, number)
            node.reason = INTERVAL if what == "guess" else TAIL
            policy.added(node)
            (probationary if what == "guess" else others).append(node)
        elif what in ("victim", "probationary"):
            allowed = {node for node in every if (node.block_id + choice) % 3}
            expected = next(
                (node for node in (probationary if what == "probationary" else every) if node in allowed), None
            )
            assert policy.victim(allowed.__contains__, probationary_only=what == "probationary") is expected
        elif every:
            node = every[choice % len(every)]
            (probationary if node in probationary else others).remove(node)
            if what == "use":
                policy.used(node)
                others.append(node)
            else:
                policy.removed(node)
        assert list(policy) == probationary + others and len(policy) == len(probationary + others)


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
        {"mamba_gb": 1, "eviction_policy": "fifo"},
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


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_says_what_to_do(name):
    with pytest.raises(ValueError, match=rf"^{name}=True: this setting was removed: leave it out; .*$"):
        HybridPrefixConfig(mamba_gb=1, **{name: True})
    assert not hasattr(HybridPrefixConfig, name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'host_writes'"):
        HybridPrefixConfig(mamba_gb=1, host_writes=True)


def test_settings_can_be_copied():
    config = HybridPrefixConfig(mamba_gb=1, host_gb=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    assert not hasattr(config, "__dict__")
