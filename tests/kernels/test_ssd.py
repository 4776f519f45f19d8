"""The chunked scan: against the recurrence, and bit by bit against itself."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import ssd
from megatron_hybrid_prefix.platform.kernels.ssd import mamba_chunk_scan_combined_varlen
from tests.kernels import naive, rounding

NAN = float("nan")
LONG_MEMORY = -4.0  # added to dt: a state outlives a chunk of 16 tokens, which it hardly does without


PER_TOKEN = ("x", "dt", "B", "C", "z")


def make(
    lengths, seed=0, dtype=torch.float64, heads=4, dim=3, groups=2, dstate=5, with_state=True, d_dim=True, gate=True
):
    """Returns the arguments that depend on the tokens and the sequences."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    n = sum(lengths)
    return {
        "x": rand(n, heads, dim),
        "dt": rand(n, heads),
        "A": -torch.rand(heads, generator=g, dtype=torch.float64).to(dtype) - 0.1,
        "B": rand(n, groups, dstate),
        "C": rand(n, groups, dstate),
        "D": rand(heads, dim) if d_dim else rand(heads),
        "z": rand(n, heads, dim) if gate else None,
        "dt_bias": rand(heads),
        "initial_states": rand(len(lengths), heads, dim, dstate) if with_state else None,
    }


def chunks(lengths, chunk_size, cuts=None, padding=0):
    """Cuts sequences into chunks as upstream's metadata does; `cuts[i]` are chunk lengths to use instead.

    Returns:
        (cu_chunk_seqlens, last_chunk_indices, seq_idx): int32; every empty sequence has one empty chunk, and `padding`
        empty chunks with sequence 0 follow.
    """
    bounds, last, seq = [0], [], []
    for i, length in enumerate(lengths):
        sizes = cuts[i] if cuts else [min(chunk_size, length - s) for s in range(0, length, chunk_size)] or [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
            seq.append(i)
        last.append(len(seq) - 1)
    bounds += [bounds[-1]] * padding
    seq += [0] * padding
    return tuple(torch.tensor(v, dtype=torch.int32) for v in (bounds, last, seq))


def scan(args, lengths, chunk_size, cuts=None, padding=0, state_dtype=None, limit=(0.0, float("inf"))):
    """Returns (out, states, raw_states, meta); rows of `out` that must not be written come back as NaN."""
    cu, last, seq = meta = chunks(lengths, chunk_size, cuts, padding)
    out = torch.full((args["x"].shape[0] + 2, *args["x"].shape[1:]), NAN, dtype=args["x"].dtype)
    states, raw = mamba_chunk_scan_combined_varlen(
        chunk_size=chunk_size,
        cu_chunk_seqlens=cu,
        last_chunk_indices=last,
        seq_idx=seq,
        out=out[:-2],
        dt_softplus=True,
        dt_limit=limit,
        return_raw_states=True,
        state_dtype=state_dtype,
        **args,
    )
    assert out[-2:].isnan().all()
    return out[:-2], states, raw, meta


def reference(args, lengths, limit=(0.0, float("inf"))):
    """Returns (y, states per sequence and token) from the recurrence in float64."""
    ys, all_states = [], []
    for sequence in sequences(args, lengths, limit):
        y, states = naive.mamba_sequence(**sequence)
        ys.append(y)
        all_states.append([sequence["state"], *states])
    return torch.cat(ys), all_states


def sequences(args, lengths, limit=(0.0, float("inf"))):
    """Yields what `naive.mamba_sequence` takes, in float64, of each sequence."""
    a = naive.in_float64(args)
    heads, dim = a["x"].shape[1:]
    start = 0
    for i, length in enumerate(lengths):
        span = slice(start, start + length)
        start += length
        dt = [
            [naive.step_size(v, b, True, limit) for v, b in zip(row, a["dt_bias"], strict=True)]
            for row in a["dt"][span]
        ]
        zeros = torch.zeros(heads, dim, a["B"].shape[2], dtype=torch.float64)
        yield {name: a[name][span] for name in ("x", "B", "C")} | {
            "dt": torch.tensor(dt, dtype=torch.float64).reshape(length, heads),
            "A": a["A"],
            "state": zeros if a["initial_states"] is None else a["initial_states"][i],
            "D": a["D"] if a["D"].dim() == 2 else a["D"][:, None].expand(heads, dim),
            "z": None if a["z"] is None else a["z"][span],
        }


ROUNDING_LENGTHS, ROUNDING_CHUNK = [70, 9], 16


@functools.cache
def rounding_case(dtype, seed, dt_shift):
    """Returns arguments, and (exact, bound) of the outputs and of each final state."""
    args = make(ROUNDING_LENGTHS, seed, dtype=dtype, dim=8)
    args["dt"] = args["dt"] + dt_shift
    y, expected = reference(args, ROUNDING_LENGTHS)
    bounds, states, start = [], [], 0
    for i, sequence in enumerate(sequences(args, ROUNDING_LENGTHS)):
        span = slice(start, start + ROUNDING_LENGTHS[i])
        start = span.stop
        roundings = rounding.softplus_roundings(args["dt"][span].double() + args["dt_bias"].double())
        weighted, weighted_states, read = rounding.mamba(
            **sequence, dt_roundings=roundings, chunk_tokens=ROUNDING_CHUNK, stored=dtype
        )
        bounds.append(rounding.allowed(y[span], weighted, dtype) + 1.01 * read)
        final = expected[i][-1]
        states.append((final, rounding.allowed(final, weighted_states[-1], dtype)))
    return args, (y, torch.cat(bounds)), states


def check_rounding(dtype, seed, dt_shift):
    """Raises AssertionError if outputs or states exceed their rounding bounds."""
    args, outputs, final_states = rounding_case(dtype, seed, dt_shift)
    out, states, _, _ = scan(args, ROUNDING_LENGTHS, ROUNDING_CHUNK, state_dtype=dtype)
    assert out.dtype == states.dtype == dtype
    rounding.check(out, *outputs)
    for state, expected in zip(states, final_states, strict=True):
        rounding.check(state, *expected)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    groups=st.sampled_from([1, 2, 4]),
    with_state=st.booleans(),
    d_dim=st.booleans(),
    gate=st.booleans(),
    padding=st.integers(0, 3),
    limit=st.sampled_from([(0.0, float("inf")), (0.4, 0.9)]),
    data=st.data(),
)
def test_matches_the_recurrence(lengths, seed, groups, with_state, d_dim, gate, padding, limit, data):
    chunk_size = 4
    cuts = []
    for length in lengths:
        sizes = []
        while sum(sizes) < length:
            sizes.append(data.draw(st.integers(0, min(chunk_size, length - sum(sizes)))))
        cuts.append(sizes or [0])
    args = make(lengths, seed, groups=groups, with_state=with_state, d_dim=d_dim, gate=gate)
    args["dt"][::3] += 25.0  # above softplus's threshold
    out, states, raw, (cu, last, seq) = scan(args, lengths, chunk_size, cuts, padding, limit=limit)
    y, expected = reference(args, lengths, limit)
    torch.testing.assert_close(out, y, rtol=1e-9, atol=1e-9)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for c, i in enumerate(seq.tolist()[: int(last[-1]) + 1]):
        torch.testing.assert_close(raw[c], expected[i][int(cu[c + 1]) - starts[i]], rtol=1e-9, atol=1e-9)
    for i in range(len(lengths)):
        torch.testing.assert_close(states[i], expected[i][-1], rtol=1e-9, atol=1e-9)


def test_padding_chunks_hold_the_initial_state_of_sequence_0():
    args = make([3, 2])
    _, _, raw, _ = scan(args, [3, 2], 4, padding=2)
    assert torch.equal(raw[2], args["initial_states"][0])
    assert torch.equal(raw[3], args["initial_states"][0])


def test_a_batch_of_padding_only_writes_nothing():
    args = make([0, 0])
    args["x"], args["z"] = torch.full((5, 4, 3), NAN, dtype=torch.float64), torch.zeros(5, 4, 3, dtype=torch.float64)
    args["dt"] = torch.full((5, 4), NAN, dtype=torch.float64)
    args["B"] = args["C"] = torch.full((5, 2, 5), NAN, dtype=torch.float64)
    out, states, _, _ = scan(args, [0, 0], 4, padding=1)
    assert out.isnan().all()
    assert torch.equal(states, args["initial_states"])


def spoil_accumulation(monkeypatch):
    """Matrix products add up in bfloat16."""

    def bmm(a, b):
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2], dtype=torch.bfloat16)
        for k in range(a.shape[2]):
            total = total + (a[:, :, k, None] * b[:, k, None, :]).to(total.dtype)
        return total.to(a.dtype)

    monkeypatch.setattr(ssd.torch, "bmm", bmm)


def spoil_carried_state(monkeypatch):
    """The recurrence continues from a state that was rounded to bfloat16."""
    chunk = ssd._scan_chunk
    monkeypatch.setattr(
        ssd, "_scan_chunk", lambda tokens, A, carried, previous: chunk(tokens, A, carried.bfloat16().float(), previous)
    )


def spoil_chunk(monkeypatch):
    """The third chunk adds nothing."""
    chunk, calls = ssd._scan_chunk, itertools.count(1)

    def dropping(tokens, A, carried, previous):
        y, state = chunk(tokens, A, carried, previous)
        return (y, carried) if next(calls) == 3 else (y, state)

    monkeypatch.setattr(ssd, "_scan_chunk", dropping)


def spoil_previous(monkeypatch):
    """Outputs of the last full chunk read the state one chunk too early."""
    chunk, seen = ssd._scan_chunk, []

    def stale(tokens, A, carried, previous):
        seen.append(previous.clone())
        return chunk(tokens, A, carried, seen[-2] if len(seen) == 4 else previous)

    monkeypatch.setattr(ssd, "_scan_chunk", stale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spoil", [None, spoil_accumulation, spoil_carried_state, spoil_chunk, spoil_previous])
def test_the_error_is_that_of_the_precision_and_mutants_are_seen(spoil, dtype):
    for seed in range(3):
        with pytest.MonkeyPatch.context() as patch, rounding.only(spoil):
            if spoil is None:
                check_rounding(dtype, seed, 0.0)
            else:
                spoil(patch)
            check_rounding(dtype, seed, LONG_MEMORY)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_at_any_chunk_gives_the_same_bits(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        length, size = 90, 16
        args = make([length], dtype=dtype, dim=32, dstate=16)
        args["initial_states"] = args["initial_states"].float()
        out, _, raw, _ = scan(args, [length], size, state_dtype=torch.float32)
        for start in range(size, length, size):
            rest = {k: v[start:] if k in PER_TOKEN else v for k, v in args.items()}
            rest["initial_states"] = raw[start // size - 1][None].clone()
            resumed, states, _, _ = scan(rest, [length - start], size, state_dtype=torch.float32)
            assert torch.equal(resumed, out[start:])
            assert torch.equal(states[0], raw[-1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(4))
def test_other_sequences_do_not_change_the_bits(seed):
    lengths = [37, 0, 5, 64, 18]
    args = make(lengths, seed, dtype=torch.float32, dim=32, dstate=16)
    out, states, _, _ = scan(args, lengths, 16, padding=2)
    start = 0
    for i, length in enumerate(lengths):
        alone = {k: v[start : start + length] if k in PER_TOKEN else v for k, v in args.items()}
        alone["initial_states"] = args["initial_states"][i : i + 1]
        y, state, _, _ = scan(alone, [length], 16)
        assert torch.equal(y, out[start : start + length])
        assert torch.equal(state[0], states[i])
        start += length


def test_a_short_chunk_gives_the_bits_of_a_full_one():
    args = make([32], dtype=torch.float32, dim=32, dstate=16)
    out, _, _, _ = scan(args, [32], 32)
    for n in range(1, 32):
        part = {k: v[:n] if k in PER_TOKEN else v for k, v in args.items()}
        y, states, _, _ = scan(part, [n], 32)
        assert torch.equal(y, out[:n])
        assert states.isfinite().all()


def test_a_broken_sequence_does_not_reach_its_neighbours():
    args = make([16, 3, 16, 5], dtype=torch.float32)
    out, states, _, _ = scan(args, [16, 3, 16, 5], 16)
    broken = {k: v.clone() for k, v in args.items()}
    for name in PER_TOKEN:
        broken[name][:16] = NAN
        broken[name][19:35] = float("inf")
    again, again_states, _, _ = scan(broken, [16, 3, 16, 5], 16)
    for span, i in ((slice(16, 19), 1), (slice(35, 40), 3)):
        assert torch.equal(again[span], out[span])
        assert torch.equal(again_states[i], states[i])


def test_the_state_is_rounded_where_upstream_stores_it():
    """Outputs of a later chunk see the rounded state; the recurrence does not."""
    args = make([12], gate=False)
    out, _, raw, _ = scan(args, [12], 4, state_dtype=torch.bfloat16)
    exact_out, _, exact_raw, _ = scan(args, [12], 4)
    assert torch.equal(raw, exact_raw.to(torch.bfloat16))
    assert torch.equal(out[:4], exact_out[:4])
    second = {k: v[4:8] if k in ("x", "dt", "B", "C") else v for k, v in args.items()}
    second["initial_states"] = exact_raw[0].to(torch.bfloat16)[None]
    assert torch.equal(out[4:8], scan(second, [4], 4)[0])
    assert not torch.equal(out[4:8], exact_out[4:8])


def test_state_dtype_defaults_to_that_of_c():
    args = make([5], dtype=torch.float32)
    args["C"] = args["C"].to(torch.bfloat16)
    assert scan(args, [5], 4)[1].dtype == torch.bfloat16


def test_without_raw_states_only_the_final_ones_are_returned():
    args = make([5])
    cu, last, seq = chunks([5], 4)
    out = torch.empty_like(args["x"])
    states = mamba_chunk_scan_combined_varlen(
        args["x"], args["dt"], args["A"], args["B"], args["C"], 4, cu, last, seq, out, args["D"]
    )
    assert states.shape == (1, 4, 3, 5)
