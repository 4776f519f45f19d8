"""The gated delta rule by slots: in float64 to the last digits against one token after another, in float32 within noise.

What must not be read or written is NaN. On the host the plain PyTorch versions run, on a GPU the kernels.
"""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.layers.components import ring_entries
from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule, update_delta_rule
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK
from megatron_hybrid_prefix.ops.invariant.scope import invariant
from megatron_hybrid_prefix.ops.rings import RingRows
from tests.harness.naive_model import UNIT_ROUNDOFF
from tests.kernels.naive import delta_rule_sequence
from tests.kernels.places import DEVICES, INTERPRETED, NAN
from tests.kernels.steps import SLOTS, Step, poisoned_pool

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version, or for a GPU")
SEEDS = range(2 if INTERPRETED else 6)
# Key heads, value heads, K, V. Programs of the kernels have 16 or 32 columns of V, and a power of two of K.
SHAPES = [(3, 3, 40, 72), (1, 1, 256, 64), *([] if INTERPRETED else [(1, 2, 16, 40), (1, 2, 128, 128)])]
# K, V of which the kernels are compiled differently.
SIZES = [(n, n) for n in (16, 32, 48, 64, 80, 96, 112, 128, 256)]
SIZES += [(16, 48), (48, 80), (80, 48), (16, 128), (128, 16), (64, 256), (128, 256), (256, 16)]
# Rounding stays within so many times the noise, a root of a mean square.
NOISES = 8
# The kernels take operands of products in bfloat16 where the inputs are: rounded as unit vectors, and once more in what is
# computed from them.
OPERAND_NOISE = {torch.bfloat16: 2 * 2.0**-9}


def make(tokens, seed, *, dtype=torch.float64, key_heads=2, heads=4, key_dim=12, value_dim=10, device="cpu"):
    """Keyword arguments that depend on tokens, with a memory of some hundred tokens."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    made = {
        "q": rand(tokens, key_heads, key_dim),
        "k": rand(tokens, key_heads, key_dim),
        "v": rand(tokens, heads, value_dim),
        "log_decay": -torch.rand(tokens, heads, generator=g, dtype=torch.float64) * 0.02,
        "beta": torch.sigmoid(rand(tokens, heads)),
    }
    gates = torch.float32 if dtype == torch.bfloat16 else dtype
    return {name: x.to(gates if name == "log_decay" else dtype).to(device) for name, x in made.items()}


def exact(args, state, **fields):
    """The naive loop in float64: outputs, and the states from that before the first token on."""
    y, states = delta_rule_sequence(
        **{name: x.double().cpu() for name, x in args.items()}, state=state.double().cpu(), **fields
    )
    return y, [state.double().cpu(), *states]


def noise(args, state, seeds=3, operands=0.0, **fields):
    """How far rounding to float32 takes outputs and states: the change when every input is off by its share.

    As `NaiveHybridModel.noise`: a product of n terms in float32 is an exact one whose factors are off by sqrt(n) u. The
    largest of each head counts for all its elements. ``operands``: noise of each vector and state that is rounded further.
    """
    y, states = exact(args, state, **fields)
    states, sums = torch.stack(states), [0.0, 0.0]
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed)

        def off(x, terms, g=g):
            return x.double().cpu() * (
                1
                + max(terms**0.5 * UNIT_ROUNDOFF, operands * (terms > 1))
                * torch.randn(x.shape, generator=g, dtype=torch.float64)
            )

        spoiled = {name: off(x, 1 if x.dim() == 2 else x.shape[-1] + CHUNK) for name, x in args.items()}
        y_off, states_off = exact(spoiled, off(state, args["q"].shape[-1]), **fields)
        sums[0] = sums[0] + (y_off - y).square()
        sums[1] = sums[1] + (torch.stack(states_off) - states).square()
    y_noise, state_noise = ((total / seeds).sqrt() for total in sums)
    # A chunk computes with all that is in it: its noise is that of all its tokens so far.
    return y_noise.amax((0, 2), keepdim=True).expand_as(y), state_noise.amax((0, 2, 3), keepdim=True).expand_as(states)


def check_scan(seed, *, dtype=torch.float64, device="cpu", scan=scan_delta_rule, normalise=True, **dimensions):
    """Raises AssertionError if an output or a state is further off than rounding takes it, or what nothing names changed."""
    step = Step.draw(seed, CHUNK, full=True)
    bounds, rows = step.bounds, step.bounds[-1]
    args = make(rows + 3, seed, dtype=dtype, device=device, **dimensions)
    if not normalise:  # longer keys would make the state grow without bound
        args["k"] = torch.nn.functional.normalize(args["k"], dim=-1)
    for x in args.values():
        x[rows:] = NAN
    heads, value_dim, key_dim = *args["v"].shape[1:], args["q"].shape[-1]
    pool_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    pool = poisoned_pool(step, (heads, key_dim, value_dim), pool_dtype, device, seed)
    before = pool.clone()
    y = scan(
        **args,
        states=pool,
        normalise=normalise,
        chunk_bounds=torch.tensor([*bounds, bounds[-1]], dtype=torch.int32, device=device),
        **step.tensors(device),
    )
    assert y.dtype == dtype and not y[rows:].any()
    for i, chunks, targets in step.sequences():
        span = slice(bounds[chunks.start], bounds[chunks.stop])
        own = {name: x[span] for name, x in args.items()}
        start = before[step.source_slots[i]]
        expected, states = exact(own, start, normalise=normalise)
        if dtype == torch.float64:
            allowed, state_allowed = torch.full_like(expected, 1e-12), torch.full_like(states[0], 1e-12)
        else:
            operands = 0.0 if y.device.type == "cpu" else OPERAND_NOISE.get(dtype, 0.0)
            allowed, off = noise(own, start, operands=operands, normalise=normalise)
            allowed, state_allowed = NOISES * allowed, NOISES * off[0]
            if dtype == torch.bfloat16:
                allowed = allowed + expected.abs() * 2.0**-8
        within(y[span], expected, allowed)
        for slot, chunk in targets:
            within(pool[slot], states[bounds[chunk] - span.start], state_allowed)
    untouched = [s for s in range(SLOTS) if s not in step.live_slots and s not in step.chunk_slots]
    assert torch.equal(pool[untouched].nan_to_num(9e9), before[untouched].nan_to_num(9e9))


def within(got, expected, allowed):
    ratio = ((got.double().cpu() - expected).abs() / allowed).max()
    assert ratio <= 1, f"off by {float(ratio):.3g} times what is allowed"


@not_interpreted
@given(
    seed=st.integers(0, 10**6),
    key_heads=st.integers(1, 3),
    repeat=st.integers(1, 3),
    key_dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    normalise=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_step(seed, key_heads, repeat, key_dim, value_dim, normalise):
    """Sequences, chunks, kept boundaries and dimensions as they come."""
    dimensions = {"heads": key_heads * repeat, "key_dim": key_dim, "value_dim": value_dim}
    check_scan(seed, key_heads=key_heads, normalise=normalise, **dimensions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=(not_interpreted, pytest.mark.slow))]
)
def test_rounding(device, dtype):
    sizes = {} if dtype == torch.float32 else {"key_dim": 16, "value_dim": 32}
    for seed in SEEDS:
        check_scan(seed, dtype=dtype, device=device, **sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=(not_interpreted, pytest.mark.slow))]
)
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), SHAPES)
def test_shapes_of_several_tiles(device, dtype, key_heads, heads, key_dim, value_dim):
    if device == "cuda" and dtype == torch.bfloat16 and (key_dim % 16 or value_dim % 16):
        pytest.skip("refused, see test_layer_kernels_compile.py")
    check_scan(1, dtype=dtype, device=device, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim)


MUTANTS = {
    "rounded keys": lambda given: {"k": given["k"].bfloat16().to(given["k"].dtype)},
    "nothing is forgotten": lambda given: {"log_decay": 0 * given["log_decay"]},
    "keys are turned, queries are not": lambda given: {"k": given["k"].roll(1, -1)},
    "from a slot not to be read": lambda given: {
        "source_slots": given["source_slots"].index_fill(0, torch.tensor(0), -1)
    },
    "kept a chunk late": lambda given: {"chunk_slots": given["chunk_slots"].roll(1)},
}


def rounded_states(*, states, **arguments):
    """States are rounded to bfloat16 where they are written."""
    y = scan_delta_rule(states=states, **arguments)
    written = torch.cat([arguments["live_slots"], arguments["chunk_slots"]])
    written = written[written >= 0]
    states[written] = states[written].bfloat16().float()
    return y


@not_interpreted
@pytest.mark.parametrize("name", [*MUTANTS, "rounded states"])
def test_the_bound_sees(name):
    def mutant(**given):
        return scan_delta_rule(**given | MUTANTS[name](given)) if name in MUTANTS else rounded_states(**given)

    for seed in (0, 2, 3):  # with states that are kept in the middle
        with pytest.raises(AssertionError):
            check_scan(seed, dtype=torch.float32, scan=mutant)


def check_resuming(device, dtype=torch.float32, firsts=range(1, 6), key_dim=12, value_dim=10):
    """A sequence that goes on from any kept multiple of 64 ends as one that did not stop: within noise, from kernels bit for bit."""
    tokens = 5 * CHUNK + 9
    args = make(tokens, 1, dtype=dtype, device=device, key_dim=key_dim, value_dim=value_dim)
    pool = torch.full((8, 4, key_dim, value_dim), NAN, device=device)
    pool[0] = 0

    def run(first_chunk, source, live, kept):
        ends = [min(CHUNK * n, tokens) - CHUNK * first_chunk for n in range(first_chunk, 7)]
        fields = {"first_chunks": [0, 6 - first_chunk], "source_slots": [source], "live_slots": [live]}
        return scan_delta_rule(
            **{name: x[CHUNK * first_chunk :] for name, x in args.items()},
            states=pool,
            normalise=True,
            chunk_bounds=torch.tensor(ends, device=device),
            chunk_slots=torch.tensor(kept[first_chunk:], device=device),
            **{name: torch.tensor(value, device=device) for name, value in fields.items()},
        )

    whole = run(0, 0, 7, [1, 2, 3, 4, 5, -1])
    unkept = pool[7].clone()
    by_kernels = INTERPRETED or device == "cuda"
    allowed, state_allowed = (0, 0) if by_kernels else noise(args, pool[0], normalise=True)
    for first in firsts:
        resumed = run(first, first, 6, [-1] * 6)
        if by_kernels:
            assert torch.equal(resumed, whole[CHUNK * first :]) and torch.equal(pool[6], pool[7])
        else:
            within(resumed, whole[CHUNK * first :].double().cpu(), NOISES * allowed[CHUNK * first :])
            within(pool[6], pool[7].double().cpu(), NOISES * state_allowed[0])
    assert torch.equal(run(0, 0, 7, [-1] * 6), whole)  # what is kept has no influence on what is computed
    assert torch.equal(pool[7], unkept)


@pytest.mark.parametrize("device", DEVICES)
def test_resuming_on_the_grid(device):
    check_resuming(device, firsts=(2,) if INTERPRETED else range(1, 6))


def parts_of_wider_rows(**arguments):
    """Queries, keys and values as a layer has them; what lies around them is NaN."""
    rows = [arguments[name].flatten(1) for name in "qkv"]
    around = torch.full((len(rows[0]), 16), NAN, dtype=rows[0].dtype, device=rows[0].device)
    wide = torch.cat([around, *rows, around], 1)
    starts = itertools.accumulate([row.shape[1] for row in rows], initial=16)
    parts = {
        name: wide[:, start : start + row.shape[1]].unflatten(1, arguments[name].shape[1:])
        for name, row, start in zip("qkv", rows, starts, strict=False)
    }
    return scan_delta_rule(**arguments | parts)


def test_parts_of_wider_rows():
    check_scan(0, dtype=torch.float32, scan=parts_of_wider_rows)


@pytest.mark.gpu(gib=1, seconds=10)
@pytest.mark.parametrize(("key_dim", "value_dim"), SIZES)
def test_sizes_of_heads_in_bfloat16(key_dim, value_dim):
    sizes = {"dtype": torch.bfloat16, "key_dim": key_dim, "value_dim": value_dim}
    check_scan(1, device="cuda", heads=2, **sizes)
    check_scan(3, device="cuda", key_heads=1, heads=3, scan=parts_of_wider_rows, **sizes)
    check_resuming("cuda", **sizes)


def joined(*parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rings_of(rows, entries, sample, kept_dtype, fill=NAN):
    """Rings, for inputs as the sample's."""
    shapes = {"keys": sample["k"].shape[1:], "written": sample["v"].shape[1:], "decays": sample["v"].shape[1:2]}
    dtypes = {"keys": sample["k"].dtype, "written": kept_dtype, "decays": sample["log_decay"].dtype}
    device = sample["k"].device
    return {
        name: torch.full((rows, entries, *x), fill, dtype=dtypes[name], device=device) for name, x in shapes.items()
    }


def rows_of(device, *fields):
    kinds = torch.int64, torch.int64, torch.int32, torch.int32, torch.int32, torch.int64
    return RingRows(*(torch.tensor(x, dtype=kind, device=device) for x, kind in zip(fields, kinds, strict=True)))


def check_decode(
    seed,
    *,
    dtype=torch.float64,
    kept_dtype=None,
    device="cpu",
    drafts=0,
    interval=4,
    steps=7,
    rows=3,
    normalise=True,
    update=update_delta_rule,
    **dimensions,
):
    """Raises AssertionError if an output or a written state of some steps is off, or if anything else changed.

    Requests start anywhere, accept some of their drafts, and sit a step out. Now and then a step has no tokens: it advances
    some states. All that a ring holds but what it must is NaN before each step.
    """
    dice, tokens, g = random.Random(seed), drafts + 1, torch.Generator().manual_seed(seed)
    kept_dtype, entries = kept_dtype or dtype, ring_entries(interval, tokens)
    sample = make(0, 0, dtype=dtype, device=device, **dimensions)
    heads, value_dim, key_dim = *sample["v"].shape[1:], sample["k"].shape[-1]
    held = rings_of(rows, entries, sample, kept_dtype)
    pool = torch.full((2 * rows, heads * key_dim * value_dim + 16), NAN, dtype=kept_dtype, device=device)
    pool = pool[:, :-16].unflatten(1, (heads, key_dim, value_dim))
    slots, own_rings = dice.sample(range(2 * rows), 2 * rows), dice.sample(range(rows), rows)
    pool[slots[:rows]] = torch.randn(rows, heads, key_dim, value_dim, generator=g).to(kept_dtype).to(device)
    origins, past = [dice.randrange(3 * interval) for _ in range(rows)], [sample] * rows
    # Keys and values in so few digits are rounded where they meet the ring, states where they are written.
    further = {"operands": 2.0**-8 if kept_dtype == torch.bfloat16 else 0.0, "normalise": normalise}
    for step in range(steps):
        fed = 0 if step % 4 == 3 else tokens
        args = make(rows * fed, seed + 100 * step, dtype=dtype, device=device, **dimensions)
        if not normalise:
            args["k"] = torch.nn.functional.normalize(args["k"], dim=-1)
        args = {name: x.unflatten(0, (rows, fed)) for name, x in args.items()}
        positions = [origin + len(done["v"]) for origin, done in zip(origins, past, strict=True)]
        ends = [
            max(o, p // interval * interval) if fed else dice.randint(o, p)
            for o, p in zip(origins, positions, strict=True)
        ]
        out = [dice.random() < 0.2 for _ in range(rows)]
        kept = [-1 if dice.random() < 0.5 else slot for slot in slots[rows:]]
        for row, (origin, position) in enumerate(zip(origins, positions, strict=True)):
            stale = [at % entries for at in range(position, origin + entries)]
            for ring in held.values():
                ring[own_rings[row], stale] = NAN
            for x in args.values():
                x[row] = NAN if out[row] else x[row]
        by_row = rows_of(
            device, [-1 if out[row] else slots[row] for row in range(rows)], own_rings, positions, origins, ends, kept
        )
        before, rings_before = pool.clone(), {name: ring.clone() for name, ring in held.items()}
        y = update(**args, states=pool, rows=by_row, **held, normalise=normalise)
        assert y.shape == (rows, fed, heads, value_dim) and y.dtype == dtype
        untouched = set(range(2 * rows))
        for row in range(rows):
            if out[row]:
                assert not y[row].any()
                assert all(
                    same(ring[own_rings[row]], rings_before[name][own_rings[row]]) for name, ring in held.items()
                )
                continue
            own, start, advance = (
                {name: x[row] for name, x in args.items()},
                before[slots[row]],
                ends[row] - origins[row],
            )
            for place in [slots[row]] * (advance > 0) + [kept[row]] * (kept[row] >= 0):
                untouched -= {place}
                assert torch.equal(pool[place], pool[slots[row]])
            if advance:
                expected, state_allowed = exact(past[row], start, normalise=normalise)[1][advance], 1e-12
                if dtype != torch.float64:
                    state_allowed = NOISES * noise(past[row], start, **further)[1][0]
                    state_allowed = state_allowed + expected.abs() * (2.0**-8 if kept_dtype == torch.bfloat16 else 0)
                within(pool[slots[row]], expected, state_allowed)
            # What follows is compared with exact arithmetic on the state as it was rounded.
            origins[row], past[row] = ends[row], {name: x[advance:] for name, x in past[row].items()}
            if fed:
                run = joined(past[row], own)
                expected, allowed = exact(run, pool[slots[row]], normalise=normalise)[0], 1e-12
                if dtype != torch.float64:
                    allowed = NOISES * noise(run, pool[slots[row]], **further)[0][-fed:]
                    allowed = allowed + expected[-fed:].abs() * (2.0**-8 if dtype == torch.bfloat16 else 0)
                within(y[row], expected[-fed:], allowed)
                accepted = dice.randint(1, fed)
                past[row] = joined(past[row], {name: x[:accepted] for name, x in own.items()})
        assert same(pool[list(untouched)], before[list(untouched)])


def same(got, wanted):
    return torch.equal(got.nan_to_num(9e9), wanted.nan_to_num(9e9))


@not_interpreted
@given(
    seed=st.integers(0, 10**6),
    drafts=st.integers(0, 3),
    interval=st.sampled_from([1, 2, 4, 8]),
    key_heads=st.integers(1, 3),
    repeat=st.integers(1, 3),
    key_dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    normalise=st.booleans(),
    rows=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_any_decode(seed, key_heads, repeat, **rest):
    check_decode(seed, key_heads=key_heads, heads=key_heads * repeat, **rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("dtype", "kept_dtype"), [*itertools.product([torch.float32, torch.bfloat16], repeat=2)])
def test_decode(device, drafts, dtype, kept_dtype):
    for seed in SEEDS:
        check_decode(seed, dtype=dtype, kept_dtype=kept_dtype, device=device, drafts=drafts)
    sizes = {
        "key_dim": 40,
        "value_dim": 72,
        "heads": 3,
        "key_heads": 1,
    }  # several columns, and more entries than a tile's
    check_decode(
        0, dtype=dtype, kept_dtype=kept_dtype, device=device, drafts=drafts, interval=32, steps=3, rows=1, **sizes
    )


def middle(rows, tokens, interval, kept_dtype, device, **dimensions):
    """Arguments of a decode in which the last row writes its state and the first does not, all in the middle of a ring."""
    entries, flat = ring_entries(interval, tokens), make(rows * tokens, 1, device=device, **dimensions)
    held = rings_of(rows, entries, flat, kept_dtype, 0.0)
    for seed, ring in enumerate(held.values()):
        ring.copy_(torch.randn(ring.shape, generator=torch.Generator().manual_seed(seed)) / 2)
    held["decays"].abs_().neg_()
    states = (
        torch.randn(2 * rows, *flat["v"].shape[1:2], flat["k"].shape[-1], flat["v"].shape[-1]).to(kept_dtype).to(device)
    )
    origins = [5 * interval - 3] * rows
    positions = [origins[0] + 2 + row % interval for row in range(rows - 1)] + [origins[0] + interval - 1]
    ends = [max(origin, p // interval * interval) for origin, p in zip(origins, positions, strict=True)]
    given = {name: x.unflatten(0, (rows, tokens)) for name, x in flat.items()} | held | {"states": states}
    return given, [list(range(rows)), list(range(rows)), positions, origins, ends, [-1] * rows]


def run(given, fields, tokens=slice(None)):
    """Outputs, states and rings of a decode, whose arguments do not change."""
    given = {name: x.clone() for name, x in given.items()}
    given |= {name: given[name][:, tokens] for name in ("q", "k", "v", "log_decay", "beta")}
    with invariant():
        y = update_delta_rule(**given, rows=rows_of(given["q"].device, *fields), normalise=True)
    return y, given


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_bits_of_a_row(device, kept_dtype, tokens):
    """They depend neither on other rows nor on what is kept; nor on whether a launch of its own has written the state."""
    count, sizes = 3, {"key_heads": 1, "heads": 2, "key_dim": 16, "value_dim": 64}
    if device == "cuda":  # programs of one row have fewer columns
        count, sizes = 40, {"key_heads": 16, "heads": 64, "key_dim": 128, "value_dim": 128}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    given, fields = middle(count, tokens, 8, kept_dtype, device, dtype=dtype, **sizes)
    y, after = run(given, fields)
    for row in (0, count - 1):
        one = {
            name: x[row : row + 1] if name in ("q", "k", "v", "log_decay", "beta") else x for name, x in given.items()
        }
        alone, left = run(one, [field[row : row + 1] for field in fields[:-1]] + [[count]])
        assert torch.equal(alone[0], y[row]) and torch.equal(left["states"][row], after["states"][row])
        assert torch.equal(left["states"][count], after["states"][row])
        assert all(torch.equal(left[name][row], after[name][row]) for name in ("keys", "written", "decays"))
    none, written = run(given, fields, slice(0))
    assert none.shape[1] == 0 and torch.equal(written["states"], after["states"])
    fields[3] = fields[4]
    later, _ = run(given | {"states": written["states"]}, fields)
    if device == "cuda" or INTERPRETED:
        assert torch.equal(later, y)
    torch.testing.assert_close(later, y, rtol=0, atol=1e-5)  # a state that is used before it is rounded is further off


DECODE_MUTANTS = {
    "rounded keys": lambda k, **_: {"k": k.bfloat16().to(k.dtype)},
    "nothing is forgotten": lambda log_decay, **_: {"log_decay": 0 * log_decay},
    "keys that are not stored": lambda keys, **_: {"keys": keys.clone()},
    "what is written has few digits": lambda written, **_: {"written": written.copy_(written.bfloat16())},
    "one entry more": lambda rows, **_: {"rows": rows._replace(origins=rows.origins - 1)},
    "another ring": lambda rows, **_: {"rows": rows._replace(rings=rows.rings.roll(1))},
    "no state is written": lambda rows, **_: {"rows": rows._replace(ends=rows.origins)},
    "no state is kept": lambda rows, **_: {"rows": rows._replace(kept=rows.kept * 0 - 1)},
    "padding decodes": lambda rows, **_: {"rows": rows._replace(slots=rows.slots.abs())},
}


@not_interpreted
@pytest.mark.parametrize("name", DECODE_MUTANTS)
def test_the_checks_of_a_decode_see(name):
    def mutant(**given):
        return update_delta_rule(**given | DECODE_MUTANTS[name](**given))

    with pytest.raises(AssertionError):
        check_decode(1, dtype=torch.float32, drafts=2, update=mutant)


def in_place(args, state, dtype, kept_dtype):
    """The decode without rings: the state is rounded after each token. Outputs (tokens, heads, V)."""
    args, repeat, outputs = {name: x.to(dtype) for name, x in args.items()}, len(state) // args["k"].shape[1], []
    q, k = (torch.nn.functional.normalize(args[name], dim=-1).repeat_interleave(repeat, 1) for name in "qk")
    for t in range(len(q)):
        state = args["log_decay"][t].exp()[:, None, None] * state.to(dtype)
        new = args["beta"][t, :, None] * (args["v"][t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * new[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
        state = state.to(kept_dtype)
    return torch.stack(outputs)


@not_interpreted
@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_many_tokens_is_no_larger_than_without_rings(kept_dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)  # steps this small are far slower with more, beside other processes
    tokens, fed, interval, sizes = 4096, 4, 16, {"key_heads": 1, "heads": 2, "key_dim": 16, "value_dim": 16}
    args, start, outputs, origin = make(tokens, 0, dtype=torch.float32, **sizes), torch.zeros(2, 16, 16), [], 0
    held, pool = rings_of(1, ring_entries(interval, fed), args, kept_dtype), start.to(kept_dtype, copy=True)[None]
    for position in range(0, tokens, fed):
        end = position // interval * interval
        step = {name: x[None, position : position + fed] for name, x in args.items()}
        rows = rows_of("cpu", [0], [0], [position], [origin], [end], [-1])
        outputs.append(update_delta_rule(**step, states=pool, rows=rows, **held, normalise=True)[0])
        origin = end
    wanted = in_place(args, start, torch.float64, torch.float64)
    errors = [
        float((y - wanted).norm() / wanted.norm())
        for y in (torch.cat(outputs), in_place(args, start, torch.float32, kept_dtype))
    ]
    assert errors[0] <= errors[1] + UNIT_ROUNDOFF  # of a float32 state, that of a token's products is all there is
