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
from megatron_hybrid_prefix.ops.delta_rule import flush_delta_rule, scan_delta_rule, update_delta_rule
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK
from megatron_hybrid_prefix.ops.invariant.scope import invariant
from megatron_hybrid_prefix.ops.rings import RingRows
from tests.harness.naive_model import UNIT_ROUNDOFF
from tests.kernels.naive import delta_rule_sequence
from tests.kernels.places import DEVICES, INTERPRETED, NAN
from tests.kernels.steps import SLOTS, Step, check_kept, poisoned_pool

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version, or for a GPU")
SEEDS = range(2 if INTERPRETED else 6)
# Key heads, value heads, K, V. Programs of the kernels have 16 or 32 columns of V, and a power of two of K.
SHAPES = [(3, 3, 40, 72), (1, 1, 256, 64), *([] if INTERPRETED else [(1, 2, 16, 40), (1, 2, 128, 128)])]
# K, V of which the kernels are compiled differently.
SIZES = [(n, n) for n in (16, 32, 48, 64, 80, 96, 112, 128, 256)]
SIZES += [(96, 192), (16, 48), (48, 80), (80, 48), (16, 128), (128, 16), (64, 256), (128, 256), (256, 16)]
# Rounding stays within so many times the noise, a root of a mean square.
NOISES = 8
# The kernels take operands of products in bfloat16 where the inputs are: rounded as unit vectors, and once more in what is
# computed from them.
OPERAND_NOISE = {torch.bfloat16: 2 * 2.0**-9}


def make(tokens, seed, *, dtype=torch.float64, key_heads=2, heads=4, key_dim=12, value_dim=10, device="cpu", scale=1):
    """Keyword arguments that depend on tokens, with a memory of some hundred tokens."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    made = {
        "q": rand(tokens, key_heads, key_dim),
        "k": rand(tokens, key_heads, key_dim),
        "v": rand(tokens, heads, value_dim),
        "log_decay": -torch.rand(tokens, heads, generator=g, dtype=torch.float64) * 0.02,
        "beta": scale * torch.sigmoid(rand(tokens, heads)),
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
    whole = torch.tensor([*bounds, bounds[-1]], dtype=torch.int32, device=device)
    run = partial(scan, **args, normalise=normalise, chunk_bounds=whole, **step.tensors(device))
    y = run(states=pool)
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
    check_kept(before, pool, step.live_slots, step.chunk_slots, lambda states, **kept: run(states=states, **kept))


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


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_olmo_hybrid(device):
    """Of 96 and 192 channels; a token may write twice what its value lacks."""
    sizes = {"key_heads": 1, "heads": 1, "key_dim": 96, "value_dim": 192, "scale": 2}
    check_scan(1, dtype=torch.float32, device=device, **sizes)
    check_decode(1, dtype=torch.float32, device=device, rows=1, steps=4, **sizes)


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
        with pytest.raises(AssertionError, match="times what is allowed"):
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


def rings_of(rows, entries, args, kept_dtype):
    """Rings full of NaN, for such inputs."""
    like = {"keys": args["k"], "written": args["v"].to(kept_dtype), "decays": args["log_decay"]}
    return {name: x.new_full((rows, entries, *x.shape[1:]), NAN) for name, x in like.items()}


def rows_of(device, *fields):
    kinds = torch.int64, torch.int64, torch.int32, torch.int32, torch.int32, torch.int64
    return RingRows(*(torch.tensor(x, dtype=kind, device=device) for x, kind in zip(fields, kinds, strict=True)))


def same(got, wanted):
    return torch.equal(got.nan_to_num(9e9), wanted.nan_to_num(9e9))


def check_decode(
    seed, *, dtype=torch.float64, kept_dtype=None, device="cpu", drafts=0, interval=4, steps=7, rows=3, normalise=True,
    update=update_delta_rule, **dimensions,
):  # fmt: skip
    """Raises AssertionError if an output or a written state of some steps is off, or if anything else changed.

    Requests start anywhere, accept some of their drafts, and sit a step out. Now and then a step has no tokens: it advances
    some states. All that a ring holds but what it must is NaN before each step. A row's bits depend neither on other rows nor on
    what is kept. A launch of its own that writes states changes nothing.
    """
    dice, fed, kept_dtype = random.Random(seed), drafts + 1, kept_dtype or dtype
    entries, by_kernels, alike = ring_entries(interval, fed), INTERPRETED or device == "cuda", bool(seed % 2)
    made = make(rows * steps * fed, seed, dtype=dtype, device=device, **dimensions)
    if not normalise:
        made["k"] = torch.nn.functional.normalize(made["k"], dim=-1)
    held = rings_of(rows, entries, made, kept_dtype)
    made = {name: x.unflatten(0, (rows, -1)) for name, x in made.items()}
    pool = (
        torch.randn(2 * rows, *made["v"].shape[2:3], made["k"].shape[-1], made["v"].shape[-1]).to(kept_dtype).to(device)
    )
    slots, rings = dice.sample(range(2 * rows), 2 * rows), dice.sample(range(rows), rows)
    pool[slots[rows:]] = NAN
    origins = [dice.randrange(3 * interval) for _ in range(rows)]
    past = [{name: x[0, :0] for name, x in made.items()}] * rows

    def run(args, pool, held, *fields):
        pool, held = pool.clone(), {name: ring.clone() for name, ring in held.items()}
        with invariant(alike):
            y = update(**args, states=pool, rows=rows_of(device, *fields), **held, normalise=normalise)
        return y, pool, held

    def check(got, at, row, args, start):
        """What is written has few digits where a state has: each vector and state that meets it is off so far."""
        wanted, allowed = exact(args, start, normalise=normalise)[at], 1e-12
        if dtype != torch.float64:
            further = 2.0**-8 if kept_dtype == torch.bfloat16 else 0.0
            allowed = NOISES * noise(args, start, operands=further, normalise=normalise)[at][-1]
            allowed = allowed + wanted[-1].abs() * 2.0**-8 * (got.dtype == torch.bfloat16)
        within(got, wanted[-1], allowed)

    for step in range(steps):
        args = {name: x[:, step * fed : (step + 1) * fed * (step % 4 != 3)].clone() for name, x in made.items()}
        positions = [origin + len(done["v"]) for origin, done in zip(origins, past, strict=True)]
        ends = [max(o, p // interval * interval) for o, p in zip(origins, positions, strict=True)]
        if step % 4 == 3:
            ends = [dice.randint(o, p) for o, p in zip(origins, positions, strict=True)]
        live = [slot if dice.random() < 0.8 else -1 for slot in slots[:rows]]
        kept = [slot if dice.random() < 0.5 else -1 for slot in slots[rows:]]
        for row, (origin, position) in enumerate(zip(origins, positions, strict=True)):
            for ring in held.values():
                ring[rings[row], [at % entries for at in range(position, origin + entries)]] = NAN
            for x in args.values():
                x[row] = NAN if live[row] < 0 else x[row]
        fields, before = (live, rings, positions, [*origins], ends, kept), (pool, held)
        y, pool, held = run(args, *before, *fields)
        assert y.shape == args["v"].shape and y.dtype == dtype
        unchanged = set(range(2 * rows))
        for row, slot in enumerate(live):
            if slot < 0:
                assert not y[row].any() and all(
                    same(held[name][rings[row]], before[1][name][rings[row]]) for name in held
                )
                continue
            own, advance = {name: x[row] for name, x in args.items()}, ends[row] - origins[row]
            for place in [slot] * (advance > 0) + [kept[row]] * (kept[row] >= 0):
                unchanged -= {place}
                assert torch.equal(pool[place], pool[slot])
            if advance:
                check(pool[slot], 1, row, {name: x[:advance] for name, x in past[row].items()}, before[0][slot])
            # What follows is compared with exact arithmetic on the state as it was rounded.
            origins[row], past[row] = ends[row], {name: x[advance:] for name, x in past[row].items()}
            since = [
                {name: torch.cat([x, own[name][:count]]) for name, x in past[row].items()} for count in range(fed + 1)
            ]
            for token in range(y.shape[1]):
                check(y[row, token], 0, row, since[token + 1], pool[slot])
            past[row] = since[dice.randint(1, fed)]
        assert same(pool[list(unchanged)], before[0][list(unchanged)])
        if update is update_delta_rule and step in (2, 5):
            row = slice(step % rows, step % rows + 1)
            alone = run(
                {name: x[row] for name, x in args.items()}, *before, *(field[row] for field in fields[:5]), [-1]
            )
            if by_kernels or alike:
                assert same(alone[0], y[row]) and same(alone[1][slots[row.start]], pool[slots[row.start]])
                assert all(same(alone[2][name][rings[row]], held[name][rings[row]]) for name in held)
            written = before[0].clone()
            flush_delta_rule(written, rows=rows_of(device, *fields), **before[1])
            close = torch.allclose(written.nan_to_num(9e9), pool.nan_to_num(9e9), rtol=1e-9, atol=1e-5)
            assert same(written, pool) if by_kernels else close or kept_dtype == torch.bfloat16
            later, *_ = run(args, written, before[1], live, rings, positions, ends, ends, kept)
            assert same(later, y) if by_kernels else dtype == torch.bfloat16 or (later - y).abs().max() < 1e-5


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
@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=not_interpreted)])
def test_decode(device, drafts, dtype, kept_dtype):
    """Also with more columns than a program's, more entries than it reads at once, and fewer columns for a row alone."""
    types = {"dtype": dtype, "kept_dtype": kept_dtype, "device": device, "drafts": drafts}
    for seed in SEEDS:
        check_decode(seed, **types)
    large = (64, 16, 128, 128, 9) if device == "cuda" else (3, 1, 40, 136, 1)
    sizes = dict(zip(("heads", "key_heads", "key_dim", "value_dim", "rows"), large, strict=True))
    check_decode(1, interval=32, steps=3, **types, **sizes)


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
