"""The gated delta product by slots, in float64 to the last digits against one pair after another. What must not be read is NaN."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial

import pytest
import torch

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.ops import delta_product
from megatron_hybrid_prefix.ops.delta_product import scan_pairs
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.kernels.places import INTERPRETED, NAN
from tests.kernels.steps import check_kept

pytestmark = pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version, or for a GPU")


def draw(tokens, n, seed, groups=2, heads=4, K=12, V=10):
    """Inputs of all tokens, with a memory of some hundred; and a state. In float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (tokens, groups, K), (tokens, n, groups, K), (tokens, n, heads, V), (tokens, heads), (tokens, n, heads)
    q, k, v, decay, beta, state = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in (*shapes, (heads, K, V))
    )
    return (q, k, v, -0.02 * decay.sigmoid(), beta.sigmoid()), state


def naive(inputs, state):
    """Outputs of all tokens, and the states from that before the first one on."""
    q, k, v, decay, beta = (x.double().cpu() for x in inputs)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[-2] // x.shape[-2], -2) for x in (q, k))
    outputs, states = [], [state.double().cpu()]
    for t in range(len(v)):
        state = decay[t].exp()[:, None, None] * states[-1]
        for j in range(v.shape[1]):
            missing = v[t, j] - torch.einsum("hkv,hk->hv", state, k[t, j])
            state = state + torch.einsum("hk,hv->hkv", k[t, j], beta[t, j, :, None] * missing)
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), states


def check(n, seed):
    """A sequence that begins and ends anywhere, beside padding, with checkpoints at ends of blocks."""
    dice, quantum = random.Random(seed), Fraction(64, n)
    start, tokens, block = dice.choice((0, 64, dice.randrange(300))), dice.randint(1, 400), dice.choice((64, 192))
    slots = {at: 1 + at // block for at in range(block, start + tokens + 1, block) if at > start}
    span = PrefillSpan(start_tokens=start, tokens=tokens, source_slot=0, live_slot=1, kept=slots)
    step = PrefillStep(quanta=[quantum, 64], block_tokens=block, max_tokens=500, max_sequences=2, device="cpu")
    step.prepare([span], tokens=tokens + 5, sequences=2)
    step.copy()
    step.show()
    inputs, state = draw(tokens + 5, n, seed)
    pool = torch.full((14, *state.shape), NAN, dtype=torch.float64)
    pool[0] = state
    for x in inputs:
        x[tokens:] = NAN
    bounds = step.chunks[quantum].bounds * (n // quantum.denominator)
    before, run = pool.clone(), partial(scan_pairs, inputs, chunk_bounds=bounds, **step.slots[quantum])
    y = run(pool)
    expected, states = naive([x[:tokens] for x in inputs], state)
    torch.testing.assert_close(y, torch.cat([expected, 0 * expected[:1].expand(5, -1, -1)]), rtol=0, atol=1e-11)
    for done, slot in [(0, 0), (tokens, 1), *((at - start, slot) for at, slot in slots.items())]:
        torch.testing.assert_close(pool[slot], states[done], rtol=0, atol=1e-11)
    assert pool[[slot for slot in range(14) if slot not in {0, 1, *slots.values()}]].isnan().all()
    check_kept(before, pool, [1], slots.values(), run)


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, 5, 6]
)  # chunks of 64 pairs end with tokens, at halves or thirds of them, and so on
def test_prefill(platform, n):
    for seed in range(8):
        check(n, seed)


STEPS = delta_product.steps_of
MUTANTS = {
    "nothing decays": lambda q, k, v, g, b: STEPS(q, k, v, 0 * g, b),
    "pairs in another order": lambda q, k, v, g, b: STEPS(q, k.flip(-3), v.flip(-3), g, b.flip(-2)),
    "one beta": lambda q, k, v, g, b: STEPS(q, k, v, g, b[..., :1, :].expand(b.shape)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_sees(platform, name, monkeypatch):
    monkeypatch.setattr(delta_product, "steps_of", MUTANTS[name])
    with pytest.raises(AssertionError):
        check(3, 1)


@pytest.mark.gpu(gib=4, seconds=60)
@pytest.mark.skipif(form_of("Gated Delta Product") == "no", reason="no kernels of megatron's to compare with")
@pytest.mark.parametrize("n", [2, 3])
def test_a_prefill_in_bfloat16_is_no_further_off_than_megatrons(n):
    """Prints the time of both for 8,192 tokens, too."""
    from megatron.core.ssm.ops.gdp import chunk_gated_delta_product_varlen
    from triton.testing import do_bench

    for tokens, sizes in ((300, (2, 4, 64, 32)), (8192, (8, 64, 128, 64))):
        inputs, state = draw(tokens, n, 0, *sizes)
        inputs = [x.cuda().to(torch.float32 if x.dim() == 2 else torch.bfloat16) for x in inputs]
        pool, bounds = state.float().cuda().repeat(2, 1, 1, 1), [*range(0, n * tokens, 64), n * tokens]
        slots = {"first_chunks": [0, len(bounds) - 1], "source_slots": [0], "live_slots": [1]}
        slots |= {"chunk_bounds": bounds, "chunk_slots": [-1] * (len(bounds) - 1)}
        ours = partial(scan_pairs, inputs, pool, **{name: torch.tensor(x).cuda() for name, x in slots.items()})
        q, k, v, g, b = inputs
        q, k = (x.repeat_interleave(v.shape[-2] // x.shape[-2], -2) for x in (q, k))
        given = q[None], *(x.flatten(0, 1)[None] for x in (k, v)), g[None], b.flatten(0, 1)[None], n
        fields = {"initial_state": pool[:1], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        theirs = partial(
            chunk_gated_delta_product_varlen, *given, torch.tensor([0, tokens], dtype=torch.int32).cuda(), **fields
        )
        if tokens == 300:
            (y, last), (expected, states) = theirs(), naive(inputs, state)
            for mine, other, right in ((ours(), y[0], expected), (pool[1], last[0], states[-1])):
                off = [(x.double().cpu() - right).square().mean().sqrt() for x in (mine, other)]
                assert off[0] <= 2 * off[1], off
    print(f"{n} pairs, 8,192 tokens: {do_bench(ours):.3f} ms, megatron's {do_bench(theirs):.3f} ms")
