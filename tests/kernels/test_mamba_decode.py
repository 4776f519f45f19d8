"""A decode of Mamba2 by slots against loops in float64: on the host the PyTorch versions, on a GPU and interpreted the kernels.

What must not be read or written is NaN. Inputs are slices of wider rows, as a mixer has them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.ops import mamba_decode
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, tile_of, update_states
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED, NAN

SLOTS = 6
EXAMPLES = settings(max_examples=5 if INTERPRETED else 60, deadline=None, derandomize=INTERPRETED)
# Of states or windows; inputs are float32 and bfloat16. The kernels know no float64.
DTYPES = [torch.float32, torch.bfloat16]
# Heads, groups, headdim, d_state.
SHAPES = [(4, 2, 24, 20), (2, 1, 64, 128), (1, 1, 16, 256)]
if not INTERPRETED:
    SHAPES += [(2, 1, 16, 16), (2, 2, 64, 128), (3, 1, 128, 16), (6, 3, 40, 96)]


def rand(seed, *shape):
    """Float64 that bfloat16 represents, too."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def parts(wide, dtype, device, *widths):
    """Slices of one tensor (rows, tokens, widths), beside which is NaN."""
    around = torch.full((*wide.shape[:2], 16), NAN)
    whole = torch.cat([around, wide, around], -1).to(dtype).to(device)
    return [part for part in whole.split([16, *widths, 16], -1)][1:-1]


def pool_of(slots, values, dtype, device):
    """(SLOTS, *shape): values at the slots of rows, NaN in others; with a stride over slots that is not a slot's size."""
    shape = values.shape[1:]
    pool = torch.full((SLOTS, shape.numel() + 16), NAN)[:, : shape.numel()].unflatten(1, shape).to(dtype).to(device)
    for slot, value in zip(slots, values, strict=True):
        if slot >= 0:
            pool[slot] = value
    return pool


def rows_of(padded, order):
    """The slot of each row; -1: padding."""
    return [-1 if skip else slot for skip, slot in zip(padded, order, strict=False)]


# Which rows are padding, the slots of all, tokens, and a seed.
ROWS = st.tuples(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.permutations(range(SLOTS)),
    st.integers(1, 4),
    st.integers(0, 1000),
)
SOME_ROWS = ([False, True, False], [4, 1, 0, 5, 2, 3], 3, 1)
FLOAT32 = torch.float32


def check_convolution(
    rows, taps, bias=True, dim=20, dtype=FLOAT32, kept=FLOAT32, device="cpu", convolve=convolve_tokens
):
    """Raises AssertionError if an output or a window is not that of the loops, or if another slot changed."""
    padded, order, tokens, seed = rows
    slots = rows_of(padded, order)
    x, weight, before = (
        rand(seed, len(slots), tokens, dim),
        rand(seed + 1, dim, taps),
        rand(seed + 2, len(slots), dim, taps),
    )
    b = rand(seed + 3, dim) if bias else torch.zeros(dim, dtype=torch.float64)
    windows = pool_of(slots, before, kept, device)
    after = torch.full((SLOTS, tokens, dim, taps), NAN, dtype=kept, device=device)
    given_x = x.clone()
    given_x[[slot < 0 for slot in slots]] = NAN
    (inputs,) = parts(given_x, dtype, device, dim)
    args = inputs, windows, weight.to(dtype).to(device), b.to(dtype).to(device) if bias else None
    unkept = windows.clone()
    out = convolve(*args, slots=torch.tensor(slots, device=device), after=after)
    assert out.shape == (len(slots), tokens, dim) and out.dtype == dtype and out.is_contiguous()
    again = convolve(inputs, unkept, *args[2:], slots=torch.tensor(slots, device=device))
    assert torch.equal(again, out) and torch.equal(unkept.nan_to_num(9e9), windows.nan_to_num(9e9))
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not out[row].any()
            continue
        expected = naive.conv_sequence(x[row], weight, b if bias else None, before[row][:, 1:])
        allowed = rounding.allowed(
            expected, rounding.convolution(x[row], weight, b, before[row][:, 1:]), kept, truncated=INTERPRETED
        )
        rounding.check(out[row].cpu(), expected, allowed if kept == dtype else allowed + rounding_to(expected, dtype))
        history = torch.cat([before[row], x[row].T], 1)
        assert torch.equal(windows[slot].double().cpu(), history[:, tokens:])
        for token in range(tokens):
            assert torch.equal(after[slot, token].double().cpu(), history[:, token + 1 : token + 1 + taps])
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert windows[others].isnan().all() and after[others].isnan().all()


def rounding_to(exact, dtype):
    """The error of a second rounding."""
    return 0.0 if dtype == torch.float64 else 2.1 * rounding.unit_roundoff(dtype) * exact.abs()


@EXAMPLES
@given(ROWS, st.integers(2, 4), st.booleans(), st.sampled_from([5, 200]), st.sampled_from(DTYPES))
def test_any_convolution(rows, taps, bias, dim, kept):
    check_convolution(rows, taps, bias, dim, kept=kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution(taps, dtype, kept, device):
    check_convolution(SOME_ROWS, taps, dim=200, dtype=dtype, kept=kept, device=device)


def check_update(
    rows, shape, gate=False, wide_D=False, dtype=FLOAT32, kept=FLOAT32, device="cpu", update=update_states
):
    """Raises AssertionError if an output or a state is further off than rounding takes it, or if another slot changed."""
    padded, order, tokens, seed = rows
    slots, (heads, groups, P, N) = rows_of(padded, order), shape
    width = heads * P + 2 * groups * N
    xBC, before = rand(seed, len(slots), tokens, width), rand(seed + 1, len(slots), heads, P, N)
    # Steps from one that changes nearly nothing to one that is linear in dt.
    dt = rand(seed + 2, len(slots), tokens, heads) * 4 - 3 + 24 * (rand(seed + 3, len(slots), tokens, heads) > 1.5)
    dt, z = dt.bfloat16().double(), rand(seed + 4, len(slots), tokens, heads * P)
    A, dt_bias = -rand(seed + 5, heads).abs() - 0.125, rand(seed + 6, heads)
    D = rand(seed + 7, heads, P if wide_D else 1)
    states, after = pool_of(slots, before, kept, device), torch.full((SLOTS, tokens, heads, P, N), NAN)
    after = after.to(kept).to(device)
    fed = torch.cat([z, dt], -1)
    fed[[slot < 0 for slot in slots]] = NAN
    z_part, dt_part = parts(fed, dtype, device, heads * P, heads)
    index = torch.tensor(slots, device=device)
    args = {"A": A.float().to(device), "D": D.to(dtype).flatten().to(device), "dt_bias": dt_bias.float().to(device)}
    args |= {"z": z_part if gate else None}
    unkept, given = states.clone(), xBC.to(dtype).to(device)
    given[index < 0] = NAN
    y = update(given, dt_part, states, index, **args, after=after)
    assert y.shape == z.shape and y.dtype == dtype and y.is_contiguous()
    again = update(given, dt_part, unkept, index, **args)
    assert torch.equal(again, y) and torch.equal(unkept.nan_to_num(9e9), states.nan_to_num(9e9))
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not y[row].any()
            continue
        x, B, C = xBC[row].split([heads * P, groups * N, groups * N], -1)
        argument = dt[row] + dt_bias
        sequence = {
            "x": x.unflatten(-1, (heads, P)),
            "dt": torch.nn.functional.softplus(argument, threshold=40),
            "A": A,
            "B": B.unflatten(-1, (groups, N)),
            "C": C.unflatten(-1, (groups, N)),
            "state": before[row],
            "D": D.expand(heads, P),
            "z": z[row].unflatten(-1, (heads, P)) if gate else None,
        }
        expected, expected_states = naive.mamba_sequence(**sequence)
        weighted, weighted_states = rounding.mamba(**sequence, dt_roundings=rounding.softplus_roundings(argument))
        bound = rounding.allowed(expected, weighted, dtype, truncated=INTERPRETED).flatten(1)
        rounding.check(y[row].cpu(), expected.flatten(1), bound)
        for token, exact in enumerate(expected_states):
            bound = rounding.allowed(exact, weighted_states[token], kept, truncated=INTERPRETED)
            rounding.check(after[slot, token].cpu(), exact, bound)
        assert torch.equal(after[slot, -1], states[slot])
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert states[others].isnan().all() and after[others].isnan().all()


@EXAMPLES
@given(
    ROWS,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_any_update(rows, sizes, gate, wide_D, kept):
    repeat, groups, *shape = sizes
    check_update(rows, (repeat * groups, groups, *shape), gate, wide_D, kept=kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_update(shape, dtype, kept, device):
    check_update(SOME_ROWS, shape, dtype == kept, kept == DTYPES[1], dtype=dtype, kept=kept, device=device)


def draw(shape, rows, tokens, device, dtype=torch.float32):
    """``xBC``, ``dt``, states in as many slots, and the other arguments."""
    heads, groups, P, N = shape
    xBC, dt = rand(0, rows, tokens, heads * P + 2 * groups * N), rand(1, rows, tokens, heads)
    states = rand(2, rows, heads, P, N).to(dtype).to(device)
    args = {"A": -rand(3, heads).abs().float() - 0.1, "D": rand(4, heads).float(), "dt_bias": rand(5, heads).float()}
    return xBC.to(dtype).to(device), dt.to(dtype).to(device), states, {name: x.to(device) for name, x in args.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_at_once_are_one_token_after_another(device):
    shape = (4, 2, 16, 16)
    xBC, dt, states, args = draw(shape, 3, 4, device)
    slots, single = torch.tensor([2, -1, 0], device=device), states.clone()
    together = update_states(xBC, dt, states, slots, **args)
    for t in range(4):
        one = update_states(xBC[:, t : t + 1].contiguous(), dt[:, t : t + 1], single, slots, **args)
        assert torch.equal(one[:, 0], together[:, t])
    assert torch.equal(single, states)
    inputs, windows, weight = (
        rand(seed, *size).float().to(device) for seed, size in enumerate([(3, 4, 9), (3, 9, 4), (9, 4)])
    )
    single = windows.clone()
    together = convolve_tokens(inputs, windows, weight, None, slots=slots)
    for t in range(4):
        one = convolve_tokens(inputs[:, t : t + 1], single, weight, None, slots=slots)
        assert torch.equal(one[:, 0], together[:, t])
    assert torch.equal(single, windows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(device, kept):
    """However a state is split over programs."""
    count, shape = (3, (2, 1, 64, 64)) if INTERPRETED else (24, (16, 2, 64, 128))
    xBC, dt, states, args = draw(shape, count, 1, device)
    states, slots = states.to(kept), torch.arange(count, device=device)
    before, together = states.clone(), update_states(xBC, dt, states, slots, **args)
    for row in (0, count - 1):
        own = slice(row, row + 1)
        state = before.clone()
        assert torch.equal(update_states(xBC[own], dt[own], state, slots[own], **args)[0], together[row])
        assert torch.equal(state[row], states[row])


def test_tiles():
    """A thread always loads 16 bytes, so that a row lies on the same threads; and few rows still fill a GPU."""
    for headdim, d_state, itemsize in ((64, 128, 2), (64, 128, 4), (128, 16, 2), (24, 20, 4), (16, 256, 4)):
        tiles = [tile_of(rows * 128, headdim, d_state, itemsize, 132) for rows in (1, 8, 32, 256)]
        assert len({(tile["num_warps"], tile["BLOCK_N"]) for tile in tiles}) == 1
        for tile in tiles:
            elements, threads = tile["BLOCK_P"] * tile["BLOCK_N"], 32 * tile["num_warps"]
            assert tile["BLOCK_P"] >= headdim or elements * itemsize >= 16 * threads
        assert sorted(tile["BLOCK_P"] for tile in tiles) == [tile["BLOCK_P"] for tile in tiles]
    assert [tile_of(rows * 128, 64, 128, 2, 132)["BLOCK_P"] for rows in (1, 64)] == [8, 32]


def test_no_rows():
    xBC, dt, states, args = draw((2, 1, 8, 8), 1, 1, "cpu")
    empty = torch.zeros(0, dtype=torch.int64)
    assert update_states(xBC[:0], dt[:0], states, empty, **args).shape == (0, 1, 16)
    weight = torch.zeros(4, 4)
    assert convolve_tokens(torch.zeros(0, 1, 4), torch.zeros(2, 4, 4), weight, None, slots=empty).shape == (0, 1, 4)


def of_next_slot(slots):
    return torch.where(slots < 0, slots, (slots + 1) % SLOTS)


def rounded_between_tokens(xBC, dt, states, *rest, z, after, **args):
    """The state is rounded to bfloat16 after each token."""
    outputs = []
    for t in range(xBC.shape[1]):
        token = slice(t, t + 1)
        own = {"z": z[:, token], "after": None if after is None else after[:, token]}
        outputs.append(update_states(xBC[:, token].contiguous(), dt[:, token], states, *rest, **own, **args))
        states.copy_(states.bfloat16())
    return torch.cat(outputs, 1)


def without_the_second_token(xBC, dt, *rest, **args):
    dt = dt.clone()
    dt[:, 1] = -50.0
    return update_states(xBC, dt, *rest, **args)


def sums_in_bfloat16(*rest, **args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba_decode, "compute_dtype", lambda tensor: torch.bfloat16)
        return update_states(*rest, **args)


MUTANTS = {
    "rounded between tokens": rounded_between_tokens,
    "without the second token": without_the_second_token,
    "another slot": lambda xBC, dt, states, slots, **args: update_states(xBC, dt, states, of_next_slot(slots), **args),
    "no decay": lambda *rest, A, **args: update_states(*rest, A=0 * A, **args),
    "no D": lambda *rest, D, **args: update_states(*rest, D=0 * D, **args),
    "no bias": lambda *rest, dt_bias, **args: update_states(*rest, dt_bias=0 * dt_bias, **args),
    "no gate": lambda *rest, z, **args: update_states(*rest, z=None, **args),
    "rounded inputs": lambda xBC, *rest, **args: update_states(xBC * (1 + 2**-12), *rest, **args),
    "padding updates": lambda xBC, dt, states, slots, **args: update_states(xBC, dt, states, slots.abs(), **args),
}


@pytest.mark.parametrize("name", [*MUTANTS, *([] if INTERPRETED else ["sums in bfloat16"])])
def test_the_checks_see(name):
    def mutant(*rest, after=None, z=None, **args):
        return (MUTANTS | {"sums in bfloat16": sums_in_bfloat16})[name](*rest, z=z, after=after, **args)

    with pytest.raises(AssertionError):
        check_update(SOME_ROWS, (4, 2, 16, 16), gate=True, update=mutant)


@pytest.mark.parametrize("name", ["a dropped tap", "no bias", "another slot"])
def test_the_checks_of_a_convolution_see(name):
    def mutant(inputs, windows, weight, bias, *, slots, after=None):
        weight = weight * torch.tensor([0.0, 1, 1, 1]) if name == "a dropped tap" else weight
        slots = of_next_slot(slots) if name == "another slot" else slots
        return convolve_tokens(inputs, windows, weight, None if name == "no bias" else bias, slots=slots, after=after)

    with pytest.raises(AssertionError):
        check_convolution(SOME_ROWS, 4, convolve=mutant)


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
    decode, found = mixer.ssm_decode if form_of("steps of recurrent layers") == "shared" else mixer._ssm_decode, []
    with torch.inference_mode():
        for mixer._step in (object(), None):
            states = [rand(seed, 3, *shape).float() for seed, shape in enumerate(shapes)]
            after = [torch.zeros(3, tokens, *shape) for shape in shapes]
            named = dict(zip(("intermediate_conv_state", "intermediate_ssm_state"), after, strict=True))
            found.append([decode(inputs, *states, batch_indices=slots, **named), *states, *after])
    for ours, megatrons in zip(*found, strict=True):
        torch.testing.assert_close(ours, megatrons, rtol=1e-5, atol=1e-5)
    assert found[0][0].abs().max() > 0.1 and not found[0][0][1].any()


def test_only_a_step_of_this_packages_context_decodes_by_slots(mixer, monkeypatch):
    from megatron_hybrid_prefix.upstream.mixer import MambaMixer

    name = "ssm_dynamic_inference" if form_of("steps of recurrent layers") == "shared" else "_dynamic_inference"
    monkeypatch.setattr(MambaMixer, name, lambda self, hidden_states, context: self._step is not None)
    rows = {"padded_batch_dimensions": SimpleNamespace(prefill_req_count=0)}
    contexts = [SimpleNamespace(prefill_step=step, **rows) for step in (1, None)] + [SimpleNamespace(**rows)]
    assert [getattr(mixer, name)(None, context) for context in contexts] == [True, False, False]
    assert mixer._step is None
