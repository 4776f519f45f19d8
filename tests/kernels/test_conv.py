"""Convolutions and their states: against loops, with poisoned memory, and prefill against decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import conv
from megatron_hybrid_prefix.platform.kernels.conv import (
    causal_conv1d_update,
    causal_conv1d_varlen_carry_states,
    causal_conv1d_varlen_fn,
    causal_conv1d_varlen_states,
)
from tests.kernels import naive, rounding

NAN = float("nan")
DIM = 6


def make(seed, d_conv, tokens, rows, state_len=None, dtype=torch.float64):
    """Returns (x, weight, bias, states): (tokens, DIM), (DIM, d_conv), (DIM,), (rows, DIM, state_len or d_conv - 1)."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(tokens, DIM), (DIM, d_conv), (DIM,), (rows, DIM, state_len or d_conv - 1)]
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def cumulative(lengths):
    """Returns (n + 1,) int32 starting at 0."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def maps(lengths, padding):
    """Returns per-token (sequence, start) as upstream's metadata has them: padding rows say sequence 0, start 0."""
    starts = cumulative(lengths).tolist()
    seq = [i for i, n in enumerate(lengths) for _ in range(n)] + [0] * padding
    start = [starts[i] for i, n in enumerate(lengths) for _ in range(n)] + [0] * padding
    return torch.tensor(seq, dtype=torch.int32), torch.tensor(start, dtype=torch.int32)


def by_loops(x, weight, bias, lengths, states):
    """Returns the convolution of each sequence on its own."""
    starts = cumulative(lengths).tolist()
    zeros = torch.zeros(DIM, weight.shape[1] - 1, dtype=x.dtype)
    return torch.cat(
        [
            naive.conv_sequence(x[starts[i] : starts[i + 1]], weight, bias, zeros if states is None else states[i])
            for i in range(len(lengths))
        ]
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    d_conv=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
    with_states=st.booleans(),
    with_maps=st.booleans(),
    padding=st.integers(0, 3),
)
def test_prefill_matches_the_loops(lengths, d_conv, seed, with_states, with_maps, padding):
    n = sum(lengths)
    x, weight, bias, states = make(seed, d_conv, n + padding, len(lengths))
    x[n:] = NAN  # padding: may become anything, but must not spread
    if not with_states:
        states = None
    seq, start = maps(lengths, padding) if with_maps else (None, None)
    out = causal_conv1d_varlen_fn(x, weight, bias, cumulative(lengths), states, "silu", seq, start)
    torch.testing.assert_close(out[:n], by_loops(x[:n], weight, bias, lengths, states), rtol=1e-10, atol=1e-10)
    if not with_maps:
        assert (out[n:] == 0).all()


def test_padding_rows_read_what_their_maps_say():
    """Upstream computes padding rows, too: as tokens of sequence 0, at their own row."""
    x, weight, bias, states = make(3, 4, 6, 1)
    seq, start = maps([2], 4)
    out = causal_conv1d_varlen_fn(x, weight, bias, cumulative([2]), states, "silu", seq, start)
    torch.testing.assert_close(out, naive.conv_sequence(x, weight, bias, states[0]), rtol=1e-10, atol=1e-10)


def check_rounding(dtype, seed):
    """Raises AssertionError if a prefill exceeds its rounding bound."""
    x, weight, bias, states = make(seed, 4, 50, 1, dtype=dtype)
    out = causal_conv1d_varlen_fn(x, weight, bias, cumulative([50]), states)
    assert out.dtype == dtype
    exactly = (x.double(), weight.double(), bias.double(), states[0].double())
    exact = naive.conv_sequence(*exactly)
    rounding.check(out, exact, rounding.allowed(exact, rounding.convolution(*exactly), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mutant", [None, "sums_in_bfloat16", "a_dropped_tap"])
def test_the_error_is_that_of_the_precision_and_mutants_are_seen(monkeypatch, mutant, dtype):
    add_taps = conv._add_taps
    if mutant == "sums_in_bfloat16":
        monkeypatch.setattr(
            conv, "_add_taps", lambda taps, *rest: add_taps(taps, *(t.bfloat16() for t in rest)).float()
        )
        monkeypatch.setattr(conv, "compute_dtype", lambda tensor: torch.bfloat16)
    elif mutant == "a_dropped_tap":
        monkeypatch.setattr(conv, "_add_taps", lambda taps, weight, bias: add_taps(taps[1:], weight[:, 1:], bias))
    for seed in range(4):
        with rounding.only(mutant):
            check_rounding(dtype, seed)


def test_initial_states_may_be_a_view_with_any_strides():
    x, weight, bias, states = make(0, 4, 5, 2, state_len=4)
    view = states[:, :, 1:]
    out = causal_conv1d_varlen_fn(x, weight, bias, cumulative([2, 3]), view)
    torch.testing.assert_close(out, by_loops(x, weight, bias, [2, 3], view), rtol=1e-10, atol=1e-10)


def test_prefill_refuses_what_upstream_refuses():
    x, weight, bias, _ = make(0, 4, 5, 1)
    with pytest.raises(ValueError, match="silu"):
        causal_conv1d_varlen_fn(x, weight, bias, cumulative([5]), activation="gelu")
    with pytest.raises(ValueError, match="contiguous"):
        causal_conv1d_varlen_fn(x.T.contiguous().T, weight, bias, cumulative([5]))
    with pytest.raises(ValueError, match="seq_start"):
        causal_conv1d_varlen_fn(x, weight, bias, cumulative([5]), precomputed_seq_idx=torch.zeros(5))


@settings(max_examples=60, deadline=None)
@given(
    d_conv=st.sampled_from([2, 3, 4]),
    extra=st.integers(-1, 2),
    steps=st.integers(1, 4),
    slots=st.permutations(range(5)),
    padded=st.lists(st.booleans(), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    with_bias=st.booleans(),
    activation=st.sampled_from(["silu", "none", True]),
    with_intermediate=st.booleans(),
)
def test_decode_matches_the_loops(d_conv, extra, steps, slots, padded, seed, with_bias, activation, with_intermediate):
    state_len = d_conv + extra
    x, weight, bias, states = make(seed, d_conv, 3 * steps, 5, state_len)
    x = x.view(3, steps, DIM)
    index = torch.tensor([-1 if skip else slot for skip, slot in zip(padded, slots, strict=False)])
    x[index < 0] = NAN
    before = states.clone()
    intermediate = torch.full((5, steps, DIM, state_len), NAN, dtype=torch.float64) if with_intermediate else None
    out = causal_conv1d_update(x, states, weight, bias if with_bias else None, activation, index, intermediate)

    untouched = set(range(5))
    for row, slot in enumerate(index.tolist()):
        if slot < 0:
            assert (out[row] == 0).all()
            continue
        untouched.remove(slot)
        history = torch.cat([before[slot], x[row].T], dim=1)  # (DIM, state_len + steps)
        assert torch.equal(states[slot], history[:, steps:])
        for step in range(steps):
            if with_intermediate:
                assert torch.equal(intermediate[slot, step], history[:, step + 1 : step + 1 + state_len])
            window = history[:, state_len + step - d_conv + 1 : state_len + step + 1]
            y = (window * weight).sum(1) + (bias if with_bias else 0.0)
            if activation == "silu":
                y = y * torch.sigmoid(y)
            torch.testing.assert_close(out[row, step], y, rtol=1e-10, atol=1e-10)
    for slot in untouched:
        assert torch.equal(states[slot], before[slot])
        if with_intermediate:
            assert intermediate[slot].isnan().all()


def test_decode_of_one_token_without_indices():
    x, weight, bias, states = make(1, 4, 3, 5, 4)
    again = states.clone()
    out = causal_conv1d_update(x, states, weight, bias, "silu", None)
    assert out.shape == (3, DIM)
    assert torch.equal(out, causal_conv1d_update(x[:, None], again, weight, bias, "silu", torch.arange(3))[:, 0])
    assert torch.equal(states, again)


def test_decode_in_low_precision_keeps_the_inputs_exactly():
    x, weight, bias, states = make(1, 4, 3, 3, 4, torch.bfloat16)
    expected = torch.cat([states[..., 1:], x.view(3, DIM, 1)], -1)
    out = causal_conv1d_update(x, states, weight, bias, "silu", torch.arange(3))
    assert out.dtype == torch.bfloat16
    assert torch.equal(states, expected)


def test_decode_refuses_widths_that_upstream_has_no_code_for():
    x, weight, bias, states = make(1, 5, 3, 3, 5)
    with pytest.raises(ValueError, match="d_conv"):
        causal_conv1d_update(x, states, weight, bias, "silu", None)
    x, weight, bias, states = make(1, 4, 3, 3, 2)
    with pytest.raises(ValueError, match="too short"):
        causal_conv1d_update(x, states, weight, bias, "silu", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_gives_the_bits_of_a_prefill_wherever_the_token_sits(dtype):
    x, weight, bias, states = make(5, 4, 40, 1, 4, dtype)
    prefill = causal_conv1d_varlen_fn(x, weight, bias, cumulative([40]), states[:, :, 1:])
    for first in (1, 7, 23):
        live = states.clone() if first == 0 else torch.cat([states[0], x.T], 1)[None, :, first : first + 4].clone()
        tail = causal_conv1d_varlen_fn(x[first:], weight, bias, cumulative([40 - first]), live[:, :, 1:])
        assert torch.equal(tail, prefill[first:])
        steps = [causal_conv1d_update(x[t : t + 1], live, weight, bias, "silu", None) for t in range(first, 40)]
        assert torch.equal(torch.cat(steps), prefill[first:])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    state_len=st.integers(1, 5),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_final_states_are_the_last_inputs_with_zeros_or_an_earlier_state_before_them(lengths, state_len, seed, dtype):
    n = sum(lengths)
    x = make(seed, 2, n + 2, 1, dtype=dtype)[0]
    x[n:] = NAN
    states = causal_conv1d_varlen_states(x, cumulative(lengths), state_len)
    assert states.shape == (len(lengths), DIM, state_len)
    assert states.stride(1) == 1  # upstream's layout
    for i, end in enumerate(cumulative(lengths)[1:].tolist()):
        for j in range(state_len):
            back = state_len - j  # the newest input is last
            expected = x[end - back] if back <= lengths[i] else torch.zeros(DIM, dtype=dtype)
            assert torch.equal(states[i, :, j], expected)
    earlier = make(seed + 1, 2, 1, len(lengths), state_len, torch.float32)[3]
    carried = causal_conv1d_varlen_carry_states(x, cumulative(lengths), earlier)
    for i, end in enumerate(cumulative(lengths)[1:].tolist()):
        history = torch.cat([earlier[i], x[end - lengths[i] : end].T.float()], 1)
        assert torch.equal(carried[i], history[:, lengths[i] :])
