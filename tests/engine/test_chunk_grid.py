"""Chunks on the absolute token grid: where they end, and how many there can be."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers.step import ChunkGrid
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

# (SSM chunk, KV block): alike, one a multiple of the other, neither.
SIZES = st.tuples(st.integers(1, 24), st.integers(1, 24)) | st.sampled_from(
    [(128, 256), (128, 64), (128, 96), (256, 192)]
)


@pytest.fixture(scope="module")
def chunk_grid(platform):
    return lambda sizes: ChunkGrid(chunk_tokens=sizes[0], block_tokens=sizes[1])


@given(sizes=SIZES, start=st.integers(0, 2000), tokens=st.integers(1, 600))
def test_ends_are_the_multiples_and_the_last_token(chunk_grid, sizes, start, tokens):
    chunk_tokens, block_tokens = sizes
    end = start + tokens
    ends = chunk_grid(sizes).ends(start, end)
    assert ends == sorted(set(ends))
    multiples = {p for p in range(start + 1, end + 1) if p % chunk_tokens == 0 or p % block_tokens == 0}
    assert set(ends) == multiples | {end}
    assert all(0 < b - a <= chunk_tokens for a, b in zip([start, *ends], ends, strict=False))


@given(sizes=SIZES, start=st.integers(0, 1000), cuts=st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_a_scan_cut_anywhere_splits_where_an_uncut_one_does(chunk_grid, sizes, start, cuts):
    """Each chunk of the whole is one or more chunks of the parts. Parts are split only at the cuts."""
    grid = chunk_grid(sizes)
    whole, parts, position = grid.ends(start, start + sum(cuts)), [], start
    for tokens in cuts:
        parts += grid.ends(position, position + tokens)
        position += tokens
    assert set(whole) <= set(parts)
    assert set(parts) - set(whole) <= {start + sum(cuts[:i]) for i in range(1, len(cuts))}


def test_an_empty_span_has_no_end(chunk_grid):
    assert chunk_grid((4, 6)).ends(12, 12) == []


@given(sizes=SIZES, spans=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=8))
@example(sizes=(128, 96), spans=[(95, 2), (127, 2), (191, 2)])  # two tokens, one on each side of an end
@example(sizes=(5, 7), spans=[(4, 4)])  # ends at 5, 7 and 8
def test_max_chunks_is_enough_for_any_spans(chunk_grid, sizes, spans):
    grid = chunk_grid(sizes)
    chunks = sum(max(1, len(grid.ends(start, start + tokens))) for start, tokens in spans)
    assert chunks <= grid.max_chunks(sum(tokens for _, tokens in spans), len(spans))


@given(sizes=SIZES, tokens=st.integers(0, 300), sequences=st.integers(0, 8))
def test_max_chunks_grows_with_both(chunk_grid, sizes, tokens, sequences):
    """So a buffer that is sized for the maximum is large enough for less (a step pads only up to its own size)."""
    grid = chunk_grid(sizes)
    most = grid.max_chunks(tokens, sequences)
    assert most <= grid.max_chunks(tokens + 1, sequences)
    assert most <= grid.max_chunks(tokens, sequences + 1)


@given(sizes=SIZES, tokens=st.integers(1, 400), sequences=st.integers(1, 6))
def test_max_chunks_is_not_wasteful(chunk_grid, sizes, tokens, sequences):
    """The bound is within three chunks per sequence of the worst case: spans that start just before a chunk's end."""
    chunk_tokens, block_tokens = sizes
    needed = tokens // chunk_tokens + (tokens // block_tokens if block_tokens % chunk_tokens else 0)
    assert chunk_grid(sizes).max_chunks(tokens, sequences) <= needed + 3 * sequences


@pytest.mark.parametrize("max_tokens", [65, 101])
def test_any_budget_of_tokens_runs(tiny, max_tokens):
    engine = build_engine(
        tiny, HybridPrefixConfig(mamba_gb=0.01), max_requests=4, max_tokens=max_tokens, max_sequence_length=512
    )
    finished: dict = {}
    engine.add_request(0, random_tokens(max_tokens, seed=1), greedy(2))
    run_to_end(engine, finished)
    assert len(finished[0].generated_tokens) == 2
