"""The Triton attention over pages, against loops in float64; what no request owns is NaN."""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.kernels import naive, rounding
from tests.kernels.test_attention import NAN, cumulative, make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_loops(dtype):
    from megatron_hybrid_prefix.platform.kernels.attention_triton import _KEYS, paged_attention_triton

    for seed in range(8):
        dice = random.Random(seed)
        dim, page = dice.choice((8, 12, 16)), dice.choice((3, 16))
        heads, kv_heads = dice.choice(((2, 2), (4, 2), (3, 1)))
        k_lens = [dice.choice((0, 1, 5, 64, 65, 90)) for _ in range(dice.randint(1, 4))]
        q_lens = [min(length, dice.choice((0, 1, 3, 9))) for length in k_lens]
        q, k, v, table = make(seed, q_lens, k_lens, heads, kv_heads, dtype=dtype, dim=dim, page=page)
        padded = torch.cat([q, torch.full((2, heads, dim), NAN, dtype=dtype)])
        tensors = (padded, k, v, cumulative(q_lens), torch.tensor(k_lens, dtype=torch.int32))
        scale = None if seed % 2 else 0.3
        out = paged_attention_triton(*(t.to(DEVICE) for t in tensors), scale, table.to(DEVICE)).cpu()
        start = 0
        for i, (rows, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
            span = slice(start, start + rows)
            start += rows
            if not rows:
                continue
            exactly = (q[span].double(), naive.pages(k, table[i], keys), naive.pages(v, table[i], keys))
            exactly = (*exactly, dim**-0.5 if scale is None else scale)
            expected, _ = naive.attention_rows(*exactly, -1, 0)
            weighted, _ = rounding.attention(*exactly, rescalings=keys // _KEYS)
            rounding.check(out[span], expected, rounding.allowed(expected, weighted, dtype, truncated=INTERPRETED))
        assert out.dtype == dtype
        assert (out[start:] == 0).all()
