"""A chunked scan of Mamba2, from `chunk_decays` over `pass_states` to `chunk_outputs`, against the recurrence of each token in float64.

What must not be read is NaN. With TRITON_INTERPRET=1 (``test_interpreted.py``) the kernels run on the host, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from megatron_hybrid_prefix.ops import mamba_scan as module
from megatron_hybrid_prefix.ops.mamba_scan import chunk_decays, chunk_outputs, pass_states
from tests.kernels import rounding
from tests.kernels.places import DEVICES, INTERPRETED, NAN
from tests.kernels.steps import SLOTS, Step, check_kept, poisoned_pool

TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # it multiplies the bits of bfloat16
SEEDS = 2 if INTERPRETED else 12
SHAPES = {  # heads, groups, headdim, d_state, chunk_tokens, channels of D
    "parts of tiles": (6, 2, 24, 40, 16, 1),
    "less than a tile": (4, 4, 8, 16, 8, 8),
    "several tiles": (2, 1, 80, 64, 256, 80),
    "few channels": (4, 2, 32, 64, 128, 1),
    "several programs of states": (4, 2, 40, 72, 8, 1),
}
if INTERPRETED:
    SHAPES["several tiles"] = (2, 1, 72, 130, 128, 72)


def some_tokens(step, shape, seed, device, dtype):
    """Inputs of a scan; its rows are parts of wider ones, NaN around them."""
    heads, groups, headdim, d_state, _, of_D = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [heads * headdim, groups * d_state, groups * d_state, heads * headdim, heads]
    rows = torch.full((step.bounds[-1] + 3, sum(sizes) + 8), NAN)[:, 8:]
    rows[: step.bounds[-1]] = torch.randn(step.bounds[-1], sum(sizes), generator=generator)
    x, B, C, z, dt = rows.to(device, dtype).split(sizes, -1)
    return {
        "x": x.unflatten(-1, (heads, headdim)),
        "B": B.unflatten(-1, (groups, d_state)),
        "C": C.unflatten(-1, (groups, d_state)),
        "z": z.unflatten(-1, (heads, headdim)) if seed % 2 else None,
        "dt": dt,
        "A": -torch.rand(heads, generator=generator).to(device) - 0.1,
        "dt_bias": torch.randn(heads, generator=generator).to(device) - 3.0,
        "D": torch.randn(*((heads,) if of_D == 1 else (heads, of_D)), generator=generator).to(device),
    }


def nothing(given):
    return {}


def scan(step, pool, *, x, B, C, z, dt, A, dt_bias, D, chunk_tokens, of_states=nothing, of_outputs=nothing, kept=None):
    bounds = torch.tensor(step.bounds, dtype=torch.int32, device=x.device)
    steps, log_decay = chunk_decays(
        dt, A, dt_bias, bounds, chunk_tokens, torch.zeros(len(dt), dtype=torch.int32, device=dt.device)
    )
    passed = {"x": x, "dt": steps, "B": B, "log_decay": log_decay, "bounds": bounds} | step.tensors(x.device)
    before = pass_states(states=pool, kept=kept, **passed | of_states(passed))
    given = {"x": x, "steps": steps, "log_decay": log_decay, "B": B, "C": C, "before": before, "D": D, "z": z}
    out = torch.full(x.shape, NAN, dtype=x.dtype, device=x.device)
    chunk_outputs(**given | of_outputs(given), bounds=bounds, out=out)
    return out


def check_scan(device, dtype, shape, seeds, pool_dtype=torch.float32, of_states=nothing, of_outputs=nothing):
    """Raises AssertionError if a kept state or an output exceeds its rounding bound, or if another slot or row was written.

    A mutant of states (``of_states``) spoils outputs, too: they are not looked at then.
    """
    heads, groups, headdim, d_state, chunk_tokens, _ = shape
    for seed in seeds:
        step = Step.draw(seed, chunk_tokens)
        given = some_tokens(step, shape, seed, device, dtype)
        pool = poisoned_pool(step, (heads, headdim, d_state), pool_dtype, device, seed)
        initial = pool.clone()
        out = scan(step, pool, **given, chunk_tokens=chunk_tokens, of_states=of_states, of_outputs=of_outputs).cpu()
        assert out[step.bounds[-1] :].isnan().all()
        others = [slot for slot in range(SLOTS) if slot not in step.live_slots + step.chunk_slots]
        assert torch.equal(pool[others].nan_to_num(9e9), initial[others].nan_to_num(9e9))
        exact = {name: None if each is None else each.double().cpu() for name, each in given.items()}
        B, C = (exact[name].repeat_interleave(heads // groups, 1) for name in "BC")
        rates = torch.nn.functional.softplus(exact["dt"] + exact["dt_bias"])
        D = exact["D"].view(heads, -1)
        # A product of rounded factors: the state, what is passed on, and the weight of a token; on a GPU float32 to 10 bits.
        coarse = 2**16 * 3 if dtype == torch.bfloat16 else 2**16 if device == "cuda" else 0
        of_state = 2**16 if pool_dtype == torch.bfloat16 else 0  # that a chunk starts from
        for i, chunks, targets in step.sequences():
            kept = {step.bounds[end] - 1: [slot for slot, at in targets if at == end] for _, end in targets}
            state = initial[step.source_slots[i]].double().cpu()
            magnitude = state.abs()
            # Roundings of a decay: those of its logarithm count as often as it is large.
            rows = range(step.bounds[chunks.start], step.bounds[chunks.stop])
            largest = (rates[rows.start : rows.stop] * exact["A"]).sum(0).abs().max().item()
            of_decay = (chunk_tokens + rounding.SOFTPLUS + 2) * largest + rounding.EXP + 4
            roundings = len(chunks) * of_decay + rounding.SOFTPLUS + d_state + 3 * chunk_tokens + 10 + coarse
            for row in rows:
                decay = torch.exp(rates[row] * exact["A"])[:, None, None]
                new = torch.einsum("h,hp,hn->hpn", rates[row], exact["x"][row], B[row])
                state, magnitude = decay * state + new, decay * magnitude + new.abs()
                y = torch.einsum("hpn,hn->hp", state, C[row]) + D * exact["x"][row]
                terms = torch.einsum("hpn,hn->hp", magnitude, C[row].abs()) + (D * exact["x"][row]).abs()
                weighted = (roundings + of_state) * terms
                if exact["z"] is not None:
                    gate = torch.nn.functional.silu(exact["z"][row])
                    y, weighted = y * gate, (weighted + rounding.SILU * terms) * gate.abs()
                if of_states is nothing:
                    rounding.check(out[row], y, rounding.allowed(y, weighted, dtype, truncated=INTERPRETED))
                for slot in kept.get(row, ()):
                    bound = rounding.allowed(state, roundings * magnitude, pool_dtype, truncated=INTERPRETED)
                    rounding.check(pool[slot].cpu(), state, bound)
        again = partial(scan, step, **given, chunk_tokens=chunk_tokens)
        check_kept(initial, pool, step.live_slots, step.chunk_slots, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scan(device, dtype, shape):
    check_scan(device, dtype, SHAPES[shape], range(SEEDS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_scan_with_states_in_bfloat16(device, dtype):
    check_scan(device, dtype, SHAPES["several programs of states"], range(SEEDS), torch.bfloat16)


MUTANTS_OF_STATES = {
    "rounded steps": lambda given: {"dt": given["dt"].bfloat16().float()},
    "without the first chunk": lambda given: {"dt": torch.cat([0 * given["dt"][:, :1], given["dt"][:, 1:]], 1)},
    "keys of the first group": lambda given: {"B": given["B"][:, :1].expand_as(given["B"])},
    "from another slot": lambda given: {"source_slots": given["source_slots"].index_fill(0, torch.tensor(0), -1)},
}
MUTANTS_OF_OUTPUTS = {
    "rounded steps": lambda given: {"steps": given["steps"].bfloat16().float()},
    "keys of the first group": lambda given: {"B": given["B"][:, :1].expand_as(given["B"])},
    "queries of the first group": lambda given: {"C": given["C"][:, :1].expand_as(given["C"])},
    "states of the chunk before": lambda given: {"before": given["before"].roll(1, 0)},
    "no state": lambda given: {"before": torch.zeros_like(given["before"])},
    "decays of the token before": lambda given: {"log_decay": given["log_decay"].roll(1, 2)},
    "no skip": lambda given: {"D": torch.zeros_like(given["D"])},
    "no gate": lambda given: {"z": None},
}


@pytest.mark.skipif(INTERPRETED, reason="of the bound")
@pytest.mark.parametrize("mutant", MUTANTS_OF_OUTPUTS)
def test_the_bound_of_outputs_sees(mutant):
    with pytest.raises(AssertionError, match="times the bound"):
        check_scan("cpu", torch.float32, SHAPES["parts of tiles"], [1], of_outputs=MUTANTS_OF_OUTPUTS[mutant])


@pytest.mark.skipif(INTERPRETED, reason="of the bound")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mutant", MUTANTS_OF_STATES)
def test_the_bound_of_states_sees(mutant, dtype):
    for seed in range(2):
        with pytest.raises(AssertionError, match="times the bound"):
            check_scan(
                "cpu", torch.float32, SHAPES["parts of tiles"], [seed], dtype, of_states=MUTANTS_OF_STATES[mutant]
            )


def sums_in_bfloat16(patch):
    def product(a, b):
        total = torch.zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        for k in range(a.shape[-1]):
            total = (total + a[..., k, None] * b[..., k, None, :]).bfloat16().float()
        return total

    patch.setattr(torch.Tensor, "__matmul__", product)


def decays_in_bfloat16(patch):
    exp = torch.exp
    patch.setattr(torch, "exp", lambda x: exp(x).bfloat16().to(x.dtype) if x.dtype == torch.float32 else exp(x))


@pytest.mark.skipif(INTERPRETED, reason="of the PyTorch version")
@pytest.mark.parametrize("mutant", [sums_in_bfloat16, decays_in_bfloat16])
def test_the_bound_sees_arithmetic_in_bfloat16(mutant):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="times the bound"):
        mutant(patch)
        check_scan("cpu", torch.float32, SHAPES["parts of tiles"], [1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1] if INTERPRETED else [1, 2])
def test_resuming_at_any_chunk_has_the_same_bits_alone(threads, device, request):
    """The second of two sequences, from the state after each of its chunks."""
    shape, before = SHAPES["less than a tile" if INTERPRETED else "parts of tiles"], torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    heads, _, headdim, d_state, size, _ = shape
    step = Step([7, size, size, 3, size, 5], [0, 2, 6], [0, 1], [0, 1], [-1, -1, 2, 3, 4, 5])
    given = some_tokens(step, shape, 1, device, torch.float32)
    pool = torch.randn(6, heads, headdim, d_state, generator=torch.Generator().manual_seed(0)).to(device)
    unkept, pool_of_unkept = replace(step, chunk_slots=[-1] * 6), pool.clone()
    whole = scan(step, pool, **given, chunk_tokens=size)
    assert torch.equal(
        scan(unkept, pool_of_unkept, **given, chunk_tokens=size)[: step.bounds[-1]], whole[: step.bounds[-1]]
    )
    assert torch.equal(pool_of_unkept[:2], pool[:2])  # keeping states does not change the results
    for first in range(3, 6):
        start = step.bounds[first]
        rest = {name: each[start:] if name in ("x", "B", "C", "z", "dt") else each for name, each in given.items()}
        again = pool[[first - 1, 0]].clone()
        alone = Step(step.lengths[first:], [0, 6 - first], [0], [1], [-1] * (6 - first))
        out = scan(alone, again, **rest, chunk_tokens=size)
        assert torch.equal(out[: alone.bounds[-1]], whole[start : step.bounds[-1]])
        assert torch.equal(again[1], pool[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_what_else_is_computed(shape, device, monkeypatch):
    """Later tokens of a chunk, other chunks, or how many heads share a program: as many as can, and one."""
    heads, _, headdim, d_state, chunk_tokens, _ = SHAPES[shape]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    step = Step([chunk_tokens, chunk_tokens - 3], [0, 2], [0], [1], [-1, -1])
    given = some_tokens(step, SHAPES[shape], 1, device, dtype)
    pool = torch.zeros(2, heads, headdim, d_state, device=device)
    whole = scan(step, pool, **given, chunk_tokens=chunk_tokens)
    cut = Step([chunk_tokens, 3], [0, 2], [0], [1], [-1, -1])
    rows = cut.bounds[-1]
    assert torch.equal(scan(cut, pool, **given, chunk_tokens=chunk_tokens)[:rows], whole[:rows])
    monkeypatch.setattr(module, "_MOST_HEADS", 1)
    first, second = (whole[slice(*part)] for part in pairwise(step.bounds))
    again = scan(step, pool, **given, chunk_tokens=chunk_tokens)
    assert torch.equal(again[:chunk_tokens], first) and torch.equal(again[chunk_tokens : step.bounds[-1]], second)
