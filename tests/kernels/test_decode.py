"""The decode recurrence: against loops, with padding, several tokens and tied parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import decode
from megatron_hybrid_prefix.platform.kernels.decode import selective_state_update
from tests.kernels import naive, rounding

NAN = float("nan")
HEADS, DIM, DSTATE, SLOTS = 4, 3, 5, 6
NO_LIMIT = (-float("inf"), float("inf"))  # a decode step, unlike the scan, does not limit dt


def make(seed, rows, steps, groups, dtype=torch.float64, tied=True):
    """Returns (state, keyword arguments) with heads and steps; tied means stride-0 A, dt and dt_bias as in the mixer."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    dt, bias, A = rand(rows, steps, HEADS, 1), rand(HEADS, 1), -rand(HEADS, 1, 1).abs() - 0.1
    dt = dt.expand(-1, -1, -1, DIM)
    bias = bias.expand(-1, DIM)
    A = A.expand(-1, DIM, DSTATE)
    if not tied:
        dt, bias, A = dt.contiguous(), bias.contiguous(), A.contiguous()
    return rand(SLOTS, HEADS, DIM, DSTATE), {
        "x": rand(rows, steps, HEADS, DIM),
        "dt": dt,
        "A": A,
        "B": rand(rows, steps, groups, DSTATE),
        "C": rand(rows, steps, groups, DSTATE),
        "D": rand(HEADS, 1).expand(-1, DIM),
        "z": rand(rows, steps, HEADS, DIM),
        "dt_bias": bias,
    }


def sequence_of(state, a, row, dt_softplus=True):
    """Returns what `naive.mamba_sequence` takes of one row from `state` (heads, dim, dstate), in float64."""
    steps = a["x"].shape[1]
    dt = torch.zeros(steps, HEADS, dtype=torch.float64)
    for s in range(steps):
        for h in range(HEADS):
            bias = None if a["dt_bias"] is None else a["dt_bias"][h, 0]
            dt[s, h] = naive.step_size(a["dt"][row, s, h, 0], bias, dt_softplus, NO_LIMIT)
    cast = naive.in_float64(a)
    return {name: cast[name][row] for name in ("x", "B", "C")} | {
        "dt": dt,
        "A": cast["A"][:, 0, 0],
        "state": state.double(),
        "D": cast["D"],
        "z": None if a["z"] is None else cast["z"][row],
    }


def by_loops(state, a, row, dt_softplus=True):
    """Returns (y, states) of one row from `state` (heads, dim, dstate)."""
    return naive.mamba_sequence(**sequence_of(state, a, row, dt_softplus))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 4),
    slots=st.permutations(range(SLOTS)),
    padded=st.lists(st.booleans(), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
    tied=st.booleans(),
    gate=st.booleans(),
    bias=st.booleans(),
    dt_softplus=st.booleans(),
    with_intermediate=st.booleans(),
)
def test_matches_the_loops(steps, slots, padded, groups, seed, tied, gate, bias, dt_softplus, with_intermediate):
    rows = len(padded)
    state, a = make(seed, rows, steps, groups, tied=tied)
    if not gate:
        a["z"] = None
    if not bias:
        a["dt_bias"] = None
    if dt_softplus:
        a["dt"] = a["dt"] + torch.tensor([25.0, 0.0, 0.0, -25.0])[:, None]  # above the threshold, and far below
    else:
        a["dt"] = a["dt"].abs() + 6.0  # positive whatever the bias: decode has no dt limit, the reference clamps at 0
    index = torch.tensor([-1 if skip else slot for skip, slot in zip(padded, slots, strict=False)])
    a["x"][index < 0] = NAN
    x_before, before = a["x"].clone(), state.clone()
    inter = torch.full((SLOTS, steps, HEADS, DIM, DSTATE), NAN, dtype=torch.float64) if with_intermediate else None
    out = selective_state_update(
        state, **a, dt_softplus=dt_softplus, state_batch_indices=index, intermediate_ssm_states=inter
    )
    assert torch.equal(a["x"].nan_to_num(), x_before.nan_to_num())
    untouched = set(range(SLOTS))
    for row, slot in enumerate(index.tolist()):
        if slot < 0:
            assert (out[row] == 0).all()
            continue
        untouched.remove(slot)
        y, states = by_loops(before[slot], a, row, dt_softplus)
        torch.testing.assert_close(out[row], y, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state[slot], states[-1], rtol=1e-9, atol=1e-9)
        for step in range(steps if with_intermediate else 0):
            torch.testing.assert_close(inter[slot, step], states[step], rtol=1e-9, atol=1e-9)
    for slot in untouched:
        assert torch.equal(state[slot], before[slot])
        if with_intermediate:
            assert inter[slot].isnan().all()


def test_parameters_that_differ_within_a_head():
    state, a = make(0, 2, 1, 2, tied=False)
    g = torch.Generator().manual_seed(9)
    a["A"] = -torch.rand(HEADS, DIM, DSTATE, generator=g, dtype=torch.float64)
    a["dt"] = torch.rand(2, 1, HEADS, DIM, generator=g, dtype=torch.float64)
    before = state.clone()
    out = selective_state_update(state, **a)
    for row in range(2):
        for h in range(HEADS):
            for p in range(DIM):
                dt = a["dt"][row, 0, h, p] + a["dt_bias"][h, p]
                new = torch.exp(dt * a["A"][h, p]) * before[row, h, p]
                new = new + dt * a["B"][row, 0, h // 2] * a["x"][row, 0, h, p]
                y = new @ a["C"][row, 0, h // 2] + a["D"][h, p] * a["x"][row, 0, h, p]
                y = y * torch.nn.functional.silu(a["z"][row, 0, h, p])
                torch.testing.assert_close(state[row, h, p], new)
                torch.testing.assert_close(out[row, 0, h, p], y)


def test_one_step_may_drop_the_step_dimension():
    state, a = make(0, 3, 1, 2)
    again = state.clone()
    expected = selective_state_update(state, **a, dt_softplus=True)
    flat = {k: v[:, 0] if k in ("x", "dt", "B", "C", "z") else v for k, v in a.items()}
    out = selective_state_update(again, **flat, dt_softplus=True)
    assert torch.equal(out, expected[:, 0])
    assert torch.equal(again, state)


@pytest.mark.parametrize("steps", [None, 2])
def test_without_heads(steps):
    full_state, full = make(0, 3, steps or 1, 1)
    state, expected_state = full_state[:, 0].clone(), full_state[:, :1].clone()
    one = {k: full[k][:, :, :1] for k in ("x", "dt", "z")} | {k: full[k] for k in ("B", "C")}
    one |= {k: full[k][:1] for k in ("A", "D", "dt_bias")}
    inter = torch.full((SLOTS, steps or 1, 1, DIM, DSTATE), NAN, dtype=torch.float64)
    flat_inter = inter[:, :, 0].clone()
    expected = selective_state_update(expected_state, **one, dt_softplus=True, intermediate_ssm_states=inter)
    flat = {k: one[k][:, :, 0] if steps else one[k][:, 0, 0] for k in ("x", "dt", "z", "B", "C")}
    flat |= {k: one[k][0] for k in ("A", "D", "dt_bias")}
    out = selective_state_update(state, **flat, dt_softplus=True, intermediate_ssm_states=flat_inter)
    assert torch.equal(out, expected[:, :, 0] if steps else expected[:, 0, 0])
    assert torch.equal(state, expected_state[:, 0])
    assert torch.equal(flat_inter[:3], inter[:3, :, 0])


def check_rounding(dtype, seed, update=selective_state_update):
    """Raises AssertionError if outputs or the state of a call of four steps exceed their rounding bounds."""
    state, a = make(seed, 1, 4, 2, dtype=dtype)
    a["dt"] = a["dt"] - 2.0  # so that the first steps still matter at the end
    sequence = sequence_of(state[2], a, 0)
    y, states = naive.mamba_sequence(**sequence)
    roundings = rounding.softplus_roundings(a["dt"][0, :, :, 0].double() + a["dt_bias"][:, 0].double())
    weighted, weighted_states, _ = rounding.mamba(**sequence, dt_roundings=roundings)
    out = update(state, **a, dt_softplus=True, state_batch_indices=torch.tensor([2]))
    assert out.dtype == state.dtype == dtype
    rounding.check(out[0], y, rounding.allowed(y, weighted, dtype))
    rounding.check(state[2], states[-1], rounding.allowed(states[-1], weighted_states[-1], dtype))


def rounded_each_step(state, *, state_batch_indices, **a):
    """One call a step, the state rounded to bfloat16 after each."""
    outs = []
    for step in range(a["x"].shape[1]):
        now = {k: v[:, step : step + 1] if k in ("x", "dt", "B", "C", "z") else v for k, v in a.items()}
        outs.append(selective_state_update(state, **now, state_batch_indices=state_batch_indices))
        state.copy_(state.bfloat16())
    return torch.cat(outs, 1)


def without_the_second_step(state, **a):
    """The second step leaves the state as it was."""
    a["dt"] = a["dt"].clone()
    a["dt"][:, 1] = -50.0
    return selective_state_update(state, **a)


def in_bfloat16(state, **a):
    """Sums are in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "compute_dtype", lambda tensor: torch.bfloat16)
        return selective_state_update(state, **a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mutant", [None, rounded_each_step, without_the_second_step, in_bfloat16])
def test_several_steps_keep_the_state_in_float32_within_a_call_and_mutants_are_seen(mutant, dtype):
    for seed in range(4):
        with rounding.only(mutant):
            check_rounding(dtype, seed, mutant or selective_state_update)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_rest_of_the_batch_does_not_change_the_bits(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state, a = make(0, 6, 2, 2, dtype=torch.float32)
        all_state = state.clone()
        out = selective_state_update(all_state, **a, dt_softplus=True)
        for row in range(6):
            one = {k: v[row : row + 1].clone() if k in ("x", "B", "C", "z") else v for k, v in a.items()}
            one["dt"] = a["dt"][row : row + 1]
            live = state.clone()
            y = selective_state_update(live, **one, dt_softplus=True, state_batch_indices=torch.tensor([row]))
            assert torch.equal(y[0], out[row])
            assert torch.equal(live[row], all_state[row])
    finally:
        torch.set_num_threads(before)
