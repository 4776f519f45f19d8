"""The Triton attention over pages, against loops in float64; what no request owns is NaN."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_hybrid_prefix.platform.kernels.attention_cuda import flash_attn4_varlen_func, paged_attention
from tests.kernels import naive, rounding
from tests.kernels.places import INTERPRETED, NAN
from tests.kernels.test_attention import cumulative, make

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu(gib=4, seconds=2)]


# The interpreter multiplies the bits of bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16])
def test_matches_the_loops(dtype):
    for seed in range(8):
        dice = random.Random(seed)
        dim, page = dice.choice((8, 12, 16)), dice.choice((3, 16))
        heads, kv_heads = dice.choice(((2, 2), (4, 2), (3, 1)))
        k_lens = [dice.choice((0, 1, 5, 64, 65, 90)) for _ in range(dice.randint(1, 4))]
        q_lens = [min(length, dice.choice((0, 1, 3, 9, 20))) for length in k_lens]
        q, k, v, table = make(seed, q_lens, k_lens, heads, kv_heads, dtype=dtype, dim=dim, page=page)
        padded = torch.cat([q, torch.full((2, heads, dim), NAN, dtype=dtype)])
        tensors = (padded, k, v, cumulative(q_lens), torch.tensor(k_lens, dtype=torch.int32))
        scale, longest = None if seed % 2 else 0.3, max([*q_lens, 1])
        out = paged_attention(*(t.to(DEVICE) for t in tensors), longest, scale, table.to(DEVICE)).cpu()
        start = 0
        for i, (rows, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
            span = slice(start, start + rows)
            start += rows
            if not rows:
                continue
            exactly = (q[span].double(), naive.pages(k, table[i], keys), naive.pages(v, table[i], keys))
            exactly = (*exactly, dim**-0.5 if scale is None else scale)
            expected, _ = naive.attention_rows(*exactly, -1, 0)
            weighted, _ = rounding.attention(*exactly, rescalings=keys // 16)
            if dtype != torch.float32:  # the weights of values are rounded to it, as in flash-attention
                coarse = rounding.unit_roundoff(dtype) / rounding.unit_roundoff(torch.float32)
                weighted = weighted + 2 * coarse * rounding.attended(*exactly)
            rounding.check(out[span], expected, rounding.allowed(expected, weighted, dtype, truncated=INTERPRETED))
        assert out.dtype == dtype
        assert (out[start:] == 0).all()


def flash_attention_4(q, k, v, table, q_lens, k_lens):
    """As megatron calls it; q, k and v on the GPU."""
    cute = pytest.importorskip("flash_attn.cute")
    call = flash_attn4_varlen_func(cute.flash_attn_varlen_func, torch.cuda.get_device_capability()[0] == 9)
    out, _ = call(
        q,
        k,
        v,
        cu_seqlens_q=cumulative(q_lens).cuda(),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        seqused_k=torch.tensor(k_lens, dtype=torch.int32).cuda(),
        page_table=table.cuda(),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        num_splits=0,
    )
    return out


@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 64), (32, 8, 128), (16, 2, 256), (8, 1, 256)])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [([300], [8492]), ([1, 1, 1, 1], [3, 256, 257, 4000]), ([300, 1, 600], [300, 700, 4696]), ([3, 3], [9, 1030])],
    ids=["tail of a hit", "decode", "mixed", "drafts"],
)
def test_flash_attention_4(heads, kv_heads, dim, q_lens, k_lens):
    """At most twice as far off as this package's own attention in bfloat16, and the other way round, by root mean square."""
    q, k, v, table = make(0, q_lens, k_lens, heads, kv_heads, dtype=torch.bfloat16, dim=dim, page=256)
    k, v = k.nan_to_num(30.0), v.nan_to_num(30.0)  # both compute with all of a page, and mask what it holds of nobody
    table = table.clamp(min=0)
    lengths, starts = torch.tensor(k_lens), cumulative(q_lens)
    on_gpu = [t.cuda() for t in (q, k, v)]
    found = flash_attention_4(*on_gpu, table, q_lens, k_lens)
    own = paged_attention(*on_gpu, starts.cuda(), lengths.cuda(), max(q_lens), None, table.cuda())
    errors = {"FA4": 0.0, "ours": 0.0}
    for i, (rows, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
        span = slice(int(starts[i]), int(starts[i]) + rows)
        held = [naive.pages(x, table[i], keys).cuda().double() for x in (k, v)]
        held = [x.repeat_interleave(heads // kv_heads, 1) for x in held]  # (keys, heads, dim)
        scores = torch.einsum("qhd,khd->hqk", q[span].cuda().double(), held[0]) * dim**-0.5
        later = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(1 + keys - rows)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), held[1])
        for name, out in (("FA4", found), ("ours", own)):
            errors[name] = max(errors[name], float((out[span].double() - expected).square().mean().sqrt()))
    print(f"heads {heads}/{kv_heads} of {dim}, {len(q_lens)} requests: root mean square errors {errors}")
    assert errors["FA4"] <= 2 * errors["ours"] < 0.02 and errors["ours"] <= 2 * errors["FA4"]


@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 64), (32, 8, 128), (16, 2, 256)])
def test_numbers_behind_the_last_token_change_no_bit(heads, kv_heads, dim, page):
    q_lens, k_lens = [300, 1, 70], [300, 700, 4690]
    q, k, v, table = make(0, q_lens, k_lens, heads, kv_heads, dtype=torch.bfloat16, dim=dim, page=page)
    found = []
    for behind in (0.0, 30.0, -5000.0):
        rows = (each.nan_to_num(behind).cuda() for each in (q, k, v))
        found.append(flash_attention_4(*rows, table.clamp(min=0), q_lens, k_lens))
    assert found[0].isfinite().all() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_an_earlier_request_left_behind_the_last_token_do_not_spread(page, value):
    """Where a request overflowed: its blocks are given to others as they are."""
    q, k, v, table = make(0, [17], [200], 32, 8, dtype=torch.bfloat16, dim=128, page=page)
    k, v, table = k.nan_to_num(0.0), v.nan_to_num(0.0), table.clamp(min=0)
    right = flash_attention_4(q.cuda(), k.cuda(), v.cuda(), table, [17], [200])
    v[table[0, 199 // page], 199 % page + 1 :] = value
    found = flash_attention_4(q.cuda(), k.cuda(), v.cuda(), table, [17], [200])
    assert right.isfinite().all() and torch.equal(found, right)


@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_span(dtype):
    """A prefill of all tokens, of those after a hit, and in float32 a decode."""
    q, k, v, table = (each.to(DEVICE) for each in make(0, [70], [70], 4, 2, dtype=dtype, dim=16, page=16))
    lengths = torch.tensor([70], device=DEVICE)
    whole = paged_attention(q, k, v, cumulative([70]).to(DEVICE), lengths, 70, None, table)
    for rows in (69, 41, 17, *([3, 1] if dtype == torch.float32 else [])):
        part = paged_attention(q[-rows:], k, v, cumulative([rows]).to(DEVICE), lengths, rows, None, table)
        assert torch.equal(part, whole[-rows:])
