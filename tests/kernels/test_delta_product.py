"""The gated delta product by slots, in float64 to the last digits against one pair after another. What must not be read is NaN."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from megatron_hybrid_prefix.layers.components import ring_entries
from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.ops import delta_product
from megatron_hybrid_prefix.ops.delta_product import flush_pairs, scan_pairs, update_pairs
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from tests.kernels.places import INTERPRETED, NAN

pytestmark = [pytest.mark.usefixtures("platform"), pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version")]
PAIRS = (1, 2, 3, 4, 5, 6)  # chunks of 64 pairs end with tokens, at halves or thirds of them, and so on
GROUPS, HEADS, K, V = 2, 4, 12, 10


def draw(tokens, n, seed):
    """Inputs of all tokens, with a memory of some hundred, in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (GROUPS, K), (n, GROUPS, K), (n, HEADS, V), (HEADS,), (n, HEADS)
    q, k, v, decay, beta = (torch.randn(tokens, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    return q, k, v, -0.02 * decay.sigmoid(), beta.sigmoid()


def naive(inputs, state):
    """Outputs of all tokens, and the states from that before the first one on."""
    q, k, v, decay, beta = inputs
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // GROUPS, -2) for x in (q, k))
    outputs, states = [torch.zeros(0, HEADS, V, dtype=v.dtype)], [state]
    for t in range(len(v)):
        state = decay[t].exp()[:, None, None] * state
        for j in range(v.shape[1]):
            missing = v[t, j] - torch.einsum("hkv,hk->hv", state, k[t, j])
            state = state + torch.einsum("hk,hv->hkv", k[t, j], beta[t, j, :, None] * missing)
        outputs.append(K**-0.5 * torch.einsum("hkv,hk->hv", state, q[t])[None])
        states.append(state)
    return torch.cat(outputs), states


def check_prefill(n, seed):
    """Sequences that begin and end anywhere, as in chunked prompts and hits, and checkpoints at ends of blocks."""
    dice = random.Random(seed)
    block, slots = dice.choice((64, 192)), dice.sample(range(12), 12)
    spans = []
    for _ in range(3):
        start, tokens = dice.choice((0, 64, dice.randrange(300))), dice.randint(1, 230)
        ends = [at for at in range(block, start + tokens + 1, block) if at > start]
        kept = {at: slots.pop() for at in ends[:2]}
        live = slots.pop()
        spans.append(PrefillSpan(start_tokens=start, tokens=tokens, source_slot=slots[0], live_slot=live, kept=kept))
    total = sum(span.tokens for span in spans)
    quantum = Fraction(64, n)
    sizes = {"max_tokens": total + 9, "max_sequences": 4, "device": "cpu"}
    step = PrefillStep(quanta=[quantum, 64], block_tokens=block, **sizes)
    step.prepare(spans, tokens=total + 5, sequences=4)
    step.copy()
    step.show()
    pool = torch.full((12, HEADS, K, V), NAN, dtype=torch.float64)
    pool[slots[0]] = torch.randn(HEADS, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    source, inputs = pool[slots[0]].clone(), draw(total + 5, n, seed)
    for x in inputs:
        x[total:] = NAN
    bounds = step.chunks[quantum].bounds * (n // quantum.denominator)
    y = scan_pairs(inputs, pool, chunk_bounds=bounds, **step.slots(quantum))
    row, written = 0, set()
    for span in spans:
        expected, states = naive([x[row : row + span.tokens] for x in inputs], source)
        torch.testing.assert_close(y[row : row + span.tokens], expected, rtol=0, atol=1e-11)
        targets = {span.start_tokens + span.tokens: span.live_slot}
        for position, slot in [*targets.items(), *span.kept.items()]:
            torch.testing.assert_close(pool[slot], states[position - span.start_tokens], rtol=0, atol=1e-11)
            written.add(slot)
        row += span.tokens
    assert not y[total:].any()
    assert pool[[slot for slot in range(12) if slot not in written | {slots[0]}]].isnan().all()


def check_decode(n, seed):
    """Rows that accept some of their drafts, sit a step out, and write their states where they pass multiples of R."""
    dice, rows, fed, interval, steps = random.Random(seed), 3, 1 + seed % 3, 4, 9
    entries = ring_entries(interval, fed)
    shapes = (n, GROUPS, K), (n, HEADS, V), (n, HEADS)
    rings = tuple(torch.full((rows, entries, *shape), NAN, dtype=torch.float64) for shape in shapes)
    pool = torch.randn(rows, HEADS, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    past = [[x[:0] for x in draw(1, n, 0)]] * rows
    origins, positions, true = [dice.randrange(9) for _ in range(rows)], [0] * rows, pool.clone()
    positions = [*origins]
    for number in range(steps):
        ends = [max(o, p // interval * interval) for o, p in zip(origins, positions, strict=True)]
        live = [row if dice.random() < 0.8 else NO_SLOT for row in range(rows)]
        made = [x.unflatten(0, (rows, fed)) for x in draw(rows * fed, n, 100 * seed + number)]
        fields = (torch.tensor(each) for each in (live, list(range(rows)), positions, origins, ends, [NO_SLOT] * rows))
        at = RingRows(*fields)
        if number % 3 == 2:  # a launch of its own
            flush_pairs(pool, rings, at)
            at = at._replace(origins=torch.where(at.slots >= 0, at.ends, at.origins))
        y = update_pairs(made, pool, at, rings)
        for row in range(rows):
            if live[row] < 0:
                assert not y[row].any()
                continue
            own = [torch.cat([before, x[row]]) for before, x in zip(past[row], made, strict=True)]
            expected, states = naive(own, true[row])
            torch.testing.assert_close(y[row], expected[-fed:], rtol=0, atol=1e-11)
            done = len(own[0]) - fed - (positions[row] - ends[row])
            torch.testing.assert_close(pool[row], states[done], rtol=0, atol=1e-11)
            accepted = dice.randint(1, fed)
            past[row], origins[row] = [x[: len(x) - fed + accepted] for x in own], ends[row]
            positions[row] += accepted


@pytest.mark.parametrize("n", PAIRS)
def test_prefill(n):
    for seed in range(4):
        check_prefill(n, seed)


@pytest.mark.parametrize("n", PAIRS[:4])
def test_decode(n):
    for seed in range(3):
        check_decode(n, seed)


STEPS = delta_product.steps_of
MUTANTS = {
    "each pair decays": lambda q, k, v, g, b: (
        *STEPS(q, k, v, g, b)[:3],
        g.repeat_interleave(k.shape[-3], -2),
        STEPS(q, k, v, g, b)[4],
    ),
    "pairs in another order": lambda q, k, v, g, b: STEPS(q, k.flip(-3), v.flip(-3), g, b.flip(-2)),
    "one beta": lambda q, k, v, g, b: STEPS(q, k, v, g, b[..., :1, :].expand(b.shape)),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("check", [check_prefill, check_decode])
def test_the_checks_see(name, check, monkeypatch):
    monkeypatch.setattr(delta_product, "steps_of", MUTANTS[name])
    with pytest.raises(AssertionError):
        check(3, 1)
