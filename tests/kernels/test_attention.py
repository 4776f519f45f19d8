"""Attention over a paged cache: against loops, with everything outside the valid keys poisoned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import attention, attention_cuda
from tests.kernels import naive, rounding
from tests.kernels.places import NAN

DIM, PAGE = 4, 3


def make(seed, q_lens, k_lens, heads, kv_heads, dtype=torch.float64, dim=DIM, page=PAGE):
    """Returns (q, k_cache, v_cache, table); pages are shuffled, and what no request owns is NaN."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-n // page) for n in k_lens]
    blocks = sum(needed) + 2
    order = torch.randperm(blocks, generator=g)
    k, v = (torch.randn(blocks, page, kv_heads, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    table = torch.full((len(k_lens), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    owned = torch.zeros(blocks, page, dtype=torch.bool)
    first = 0
    for i, n in enumerate(needed):
        table[i, :n] = order[first : first + n]
        first += n
        for t in range(k_lens[i]):
            owned[table[i, t // page], t % page] = True
    k[~owned] = NAN
    v[~owned] = NAN
    q = torch.randn(sum(q_lens), heads, dim, generator=g, dtype=torch.float64).to(dtype)
    return q, k, v, table


def cumulative(lengths):
    """Returns (n + 1,) int32 starting at 0."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def varlen(q, k, v, table, q_lens, k_lens, **options):
    """Calls the varlen entry point the way upstream does: eight arguments by position."""
    return attention.flash_attn_varlen_func(
        q, k, v, cumulative(q_lens), cumulative(k_lens), max(q_lens), max(k_lens), block_table=table, **options
    )


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (2, 0), (2, -1), (-1, 1), (1, 2), None]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 1000),
    scores_per_block=st.sampled_from([1, 20, 2**24]),
)
def test_varlen_matches_the_loops(lens, heads, causal, window, padding, seed, scores_per_block):
    q_lens, k_lens = [q for q, _ in lens], [k for _, k in lens]
    q, k, v, table = make(seed, q_lens, k_lens, *heads)
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), NAN, dtype=q.dtype)])
    before, attention.SCORES_PER_BLOCK = attention.SCORES_PER_BLOCK, scores_per_block
    try:
        out, lse, none = varlen(
            q, k, v, table, q_lens, k_lens, causal=causal, window_size=window, softmax_scale=0.7, return_attn_probs=True
        )
    finally:
        attention.SCORES_PER_BLOCK = before
    assert none is None
    assert lse.shape == (heads[0], q.shape[0])
    left, right = window or (-1, -1)
    start = 0
    for i, (rows, keys) in enumerate(lens):
        span = slice(start, start + rows)
        start += rows
        expected = naive.attention_rows(
            q[span], naive.pages(k, table[i], keys), naive.pages(v, table[i], keys), 0.7, left, 0 if causal else right
        )
        torch.testing.assert_close(out[span], expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse[:, span], expected[1], rtol=1e-9, atol=1e-9)
    assert (out[start:] == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    k_lens=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    steps=st.integers(1, 3),
    window=st.sampled_from([(-1, -1), (2, 0)]),
    seed=st.integers(0, 1000),
)
def test_kvcache_is_varlen_with_as_many_rows_of_each(k_lens, steps, window, seed):
    q_lens = [steps] * len(k_lens)
    q, k, v, table = make(seed, q_lens, k_lens, 4, 2)
    options = {"causal": True, "window_size": window}
    out, lse = attention.flash_attn_with_kvcache(
        q=q.view(len(k_lens), steps, 4, DIM),
        k_cache=k,
        v_cache=v,
        cache_seqlens=torch.tensor(k_lens, dtype=torch.int32),
        block_table=table,
        num_splits=0,
        return_softmax_lse=True,
        **options,
    )
    expected, expected_lse, _ = varlen(q, k, v, table, q_lens, k_lens, return_attn_probs=True, **options)
    torch.testing.assert_close(out, expected.view(len(k_lens), steps, 4, DIM), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse.unflatten(1, (-1, steps)).transpose(0, 1), rtol=1e-9, atol=1e-9)


def check_rounding(dtype, seed):
    """Raises AssertionError if outputs or log-sum-exps exceed their rounding bounds."""
    q, k, v, table = make(seed, [6], [40], 4, 2, dtype=dtype, dim=16, page=8)
    out, lse, _ = varlen(q, k, v, table, [6], [40], causal=True, return_attn_probs=True)
    assert out.dtype == dtype
    exactly = (q.double(), naive.pages(k, table[0], 40), naive.pages(v, table[0], 40), 0.25)
    exact, exact_lse = naive.attention_rows(*exactly, -1, 0)
    weighted, weighted_lse = rounding.attention(*exactly)
    rounding.check(out, exact, rounding.allowed(exact, weighted, dtype))
    rounding.check(lse, exact_lse, rounding.allowed(exact_lse, weighted_lse, torch.float32))
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mutant", [None, "in_bfloat16", "a_stale_page"])
def test_the_error_is_that_of_the_precision_and_mutants_are_seen(monkeypatch, mutant, dtype):
    gather_pages = attention.gather_pages

    def stale(cache, block_ids, tokens):
        rows = gather_pages(cache, block_ids, tokens)
        rows[8:16] = rows[:8]
        return rows

    if mutant == "in_bfloat16":
        monkeypatch.setattr(attention, "compute_dtype", lambda tensor: torch.bfloat16)
    elif mutant == "a_stale_page":
        monkeypatch.setattr(attention, "gather_pages", stale)
    for seed in range(4):
        with rounding.only(mutant):
            check_rounding(dtype, seed)


def test_other_requests_do_not_change_the_bits():
    q_lens, k_lens = [5, 1, 30, 0, 7], [9, 40, 30, 4, 7]
    q, k, v, table = make(0, q_lens, k_lens, 4, 2, dtype=torch.float32, dim=16, page=8)
    out = varlen(q, k, v, table, q_lens, k_lens, causal=True)
    start = 0
    for i, rows in enumerate(q_lens):
        if rows:
            alone = varlen(q[start : start + rows], k, v, table[i : i + 1], [rows], [k_lens[i]], causal=True)
            assert torch.equal(alone, out[start : start + rows])
        start += rows


def test_a_long_prompt_needs_no_square_matrix(monkeypatch):
    """The peak number of scores stays below the limit. 3000 rows over 3000 keys and 2 heads would be 18 million."""
    sizes = []
    exp_ = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda self: sizes.append(self.numel()) or exp_(self))
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", 2**20)
    q, k, v, table = make(0, [3000], [3000], 2, 1, dtype=torch.float32, page=256)
    out = varlen(q, k, v, table, [3000], [3000], causal=True)
    assert out.isfinite().all()
    assert len(sizes) > 1
    assert max(sizes) <= 2**20


def test_the_cuda_version_says_what_it_cannot_do():
    q, k, v, table = make(0, [2], [5], 2, 2)
    for options in ({"causal": False}, {"window_size": (4, 0)}, {"return_attn_probs": True}):
        options = {"causal": True, "block_table": table} | options
        with pytest.raises(NotImplementedError):
            attention_cuda.flash_attn_varlen_func(q, k, v, cumulative([2]), cumulative([5]), 2, 5, **options)


@pytest.mark.parametrize(
    ("dtype", "dim", "theirs"),
    [
        *((torch.bfloat16, dim, True) for dim in (16, 64, 128, 256)),
        *((torch.bfloat16, dim, False) for dim in (20, 24, 272)),
        (torch.float32, 128, False),
    ],
)
def test_flash_attention_4_gets_what_it_supports(monkeypatch, dtype, dim, theirs):
    called = []
    monkeypatch.setattr(attention_cuda, "paged_attention", lambda *args: called.append("ours"))
    call = attention_cuda.flash_attn4_varlen_func(lambda *args, **kwargs: called.append(kwargs["num_splits"]), True)
    q, k, v, table = make(0, [1], [3], 2, 1, dtype=dtype, dim=dim, page=16)
    lengths = torch.tensor([3], dtype=torch.int32)
    given = {"cu_seqlens_q": cumulative([1]), "seqused_k": lengths, "max_seqlen_q": 1, "max_seqlen_k": 3}
    given |= {"page_table": table, "softmax_scale": None, "causal": True, "window_size": (-1, -1), "num_splits": 0}
    call(q, k, v, **given)
    assert called == [1 if theirs else "ours"]


@pytest.mark.parametrize(
    ("page", "dim", "rows", "spare", "hopper", "halves"),
    [
        (128, 128, 17, 0, True, True),
        (128, 64, 300, 0, True, True),
        (128, 128, 1, 0, True, True),
        (128, 128, 17, 64, True, True),
        (128, 128, 17, 5, True, True),  # no whole number of halves from a block to the next
        (128, 128, 17, 0, False, False),
        (256, 128, 17, 0, True, False),
        (128, 256, 17, 0, True, False),  # FA4's tile is shorter
    ],
)
def test_flash_attention_4_gets_no_pages_of_its_tile_on_hopper(page, dim, rows, spare, hopper, halves):
    """They are the same keys and values, also where other layers' lie between the blocks of one."""
    memory = torch.arange(5 * (4 * page + spare) * 2 * dim).view(5, -1, 2, dim).bfloat16()
    k, v = memory[:, page : 2 * page], memory[:, 3 * page : 4 * page]
    table = torch.tensor([[3, 0, 4], [1, 1, 2]], dtype=torch.int32)
    called = []
    call = attention_cuda.flash_attn4_varlen_func(lambda *args, **kwargs: called.append((*args, kwargs)), hopper)
    call(torch.zeros(rows, 4, dim, dtype=torch.bfloat16), k, v, page_table=table, max_seqlen_q=rows, num_splits=0)
    ((_, *cut, options),) = called
    assert options["num_splits"] == (1 if hopper else 0) and options["page_table"].dtype == torch.int32
    one_kernel = hopper and rows > 16  # FA4 has another where 192 queries or fewer, its longest tile, are the bound
    assert options["max_seqlen_q"] == (max(rows, 256) if one_kernel else rows)
    for whole, part in zip((k, v), cut, strict=True):
        assert part.shape[1] == (64 if halves else page) and part.shape[2:] == whole.shape[2:]
        assert part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert torch.equal(part[options["page_table"].long()].flatten(1, 2), whole[table.long()].flatten(1, 2))
