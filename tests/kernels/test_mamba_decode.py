"""A decode of Mamba2 from rings against loops in float64: on the host the PyTorch versions, on a GPU and interpreted the kernels.

What must not be read or written is NaN, such as a ring's stale entries. Inputs are slices of wider rows, as a mixer has them.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.layers.components import mamba2_components, mamba2_ring, ring_entries, ring_tokens
from megatron_hybrid_prefix.layers.mamba2 import KIND
from megatron_hybrid_prefix.ops import mamba_decode
from megatron_hybrid_prefix.ops.mamba_decode import (
    convolve_tokens,
    flush_states,
    flush_windows,
    update_states,
)
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED, NAN

SLOTS, RINGS = 12, 6
EXAMPLES = settings(max_examples=3 if INTERPRETED else 40, deadline=None, derandomize=INTERPRETED)
# Of states or windows; inputs are float32 and bfloat16. The kernels know no float64.
DTYPES = [torch.float32, torch.bfloat16]
FLOAT32 = torch.float32
# Heads, groups, headdim, d_state.
SHAPES = [(4, 2, 24, 20), (1, 1, 16, 256)]
if not INTERPRETED:
    SHAPES += [(2, 1, 64, 128), (2, 1, 16, 16), (3, 1, 128, 16), (6, 3, 40, 96)]


def rand(seed, *shape):
    """Float64 that bfloat16 represents, too."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def parts(wide, dtype, device, *widths):
    """Slices of one tensor (rows, tokens, widths), beside which is NaN."""
    around = torch.full((*wide.shape[:2], 16), NAN)
    whole = torch.cat([around, wide, around], -1).to(dtype).to(device)
    return [part for part in whole.split([16, *widths, 16], -1)][1:-1]


def pool_of(count, shape, dtype, device):
    """(count, *shape) of NaN, with a stride that is not an entry's size."""
    size = torch.Size(shape).numel()
    return torch.full((count, size + 16), NAN)[:, :size].unflatten(1, shape).to(dtype).to(device)


class Requests:
    """Rows at any phase, of which each step accepts one token or more; some are padding."""

    def __init__(self, padded, tokens, R, seed):
        self.dice, self.tokens, self.R, self.padded = random.Random(seed), tokens, R, padded
        slots, rings = self.dice.sample(range(SLOTS), 2 * len(padded)), self.dice.sample(range(RINGS), len(padded))
        self.slots, self.spare, self.rings = slots[: len(padded)], slots[len(padded) :], rings
        self.origins = [self.dice.randint(0, 3 * R) for _ in padded]
        self.positions = list(self.origins)
        self.last = list(self.origins)  # positions of the step before
        for row in range(len(padded)):
            if self.dice.random() < 0.5:  # the step before began right before a flush
                self.origins[row] = self.positions[row] = self.last[row] = (self.origins[row] // R + 1) * R - 1

    def rows(self, device):
        """Of the next step. A padding row's fields are of no slot."""
        ends = [max(origin, at // self.R * self.R) for origin, at in zip(self.origins, self.positions, strict=True)]
        kept = [slot if self.dice.random() < 0.5 else -1 for slot in self.spare]
        slots = [-1 if skip else slot for skip, slot in zip(self.padded, self.slots, strict=True)]
        long, fields = torch.int64, (slots, self.rings, self.positions, self.origins, ends, kept)
        types = long, long, torch.int32, torch.int32, torch.int32, long
        return RingRows(*(torch.tensor(x, dtype=of, device=device) for x, of in zip(fields, types, strict=True)))

    def accept(self, rows):
        self.last, self.origins = list(self.positions), rows.ends.tolist()
        self.positions = [at + self.dice.randint(1, self.tokens) for at in self.positions]

    def poison(self, ring, before):
        """NaN in all entries but those of ``before`` tokens before the position, and since the origin."""
        for row, (origin, at) in enumerate(zip(self.origins, self.positions, strict=True)):
            real = {q % ring.shape[1] for q in range(max(origin, 0 if before is None else self.last[row] - before), at)}
            ring[self.rings[row], [x for x in range(ring.shape[1]) if x not in real]] = NAN


def kept_rows(rows, **fields):
    return RingRows(**{name: x.clone() for name, x in (rows._asdict() | fields).items()})


def same(a, b):
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def check_pool(pool, before, rows, flushed):
    """What is kept is the slot's; slots that are not flushed, and all others, are as before. ``flushed`` rows are for the caller."""
    others = set(range(SLOTS)) - {slot for slot, moved in zip(rows.slots.tolist(), flushed, strict=True) if moved}
    for slot, kept in zip(rows.slots.tolist(), rows.kept.tolist(), strict=True):
        if slot >= 0 and kept >= 0:
            assert torch.equal(pool[kept], pool[slot])
            others.discard(kept)
    assert same(pool[list(others)], before[list(others)])


def check_pools(pool, flushed, without, before, rows, unkept):
    """Of a step, of a flush of its rows, and of a step that keeps nothing. Returns which rows are flushed."""
    assert same(flushed, pool)
    moved = (rows.ends > rows.origins).tolist()
    check_pool(pool, before, rows, moved)
    check_pool(without, before, unkept, moved)
    return moved


# Which rows are padding, tokens, R, and a seed.
CASES = st.tuples(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([8, 16, 32]),
    st.integers(0, 1000),
)
CASE = ([False, True, False], 3, 16, 1)


def check_convolution(
    case, taps, bias=True, dim=20, dtype=FLOAT32, kept=FLOAT32, device="cpu", convolve=convolve_tokens, steps=5
):
    """Raises AssertionError if an output or a window is not that of the loops, or if another slot changed."""
    requests, (padded, tokens, _, seed) = Requests(*case), case
    weight, b = rand(seed + 1, dim, taps), rand(seed + 3, dim) if bias else torch.zeros(dim).double()
    windows = pool_of(SLOTS, (dim, taps), kept, device)
    recent = pool_of(RINGS, (taps - 1 + tokens, dim), kept, device)
    # Of each row, the inputs from ``taps`` before its first origin on, (tokens, dim).
    fed, start = [rand(seed + 4 + row, taps, dim) for row in range(len(padded))], list(requests.origins)
    for slot, inputs in zip(requests.slots, fed, strict=True):
        windows[slot] = inputs.T
    args = weight.to(dtype).to(device), b.to(dtype).to(device) if bias else None
    for step in range(steps):
        x, rows, before = rand(99 * seed + step, len(padded), tokens, dim), requests.rows(device), windows.clone()
        (inputs,) = parts(x.masked_fill(torch.tensor(padded)[:, None, None], NAN), dtype, device, dim)
        flushed, without = windows.clone(), windows.clone()
        flush_windows(flushed, recent, rows)
        unkept = kept_rows(rows, kept=torch.full_like(rows.kept, -1))
        again = convolve(inputs, without, *args, recent=recent.clone(), rows=unkept)
        out = convolve(inputs, windows, *args, recent=recent, rows=rows)
        assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
        assert torch.equal(again, out)
        moved = check_pools(windows, flushed, without, before, rows, unkept)
        for row, skip in enumerate(padded):
            if skip:
                assert not out[row].any()
                continue
            at, end = requests.positions[row] - start[row], int(rows.ends[row]) - start[row]
            past, last = fed[row][: at + taps], fed[row][at + 1 : at + taps].T
            expected = naive.conv_sequence(x[row], weight, b if bias else None, last)
            bound = rounding.allowed(
                expected, rounding.convolution(x[row], weight, b, last), kept, truncated=INTERPRETED
            )
            rounding.check(out[row].cpu(), expected, bound if kept == dtype else bound + rounding_to(expected, dtype))
            if moved[row]:
                assert torch.equal(windows[rows.slots[row]].double().cpu(), past[end : end + taps].T)
        requests.accept(rows)
        for row, at in enumerate(requests.positions):
            new = at - requests.last[row]
            fed[row] = torch.cat([fed[row], x[row, :new]])
        requests.poison(recent, taps - 1)
    # Requests that end somewhere: at a token of the last step.
    spans = zip(requests.origins, requests.last, requests.positions, strict=True)
    ends = torch.tensor([requests.dice.randint(max(origin, last + 1), at) for origin, last, at in spans], device=device)
    rows = requests.rows(device)._replace(ends=ends)
    flush_windows(windows, recent, rows)
    for row, end in enumerate(ends.tolist()):
        if not padded[row]:
            past = fed[row][end - start[row] :][:taps].T
            assert torch.equal(windows[rows.slots[row]].double().cpu(), past)


def rounding_to(exact, dtype):
    """The error of a second rounding."""
    return 0.0 if dtype == torch.float64 else 2.1 * rounding.unit_roundoff(dtype) * exact.abs()


@EXAMPLES
@given(CASES, st.integers(2, 4), st.booleans(), st.sampled_from([5, 200]), st.sampled_from(DTYPES))
def test_any_convolution(case, taps, bias, dim, kept):
    check_convolution(case, taps, bias, dim, kept=kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution(taps, dtype, kept, device):
    check_convolution(CASE, taps, dim=200, dtype=dtype, kept=kept, device=device)


def check_update(
    case, shape, gate=False, wide_D=False, dtype=FLOAT32, kept=FLOAT32, device="cpu", update=update_states, steps=4
):
    """Raises AssertionError if an output or a state is further off than rounding takes it, or if another slot changed.

    What is expected starts from what is in the slot, step by step.
    """
    requests, (padded, tokens, R, seed), (heads, groups, P, N) = Requests(*case), case, shape
    width, count = heads * P + 2 * groups * N, len(padded)
    A, dt_bias = -rand(seed + 5, heads).abs() - 0.125, rand(seed + 6, heads)
    D = rand(seed + 7, heads, P if wide_D else 1)
    args = {"A": A.float().to(device), "D": D.to(dtype).flatten().to(device), "dt_bias": dt_bias.float().to(device)}
    states = pool_of(SLOTS, (heads, P, N), kept, device)
    states[requests.slots] = rand(seed + 1, count, heads, P, N).to(kept).to(device)
    entries = ring_entries(R, tokens)
    ring = {"inputs": pool_of(RINGS, (entries, width - groups * N), dtype, device)}
    ring["steps"] = pool_of(RINGS, (entries, 2, heads), FLOAT32, device)
    fed, start = [torch.zeros(0, width + heads + heads * P).double() for _ in padded], list(requests.origins)

    def expected(row, first, last, new, state, of):
        """Outputs and states of the loops, weighted, from the inputs of a span of a row."""
        given = torch.cat([fed[row][first - start[row] : last - start[row]], new])
        xBC, dt, z = given.split([width, heads, heads * P], -1)
        x, B, C = xBC.split([heads * P, groups * N, groups * N], -1)
        x, z = x.unflatten(-1, (heads, P)), z.unflatten(-1, (heads, P)) if gate else None
        B, C, argument = B.unflatten(-1, (groups, N)), C.unflatten(-1, (groups, N)), dt + dt_bias
        dt, sequence = torch.nn.functional.softplus(argument, threshold=40), {"state": state.double().cpu()}
        sequence |= {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D.expand(heads, P), "z": z}
        exact = naive.mamba_sequence(**sequence)[of]
        return exact, rounding.mamba(**sequence, dt_roundings=rounding.softplus_roundings(argument))[of]

    for step in range(steps):
        xBC, z = rand(9 * seed + step, count, tokens, width), rand(seed + 20 + step, count, tokens, heads * P)
        # Steps from one that changes nearly nothing to one that is linear in dt.
        dt, far = rand(seed + 40 + step, count, tokens, heads), rand(seed + 60 + step, count, tokens, heads) > 1.5
        dt = (dt * 4 - 3 + 24 * far).bfloat16().double()
        rows, before = requests.rows(device), states.clone()
        hidden = torch.tensor(padded)[:, None, None]
        z_part, dt_part = parts(torch.cat([z, dt], -1).masked_fill(hidden, NAN), dtype, device, heads * P, heads)
        given = xBC.masked_fill(hidden, NAN).to(dtype).to(device), dt_part
        args["z"] = z_part if gate else None
        flushed, without, copies = states.clone(), states.clone(), {name: x.clone() for name, x in ring.items()}
        flush_states(flushed, **ring, rows=rows)
        unkept = kept_rows(rows, kept=torch.full_like(rows.kept, -1))
        again = update(*given, without, unkept, **copies, **args)
        y = update(*given, states, rows, **ring, **args)
        assert y.shape == z.shape and y.dtype == dtype and y.is_contiguous()
        assert torch.equal(again, y)
        moved = check_pools(states, flushed, without, before, rows, unkept)
        for row, skip in enumerate(padded):
            if skip:
                assert not y[row].any()
                continue
            slot, origin, end = int(rows.slots[row]), requests.origins[row], int(rows.ends[row])
            new = torch.cat([xBC[row], dt[row], z[row]], -1)
            if moved[row]:
                exact, weighted = expected(row, origin, end, new[:0], before[slot], 1)
                bound = rounding.allowed(exact[-1], weighted[-1], kept, truncated=INTERPRETED)
                rounding.check(states[slot].cpu(), exact[-1], bound)
            exact, weighted = (
                x[-tokens:].flatten(1) for x in expected(row, end, requests.positions[row], new, states[slot], 0)
            )
            rounding.check(y[row].cpu(), exact, rounding.allowed(exact, weighted, dtype, truncated=INTERPRETED))
            fed[row] = torch.cat([fed[row], new])
        requests.accept(rows)
        fed = [x[: at - first] for x, at, first in zip(fed, requests.positions, start, strict=True)]
        for tensor in ring.values():
            requests.poison(tensor, None)
    # Requests that end somewhere: any position since the origin.
    ends = [requests.dice.randint(*span) for span in zip(requests.origins, requests.positions, strict=True)]
    rows, before = requests.rows(device)._replace(ends=torch.tensor(ends, device=device)), states.clone()
    flush_states(states, **ring, rows=rows)
    moved = (rows.ends > rows.origins).tolist()
    check_pool(states, before, rows, moved)
    for row, skip in enumerate(padded):
        if moved[row] and not skip:
            slot, origin = int(rows.slots[row]), requests.origins[row]
            exact, weighted = expected(row, origin, ends[row], fed[row][:0], before[slot], 1)
            bound = rounding.allowed(exact[-1], weighted[-1], kept, truncated=INTERPRETED)
            rounding.check(states[slot].cpu(), exact[-1], bound)


@EXAMPLES
@given(
    CASES,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_any_update(case, sizes, gate, wide_D, kept):
    repeat, groups, *shape = sizes
    check_update(case, (repeat * groups, groups, *shape), gate, wide_D, kept=kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_update(shape, dtype, kept, device):
    check_update(CASE, shape, dtype == kept, kept == DTYPES[1], dtype=dtype, kept=kept, device=device)


def draw(shape, rows, device, R=16, dtype=FLOAT32, tokens=1, kept=None):
    """``xBC``, ``dt``, states and rings in as many slots, at all phases of R; and the other arguments."""
    heads, groups, P, N = shape
    xBC, dt = rand(0, rows, tokens, heads * P + 2 * groups * N), rand(1, rows, tokens, heads)
    entries, order = ring_entries(R, tokens), torch.arange(rows, device=device)
    inputs, steps = rand(6, rows, entries, heads * P + groups * N), -rand(7, rows, entries, 2, heads).abs()
    args = {"A": -rand(3, heads).abs().float() - 0.1, "D": rand(4, heads).float(), "dt_bias": rand(5, heads).float()}
    positions = 3 * R + order % R
    origins = torch.where(order % R < 2, positions - R, torch.full_like(order, 3 * R))
    at = RingRows(order, order, positions.int(), origins.int(), torch.full_like(origins, 3 * R).int(), order * 0 - 1)
    rings = {"inputs": inputs.to(dtype).to(device), "steps": steps.float().to(device)}
    states = rand(2, rows, heads, P, N).to(kept or dtype).to(device)
    return xBC.to(dtype).to(device), dt.to(dtype).to(device), states, at, rings, {
        name: x.to(device) for name, x in args.items()
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(device, kept):
    count, shape = (3, (2, 1, 64, 64)) if INTERPRETED else (24, (16, 2, 64, 128))
    xBC, dt, states, rows, rings, args = draw(shape, count, device, kept=kept)
    before = states.clone(), {name: x.clone() for name, x in rings.items()}
    together = update_states(xBC, dt, states, rows, **rings, **args)
    for row in (0, 1, count - 1):
        own, state = slice(row, row + 1), before[0].clone()
        alone = RingRows(*(field[own] for field in rows))
        rings = {name: x.clone() for name, x in before[1].items()}
        assert torch.equal(update_states(xBC[own], dt[own], state, alone, **rings, **args)[0], together[row])
        assert torch.equal(state[row], states[row])


def decode_that_writes_each_token(x, B, C, step, A, state, kept):
    """Outputs and the last state of a decode in float32 that rounds its state to ``kept`` after each token, and reads that."""
    outputs, state = [], state.to(kept)
    for t in range(len(x)):
        h = state.to(x.dtype) * torch.exp(step[t] * A)[:, None, None] + (step[t][:, None] * x[t])[:, :, None] * B[t]
        outputs.append((h * C[t]).sum(-1).flatten())
        state = h.to(kept)
    return torch.stack(outputs), state


@pytest.mark.skipif(INTERPRETED, reason="4096 tokens")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
def test_no_further_from_float64_than_a_decode_that_writes_each_token(kept, device):
    """Over 4,096 tokens, of heads that forget after 3 to 3,000."""
    heads, P, N, tokens, R = 8, 8, 16, 4096, 16
    A, zeros = -torch.logspace(-3.5, -0.5, heads, device=device), torch.zeros(heads, device=device)
    xBC, dt = (rand(seed, 1, tokens, size).float().to(device) for seed, size in ((1, heads * P + 2 * N), (2, heads)))
    step, start = torch.nn.functional.softplus(dt[0].double()), rand(3, 1, heads, P, N).float().to(device)
    x, B, C = xBC[0].split([heads * P, N, N], -1)
    sequence = [x.unflatten(1, (heads, P)), B[:, None, None], C[:, None, None], step.float(), A, start[0]]
    exact, last = decode_that_writes_each_token(*(each.double() for each in sequence), torch.float64)
    old, old_last = decode_that_writes_each_token(*sequence, kept)
    states, outputs, origin = start.to(kept), [], 0
    sizes = {"inputs": (heads * P + N,), "steps": (2, heads)}
    rings = {name: torch.full((1, ring_entries(R, 4), *size), NAN, device=device) for name, size in sizes.items()}
    for at in range(0, tokens + 1, 4):
        fields = (torch.tensor([x], device=device) for x in (0, 0, at, origin, at // R * R, -1))
        rows, own, origin = RingRows(*fields), slice(at, at + 4), at // R * R
        if at == tokens:
            flush_states(states, **rings, rows=rows)
        else:
            given = xBC[:, own].contiguous(), dt[:, own], states, rows
            outputs.append(update_states(*given, **rings, A=A, D=zeros, dt_bias=zeros)[0])

    def error(got, exact):
        return (got.double() - exact).square().mean().sqrt()

    assert error(states[0], last) <= error(old_last, last)
    assert error(torch.cat(outputs), exact) <= error(old, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_an_entry_decays_by_the_weights_of_its_time(device):
    """New weights amid a request: a state would have been written under the old ones."""
    xBC, dt, states, _, _, args = draw((2, 1, 16, 16), 1, device, tokens=6)
    rings = {
        name: torch.full((1, 17, *size), NAN, device=device) for name, size in (("inputs", (48,)), ("steps", (2, 2)))
    }
    step = torch.nn.functional.softplus((dt[0] + args["dt_bias"]).double())
    x, B, C = (part.double() for part in xBC[0].split([32, 16, 16], -1))
    state, args = states[0].double(), args | {"D": torch.zeros(2, device=device)}
    for at in range(6):
        args["A"] = args["A"] * (4 if at == 5 else 1)
        rows = RingRows(*(torch.tensor([x], device=device) for x in (0, 0, at, 0, 0, -1)))
        y = update_states(xBC[:, at : at + 1], dt[:, at : at + 1], states, rows, **rings, **args)
        now = x[at : at + 1].unflatten(1, (2, 16)), B[at : at + 1, None, None], C[at : at + 1, None, None]
        wanted, state = decode_that_writes_each_token(*now, step[at : at + 1], args["A"].double(), state, torch.float64)
        torch.testing.assert_close(y[0].double(), wanted, rtol=1e-5, atol=1e-5)


def test_tokens_of_a_ring():
    """At the fewest bytes, and a divisor of the block."""
    bytes_of = {2: 128 * 64 * 128 * 2, 4: 128 * 64 * 128 * 4}
    assert [ring_tokens(bytes_of[size], 18500, 256) for size in (2, 4)] == [16, 16]
    assert [ring_tokens(2**20, entry, 256) for entry in (2**9, 2**19, 10)] == [64, 8, 64]
    assert [ring_tokens(2**20, 2**10, block) for block in (96, 16, 12, 5)] == [32, 16, 4, 1]


def test_no_rows():
    xBC, dt, states, rows, rings, args = draw((2, 1, 8, 8), 1, "cpu")
    none = RingRows(*(field[:0] for field in rows))
    assert update_states(xBC[:0], dt[:0], states, none, **rings, **args).shape == (0, 1, 16)
    weight, windows, recent = torch.zeros(4, 4), torch.zeros(2, 4, 4), torch.zeros(1, 4, 4)
    out = convolve_tokens(torch.zeros(0, 1, 4), windows, weight, None, recent=recent, rows=none)
    assert out.shape == (0, 1, 4)


def of_rows(change):
    """A mutant that changes the rows."""

    def update(xBC, dt, states, rows, **args):
        return update_states(xBC, dt, states, rows._replace(**change(rows)), **args)

    return update


def one_short(rows):
    return {"ends": torch.where(rows.ends > rows.origins, rows.ends - 1, rows.ends)}


def of_next_slot(rows):
    return {"slots": torch.where(rows.slots < 0, rows.slots, (rows.slots + 1) % SLOTS)}


def a_stale_entry(rows):
    earlier = rows.origins - 1
    return {"origins": earlier, "ends": torch.where(rows.ends > rows.origins, rows.ends, earlier)}


def not_rounded(xBC, dt, states, rows, *, inputs, steps, **args):
    wide = states.float()
    y = update_states(xBC, dt, wide, rows, inputs=inputs, steps=steps, **args)
    states.copy_(wide)
    return y


def decays_off_by_one(*rest, **args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba_decode, "sums_after", lambda x: (x.sum(1), x.flip(1).cumsum(1).flip(1)))
        return update_states(*rest, **args)


def sums_in_bfloat16(*rest, **args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba_decode, "compute_dtype", lambda tensor: torch.bfloat16)
        return update_states(*rest, **args)


MUTANTS = {
    "a stale entry": of_rows(a_stale_entry),
    "flushed one entry short": of_rows(one_short),
    "another slot": of_rows(of_next_slot),
    "padding updates": of_rows(lambda rows: {"slots": rows.slots.abs()}),
    "an entry missing": of_rows(lambda rows: {"positions": torch.maximum(rows.positions - 1, rows.ends)}),
    "nothing kept": of_rows(lambda rows: {"kept": torch.full_like(rows.kept, -1)}),
    "not rounded": not_rounded,
    "no decay": lambda *rest, A, **args: update_states(*rest, A=0 * A, **args),
    "no D": lambda *rest, D, **args: update_states(*rest, D=0 * D, **args),
    "no bias": lambda *rest, dt_bias, **args: update_states(*rest, dt_bias=0 * dt_bias, **args),
    "no gate": lambda *rest, z, **args: update_states(*rest, z=None, **args),
    "rounded inputs": lambda xBC, *rest, **args: update_states(xBC * (1 + 2**-12), *rest, **args),
}
OF_PYTORCH = {"decays off by one": decays_off_by_one, "sums in bfloat16": sums_in_bfloat16}
if not INTERPRETED:
    MUTANTS |= OF_PYTORCH


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checks_see(name):
    with pytest.raises(AssertionError):
        check_update(CASE, (4, 2, 16, 16), gate=True, kept=torch.bfloat16, update=MUTANTS[name])


@pytest.mark.parametrize("name", ["a dropped tap", "no bias", "another slot", "another window", "a stale input"])
def test_the_checks_of_a_convolution_see(name):
    changes = {"another slot": of_next_slot, "another window": one_short, "a stale input": a_stale_entry}

    def mutant(inputs, windows, weight, bias, *, recent, rows):
        weight = weight * torch.tensor([0.0, 1, 1, 1]) if name == "a dropped tap" else weight
        rows = rows._replace(**changes[name](rows)) if name in changes else rows
        return convolve_tokens(inputs, windows, weight, None if name == "no bias" else bias, recent=recent, rows=rows)

    with pytest.raises(AssertionError):
        check_convolution(CASE, 4, convolve=mutant)


@pytest.fixture
def mixer(platform):
    """A layer of a tiny model, with inference by slots."""
    from megatron_hybrid_prefix.layers.kinds import use_slot_mixers
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.upstream.mixer import MambaMixer

    model = build_hybrid_model("tiny", seed=0, platform=platform)
    use_slot_mixers(model)
    return next(module for module in model.modules() if isinstance(module, MambaMixer))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mixer_decodes_as_megatrons(mixer, tokens):
    width, shapes = mixer.in_proj.weight.shape[0], mixer.mamba_state_shapes_per_request()
    inputs, slots = rand(0, 3, tokens, width).float() / 4, torch.tensor([2, -1, 0])
    decode = mixer.ssm_decode if form_of("steps of recurrent layers") == "shared" else mixer._ssm_decode
    ours, megatrons = ([rand(seed, 3, *shape).float() for seed, shape in enumerate(shapes)] for _ in range(2))
    components = mamba2_components(shapes[0], "float32", shapes[1], "float32")
    ring = {each.name: torch.full((3, *each.shape), NAN) for each in mamba2_ring(components, 8, tokens, "float32")}
    states, none = dict(zip(("conv", "ssm"), ours, strict=True)), torch.zeros(3, dtype=torch.int32)
    rows = RingRows(slots, torch.arange(3), none, none, none, torch.full((3,), -1))
    layer = {"states_of_layer": lambda number: states, "ring_of_layer": lambda number: ring, "decode_rows": rows}
    with torch.inference_mode():
        mixer._step, mixer._context, mixer.slot_layer_number = object(), SimpleNamespace(**layer), 1
        found = decode(inputs, *ours, batch_indices=slots)
        ends = rows._replace(positions=none + tokens, ends=none + tokens)
        KIND.flush(states, ring, dict.fromkeys(states, ends))
        mixer._step = mixer._context = None
        after = [torch.zeros(3, tokens, *shape) for shape in shapes]
        named = dict(zip(("intermediate_conv_state", "intermediate_ssm_state"), after, strict=True))
        of_megatron = decode(inputs, *megatrons, batch_indices=slots, **named)
    for one, other in zip((found, *ours), (of_megatron, *megatrons), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert found.abs().max() > 0.1 and not found[1].any()


def test_only_a_step_of_this_packages_context_decodes_by_slots(mixer, monkeypatch):
    from megatron_hybrid_prefix.upstream.mixer import MambaMixer

    name = "ssm_dynamic_inference" if form_of("steps of recurrent layers") == "shared" else "_dynamic_inference"
    monkeypatch.setattr(MambaMixer, name, lambda self, hidden_states, context: self._step is not None)
    rows = {"padded_batch_dimensions": SimpleNamespace(prefill_req_count=0)}
    contexts = [SimpleNamespace(prefill_step=step, **rows) for step in (1, None)] + [SimpleNamespace(**rows)]
    assert [getattr(mixer, name)(None, context) for context in contexts] == [True, False, False]
    assert mixer._step is None
