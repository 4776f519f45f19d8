"""The kernels of megatron's own Mamba2 mixer on a CPU, with its arguments, against loops.

They compute with the operations of ``ops/``, whose rounding and bits `test_chunk_outputs.py` and `test_mamba_decode.py` bound.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import conv
from megatron_hybrid_prefix.platform.kernels.decode import selective_state_update
from megatron_hybrid_prefix.platform.kernels.ssd import mamba_chunk_scan_combined_varlen
from tests.kernels import naive
from tests.kernels.places import NAN
from tests.kernels.test_attention import cumulative

DIM, HEADS, HEADDIM, STATE, SLOTS = 6, 4, 3, 5, 5
SEED = st.integers(0, 1000)


def numbers(seed):
    """A function that draws float32 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=SEED,
    groups=st.sampled_from([1, 2, 4]),
    wide_D=st.booleans(),
    gate=st.booleans(),
    padding=st.integers(0, 3),
)
def test_scan(cuts, seed, groups, wide_D, gate, padding):
    """Of sequences in chunks of these lengths; after them empty chunks of sequence 0, which hold its initial state."""
    draw, lengths = numbers(seed), [sum(sizes) for sizes in cuts]
    tokens, ends = sum(lengths), cumulative([size for sizes in cuts for size in sizes] + [0] * padding)
    of_chunk = [sequence for sequence, sizes in enumerate(cuts) for _ in sizes] + [0] * padding
    last = cumulative([len(sizes) for sizes in cuts])[1:] - 1
    x, z = draw(tokens, HEADS, HEADDIM), draw(tokens, HEADS, HEADDIM) if gate else None
    B, C, dt = draw(tokens, groups, STATE), draw(tokens, groups, STATE), draw(tokens, HEADS)
    dt[::3] += 25.0  # above softplus's threshold
    A, bias, D = -draw(HEADS).abs() - 0.1, draw(HEADS), draw(HEADS, HEADDIM if wide_D else 1)
    initial, out = draw(len(cuts), HEADS, HEADDIM, STATE), torch.full((tokens + 2, HEADS, HEADDIM), NAN)
    given = {"D": D if wide_D else D[:, 0], "z": z, "dt_bias": bias, "initial_states": initial, "dt_softplus": True}
    where = ends, last, torch.tensor(of_chunk, dtype=torch.int32), out[:tokens]
    states, raw = mamba_chunk_scan_combined_varlen(
        x, dt, A, B, C, 4, *where, **given, return_raw_states=True, state_dtype=torch.float32
    )
    assert out[tokens:].isnan().all()
    steps, starts = torch.nn.functional.softplus(dt + bias), cumulative(lengths).tolist()
    after = []
    for i, start in enumerate(starts[:-1]):
        span = slice(start, starts[i + 1])
        own = (None if each is None else each[span] for each in (x, steps))
        y, each = naive.mamba_sequence(
            *own, A, B[span], C[span], initial[i], D.expand(HEADS, HEADDIM), None if z is None else z[span]
        )
        close(out[span], y)
        after.append([initial[i], *each])
        close(states[i], after[i][-1])
    for chunk, i in enumerate(of_chunk):
        end = 0 if chunk > last[-1] and len(cuts) > 1 else int(ends[chunk + 1]) - starts[i]
        close(raw[chunk], after[i][end])


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 3),
    slots=st.permutations(range(SLOTS)),
    padded=st.lists(st.booleans(), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 4]),
    seed=SEED,
    gate=st.booleans(),
    drafts=st.booleans(),
)
def test_decode(steps, slots, padded, groups, seed, gate, drafts):
    draw, rows = numbers(seed), len(padded)
    index = torch.tensor([-1 if skip else slot for skip, slot in zip(padded, slots, strict=False)])
    x, z = draw(rows, steps, HEADS, HEADDIM), draw(rows, steps, HEADS, HEADDIM) if gate else None
    B, C = draw(rows, steps, groups, STATE), draw(rows, steps, groups, STATE)
    dt, A, bias, D = draw(rows, steps, HEADS), -draw(HEADS).abs() - 0.1, draw(HEADS), draw(HEADS)
    state = draw(SLOTS, HEADS, HEADDIM, STATE)
    before, after = state.clone(), torch.full((SLOTS, steps, HEADS, HEADDIM, STATE), NAN) if drafts else None
    out = selective_state_update(
        state,
        x,
        dt[..., None].expand(-1, -1, -1, HEADDIM),
        A[:, None, None].expand(-1, HEADDIM, STATE),
        B,
        C,
        D[:, None].expand(-1, HEADDIM),
        z,
        bias[:, None].expand(-1, HEADDIM),
        dt_softplus=True,
        state_batch_indices=index,
        intermediate_ssm_states=after,
    )
    for row, slot in enumerate(index.tolist()):
        if slot < 0:
            assert not out[row].any()
            continue
        given = x[row], torch.nn.functional.softplus(dt + bias)[row], A, B[row], C[row], before[slot]
        y, states = naive.mamba_sequence(*given, D[:, None], None if z is None else z[row])
        close(out[row], y)
        close(state[slot], states[-1])
        if drafts:
            close(after[slot], torch.stack(states))
    others = [slot for slot in range(SLOTS) if slot not in index]
    assert torch.equal(state[others], before[others]) and (not drafts or after[others].isnan().all())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    taps=st.sampled_from([2, 3, 4]),
    seed=SEED,
    with_maps=st.booleans(),
    padding=st.integers(0, 3),
)
def test_convolution_of_a_prefill(lengths, taps, seed, with_maps, padding):
    """Upstream's maps say that padding is of sequence 0, and starts at row 0."""
    draw, bounds = numbers(seed), cumulative(lengths)
    x, weight, bias = draw(sum(lengths) + padding, DIM), draw(DIM, taps), draw(DIM)
    x[sum(lengths) :] = NAN  # may become anything, but must not spread
    windows, maps = draw(len(lengths), DIM, taps)[:, :, 1:], (None, None)
    if with_maps:
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        maps = (torch.cat([each, torch.zeros(padding, dtype=each.dtype)]).int() for each in (rows, bounds[rows]))
    out = conv.causal_conv1d_varlen_fn(x, weight, bias, bounds, windows, "silu", *maps)
    for i, (start, end) in enumerate(pairwise(bounds)):
        close(out[start:end], naive.conv_sequence(x[start:end], weight, bias, windows[i]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_of_a_decode_is_that_of_a_prefill_bit_by_bit(dtype):
    draw = numbers(1)
    x, weight, bias, windows = (draw(*shape).to(dtype) for shape in ((40, DIM), (DIM, 4), (DIM,), (1, DIM, 4)))
    prefill = conv.causal_conv1d_varlen_fn(x, weight, bias, cumulative([40]), windows[:, :, 1:])
    inputs = torch.cat([windows[0], x.T], 1)
    for first in (0, 1, 7, 23):
        live = inputs[None, :, first : first + 4].clone()
        tail = conv.causal_conv1d_varlen_fn(x[first:], weight, bias, cumulative([40 - first]), live[:, :, 1:])
        drafted, after = live.clone(), torch.zeros(1, 40 - first, DIM, 4, dtype=dtype)
        at_once = conv.causal_conv1d_update(x[None, first:], drafted, weight, bias, "silu", torch.tensor([0]), after)
        one_by_one = [conv.causal_conv1d_update(row[None], live, weight, bias, "silu", None) for row in x[first:]]
        assert all(torch.equal(found, prefill[first:]) for found in (tail, at_once[0], torch.cat(one_by_one)))
        assert (
            torch.equal(live, inputs[None, :, -4:]) and torch.equal(drafted, live) and torch.equal(after[:, -1], live)
        )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    state_len=st.integers(1, 5),
    seed=SEED,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_final_windows_are_the_last_inputs_with_zeros_or_an_earlier_window_before_them(lengths, state_len, seed, dtype):
    draw, bounds = numbers(seed), cumulative(lengths)
    x, earlier = draw(sum(lengths) + 2, DIM).to(dtype), draw(len(lengths), DIM, state_len)
    x[sum(lengths) :] = NAN
    states = conv.causal_conv1d_varlen_states(x, bounds, state_len)
    carried = conv.causal_conv1d_varlen_carry_states(x, bounds, earlier)
    assert states.stride(1) == 1  # upstream's layout
    for found, before in ((states, torch.zeros_like(earlier)), (carried, earlier)):
        for i, (start, end) in enumerate(pairwise(bounds)):
            history = torch.cat([before[i], x[start:end].T.float()], 1)
            assert torch.equal(found[i].float(), history[:, end - start :])
