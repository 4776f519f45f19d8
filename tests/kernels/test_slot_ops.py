"""Operations that read and write states by slot, against loops in float64; what must not be read or written is NaN.

On the host the plain PyTorch versions run, on a GPU the Triton kernels; both are held to the same loops. With
TRITON_INTERPRET=1 (``test_interpreted.py``) the kernels run on the host, slowly.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from megatron_hybrid_prefix.ops import convolution
from megatron_hybrid_prefix.ops.convolution import convolve_from_slots, write_conv_windows
from megatron_hybrid_prefix.ops.mamba_scan import empty_up_to
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from tests.kernels import naive, rounding
from tests.kernels.places import DEVICES, INTERPRETED, NAN
from tests.kernels.steps import SLOTS, Step, check_kept, poisoned_pool

SEEDS = 4 if INTERPRETED else 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d_conv", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_windows(device, d_conv, dtype):
    dim = 300  # more than one program's channels, and no multiple of them
    for seed in range(SEEDS):
        step = Step.draw(seed)
        pool = poisoned_pool(step, (dim, d_conv), dtype, device, seed)
        before = pool.clone()
        bounds = step.bounds
        inputs = torch.full((bounds[-1] + 3, dim + 7), NAN, dtype=dtype, device=device)[
            :, 3 : 3 + dim
        ]  # part of wider rows
        inputs[: bounds[-1]] = torch.randn(bounds[-1], dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
        whole = torch.tensor([*bounds, bounds[-1]], dtype=torch.int32, device=device)
        write = partial(write_conv_windows, inputs, chunk_bounds=whole, **step.tensors(device))
        write(pool)
        expected = before.clone()
        for i, chunks, targets in step.sequences():
            for slot, chunk in targets:
                window = before[step.source_slots[i]].clone()
                for row in range(bounds[chunks.start], bounds[chunk]):
                    window = torch.cat([window[:, 1:], inputs[row, :, None]], dim=1)
                expected[slot] = window
        assert torch.equal(pool.nan_to_num(9e9), expected.nan_to_num(9e9)), seed  # copies: bit-equal
        check_kept(before, pool, step.live_slots, step.chunk_slots, write)


# The interpreter cuts bfloat16 off rather than rounding it, and multiplies its bits.
CONVOLVED = [torch.float32, *([] if INTERPRETED else [torch.bfloat16])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("dtype", CONVOLVED)
def test_convolution(device, taps, dtype):
    check_convolution(device, taps, dtype)


def check_convolution(device, taps, dtype, mutant=lambda given: {}):
    """Raises AssertionError if a value is further off than rounding takes it."""
    dim = 300  # more than one program's channels, and no multiple of them
    for seed in range(SEEDS // 2):
        step = Step.draw(seed, 8 if seed % 3 else 64)  # short sequences, and some that fill programs
        generator = torch.Generator().manual_seed(seed)
        windows = poisoned_pool(step, (dim, taps), dtype, device, seed)
        bounds, before = step.bounds, windows.clone()
        rows = bounds[-1]
        inputs = torch.full((rows, dim + 7), NAN, dtype=dtype, device=device)[:, 3 : 3 + dim]
        inputs[:] = torch.randn(rows, dim, generator=generator).to(dtype)
        weight, bias = (
            torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in ((dim, taps), (dim,))
        )
        bias = bias if seed % 2 else None
        sources, starts = step.of_tokens(device)
        wrong = torch.zeros_like(starts)
        step_of = {"sources": sources, "starts": starts, "wrong": wrong}
        given = {"inputs": inputs, "windows": windows, "weight": weight, "bias": bias} | step_of
        out = convolve_from_slots(**given | mutant(given))
        assert not wrong.any()
        assert out.dtype == dtype and out.is_contiguous()
        assert torch.equal(windows.nan_to_num(9e9), before.nan_to_num(9e9))
        wide = weight.double().cpu(), torch.zeros(dim).double() if bias is None else bias.double().cpu()
        for i, chunks, _ in step.sequences():
            span = slice(bounds[chunks.start], bounds[chunks.stop])
            own = inputs[span].double().cpu(), *wide, before[step.source_slots[i]].double().cpu()[:, 1:]
            expected = naive.conv_sequence(*own)
            rounding.check(out[span].cpu(), expected, rounding.allowed(expected, rounding.convolution(*own), dtype))


@pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu(gib=1))])
def test_tokens_of_a_program_do_not_change_the_bits(device, monkeypatch):
    """Of many tokens a program computes twice as many."""
    generator = torch.Generator().manual_seed(0)
    inputs, windows, weight = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((90, 40), (2, 40, 4), (40, 4))
    )
    starts = torch.tensor([0] * 41 + [41] * 49, dtype=torch.int32, device=device)
    step = {"sources": (starts > 0).int(), "starts": starts, "wrong": torch.zeros_like(starts)}
    few = convolve_from_slots(inputs, windows, weight, None, **step)
    monkeypatch.setattr(convolution, "_MANY", 1)
    assert torch.equal(convolve_from_slots(inputs, windows, weight, None, **step), few)


@pytest.mark.parametrize("device", DEVICES)
def test_a_short_sequence_before_the_padding_of_a_step(device):
    """The last sequence, which a window precedes, lies in one program with the first sequence and with padding, whose start is 0, too."""
    generator = torch.Generator().manual_seed(0)
    inputs, windows, weight = (torch.randn(*shape, generator=generator) for shape in ((32, 8), (3, 8, 4), (8, 4)))
    starts = torch.tensor([0] * 21 + [21] * 5 + [0] * 6, dtype=torch.int32)
    sources = torch.tensor([1] * 21 + [2] * 5 + [0] * 6, dtype=torch.int32)
    inputs[26:], windows[0] = NAN, NAN
    arguments = [x.to(device) for x in (inputs, windows, weight)]
    wrong = torch.zeros(32, dtype=torch.int32, device=device)
    out = convolve_from_slots(*arguments, None, sources=sources.to(device), starts=starts.to(device), wrong=wrong)
    assert wrong.tolist() == [0] * 26 + [1] * 6
    alone = [convolution.convolve_reference(inputs[:21], windows, weight, None, sources[:21], starts[:21])]
    alone += [convolution.convolve_reference(inputs[21:26], windows, weight, None, sources[21:26], 0 * starts[21:26])]
    torch.testing.assert_close(out[:26].cpu(), torch.cat(alone))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 16, 75])
def test_only_padding_is_zeroed(device, rows, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))
    like = empty((7, rows, 1030), device=device)[2].view(rows, 5, 206).expand(2, rows, 5, 206)[1]
    for end in {0, 1, 15, 16, 17, 74, 75} & {*range(rows + 1)}:
        out = empty_up_to(torch.tensor([9, end], dtype=torch.int32, device=device)[-1:], like)
        assert out.shape == like.shape and out.dtype == like.dtype and out.is_contiguous()
        assert out[:end].isnan().all() and (out[end:] == 0).all(), end


CONVOLUTION_MUTANTS = {
    "a tap late": lambda given: {"windows": given["windows"].roll(1, -1)},
    "rounded weights": lambda given: {"weight": given["weight"].bfloat16().float()},
    "sequences are not told apart": lambda given: {"starts": 0 * given["starts"]},
}


@pytest.mark.skipif(INTERPRETED, reason="of the bound")
@pytest.mark.parametrize("mutant", CONVOLUTION_MUTANTS)
def test_the_bound_of_the_convolution_sees(mutant):
    with pytest.raises(AssertionError):
        check_convolution("cpu", 4, torch.float32, CONVOLUTION_MUTANTS[mutant])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 4), (3, 5), (3, 40, 48)])
def test_slot_copies(device, dtype, shape):
    """Within a pool, and from one (layers, slots, accepted tokens) to another: bit-equal, and nothing else is touched."""
    layers, bits = 3, {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for seed in range(SEEDS):
        dice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(-(2**15), 2**15, (layers, 2, SLOTS, *shape), generator=generator, dtype=bits).to(device)
        pool = whole.view(dtype)[:, seed % 2]  # any bits, NaNs among them; strided over layers
        other = (
            torch.randint(-(2**15), 2**15, (layers, 7, *shape), generator=generator, dtype=bits).to(device).view(dtype)
        )
        slots = dice.sample(range(SLOTS), 12)
        for source, sources in ((pool, slots[6:]), (other, dice.choices(range(7), k=6))):
            targets = slots[:6]
            sources[1], targets[2] = -1, -1  # no copy
            expected, others = pool.view(bits).clone(), whole[:, 1 - seed % 2].clone()
            for one, to in zip(sources, targets, strict=True):
                if one >= 0 and to >= 0:
                    expected[:, to] = source.view(bits)[:, one]
            copy_slots(source, pool, torch.tensor(sources, device=device), torch.tensor(targets, device=device))
            assert torch.equal(pool.view(bits), expected)
            assert torch.equal(whole[:, 1 - seed % 2], others)


def test_slot_copies_of_unlike_states_are_refused():
    slots = torch.tensor([0])
    for other in (torch.zeros(2, 3, 5), torch.zeros(1, 3, 4), torch.zeros(2, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy_slots(torch.zeros(2, 3, 4), other, slots, slots)
