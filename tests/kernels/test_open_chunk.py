"""A row of a chunk has the same bits whatever comes after it: other tokens, zeros, or nothing. Each kernel of a prefill.

So a decode may compute its row over the inputs that a chunk has so far. On the host the plain PyTorch versions run, on a GPU and with
TRITON_INTERPRET=1 the kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hybrid_prefix.layers.step import ChunkGrid, DecodeStep, PrefillSpan, PrefillStep
from megatron_hybrid_prefix.ops import delta_rule, delta_rule_triton
from megatron_hybrid_prefix.ops.convolution import convolve_from_slots
from megatron_hybrid_prefix.ops.delta_rule import continue_delta_rule, scan_delta_rule
from megatron_hybrid_prefix.ops.invariant.scope import invariant
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens
from megatron_hybrid_prefix.ops.mamba_scan import (
    chunk_decays,
    chunk_outputs,
    continue_scan,
    pass_states,
    scan_by_slots,
)
from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel
from tests.kernels.places import DEVICES, INTERPRETED

TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # it multiplies the bits of bfloat16
MAMBA = {"one tile": (4, 2, 16, 16, 64), "several tiles": (2, 1, 72, 40, 128)}  # heads, groups, headdim, d_state, chunk
DELTA = {"one tile": (1, 2, 16, 16), "several tiles": (2, 2, 40, 72)}  # key heads, heads, K, V
if torch.cuda.is_available():
    MAMBA["wide"], DELTA["wide"] = (4, 1, 64, 128, 256), (1, 2, 128, 128)
TOKENS = (0, 1, 15, 16, 17, 40, 62, 63)  # the last that counts; also around the ends of tiles


def drawn(device, dtype, seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def variants(tensors, token, chunk):
    """Three chunks that agree up to a token: with other tokens behind it, with zeros, and without; and how long they are."""
    other = [torch.cat([x[: token + 1], x.flip(0)[: chunk - token - 1] * 3]) for x in tensors]
    zeros = [torch.cat([x[: token + 1], torch.zeros_like(x[token + 1 :])]) for x in tensors]
    return (other, chunk), (zeros, chunk), ([x[: token + 1] for x in tensors], token + 1)


def slots(device, live=1):
    tensors = {"first_chunks": [0, 1], "source_slots": [0], "live_slots": [live], "chunk_slots": [-1]}
    return {name: torch.tensor(values, device=device) for name, values in tensors.items()}


def mamba(tensors, length, shape, states, device, live=1):
    """By name: all that the kernels of the scan make of one chunk."""
    heads, _, headdim, _, chunk = shape
    x, B, C, z, dt = tensors
    A, bias, D = -torch.linspace(0.1, 4, heads, device=device), *drawn(device, torch.float32, 9, (heads,), (heads,))
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    wrong = torch.zeros(chunk, dtype=torch.int32, device=device)
    steps, decays = chunk_decays(dt, A, bias, bounds, chunk, wrong)
    before = pass_states(x, steps, B, decays, bounds, states, **slots(device, live))
    out = torch.empty(length, heads, headdim, dtype=x.dtype, device=device)
    chunk_outputs(x, steps, decays, B, C, before, bounds, D=D, z=z, out=out)
    return {"steps": steps[:, 0].T, "decays": decays[:, 0].T, "outputs": out}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MAMBA)
def test_a_row_of_mamba2_depends_on_no_later_row(name, dtype, device):
    heads, groups, headdim, d_state, chunk = shape = MAMBA[name]
    of_token = (heads, headdim), (groups, d_state), (groups, d_state), (heads, headdim), (heads,)
    tensors = drawn(device, dtype, 1, *((chunk, *each) for each in of_token))
    pool = drawn(device, torch.float32, 2, (2, heads, headdim, d_state))[0]
    whole = mamba(tensors, chunk, shape, pool.clone(), device)
    for token in sorted({*TOKENS, chunk - 1}):
        for changed, length in variants(tensors, token, chunk):
            found = mamba(changed, length, shape, pool.clone(), device)
            for what, rows in found.items():
                assert torch.equal(rows[: token + 1], whole[what][: token + 1]), (what, token, length)


def delta(tensors, length, states, device, monkeypatch, live=1):
    """By name: what a chunk's tokens write, their scores and the factors of queries, and the outputs."""
    found = {}
    if runs_kernel(states):
        kernel = delta_rule_triton._prepare_kernel

        class Kept:
            def __getitem__(self, grid):
                def launch(*given, **options):
                    kernel[grid](*given, **options)
                    # against, values, scores: (chunks, heads, tokens, ...), and factors (chunks, heads, 2, tokens)
                    found.update({name: given[at][0] for name, at in (("against", 5), ("values", 6), ("scores", 7))})
                    found["factors"] = given[8][0, :, 0]

                return launch

        monkeypatch.setattr(delta_rule_triton, "_prepare_kernel", Kept())
    else:

        class Kept(delta_rule._Chunks):
            def __init__(self, *given):
                super().__init__(*given)
                fields = {"against": self._against, "values": self._values, "scores": self._scores}
                found.update({name: field[0] for name, field in (fields | {"factors": self._queries}).items()})

        monkeypatch.setattr(delta_rule, "_Chunks", Kept)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    with invariant(True):
        out = scan_delta_rule(*tensors, states, normalise=True, chunk_bounds=bounds, **slots(device, live))
    monkeypatch.undo()
    return {"outputs": out} | {name: rows.transpose(0, 1) for name, rows in found.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", DELTA)
def test_a_row_of_gated_delta_net_depends_on_no_later_row(name, dtype, device, monkeypatch):
    key_heads, heads, key_dim, value_dim = DELTA[name]
    if dtype == torch.bfloat16 and device == "cuda" and (key_dim % 16 or value_dim % 16):
        key_dim, value_dim = 48, 80
    chunk, of_keys = delta_rule_triton.CHUNK, (key_heads, key_dim)
    of_token = of_keys, of_keys, (heads, value_dim), (heads,), (heads,)
    tensors = drawn(device, dtype, 3, *((chunk, *each) for each in of_token))
    tensors[3] = -tensors[3].float().abs() / 8
    tensors[4] = torch.sigmoid(tensors[4])
    pool = drawn(device, torch.float32, 4, (2, heads, key_dim, value_dim))[0]
    whole = delta(tensors, chunk, pool.clone(), device, monkeypatch)
    assert len(whole) == 5
    for token in TOKENS:
        for changed, length in variants(tensors, token, chunk):
            found = delta(changed, length, pool.clone(), device, monkeypatch)
            for what, rows in found.items():
                assert torch.equal(rows[: token + 1], whole[what][: token + 1]), (what, token, length)


@pytest.mark.skipif(INTERPRETED, reason="of the PyTorch versions")
@pytest.mark.parametrize("kind", ["mamba2", "delta"])
def test_decays_that_are_counted_from_the_end_of_a_chunk_are_noticed(kind, monkeypatch):
    forwards = torch.Tensor.cumsum

    def from_the_end(values, dim, out=None):
        sums = values.sum(dim, keepdim=True) - (forwards(values.flip(dim), dim).flip(dim) - values)
        return sums if out is None else out.copy_(sums)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=r"decays|outputs|against"):
        patch.setattr(torch, "cumsum", from_the_end)
        patch.setattr(torch.Tensor, "cumsum", from_the_end)
        if kind == "mamba2":
            test_a_row_of_mamba2_depends_on_no_later_row("one tile", torch.float32, "cpu")
        else:
            test_a_row_of_gated_delta_net_depends_on_no_later_row("one tile", torch.float32, "cpu", monkeypatch)


# -- prefills that leave chunks open, and decodes that go on --------------------------------------------------------------


def of_states(step, chunk=64):
    return step.slots_of_states(chunk) if step.is_open else step.slots[chunk]


class OfMamba2:
    """A layer of each kind as the test below needs it: its tokens, `prefill` and `decode`."""

    small, real = (4, 2, 16, 16, 64), (128, 8, 64, 128, 128)  # the second: of `hybrid-4b`

    def __init__(self, device, dtype, tokens, sizes=small, rings=4):
        heads, groups, headdim, d_state, self.chunk = sizes
        self.inputs = drawn(device, dtype, 5, (tokens, (heads * headdim + 2 * groups * d_state)), (tokens, heads))
        self.z = drawn(device, dtype, 6, (tokens, heads, headdim))[0]
        A = -torch.linspace(0.1, 4, heads, device=device)
        bias, D = drawn(device, torch.float32, 7, (heads,), (heads,))
        self.of_layer = {"A": A, "dt_bias": bias, "D": D}
        self.shape, self.widths = (heads, headdim, d_state), (heads * headdim, groups * d_state, groups * d_state)
        self.of_ring = [self.inputs[0][:, : -self.widths[2]], self.inputs[1]]
        self.rings = [x.new_full((rings, self.chunk, x.shape[1]), float("nan")) for x in self.of_ring]

    def prefill(self, rows, states, step):
        xBC, dt = (x[rows] for x in self.inputs)
        x, B, C = (
            x.unflatten(1, (-1, d))
            for x, d in zip(xBC.split(self.widths, 1), (*self.shape[1:], self.shape[2]), strict=True)
        )
        bounds, wrong = step.chunks[self.chunk].bounds, step.wrong
        y = scan_by_slots(
            states,
            bounds,
            x=x,
            dt=dt,
            B=B,
            C=C,
            z=self.z[rows],
            wrong=wrong,
            chunk_tokens=self.chunk,
            **self.of_layer,
            **of_states(step, self.chunk),
        )
        if step.is_open:
            step.leave_open(64, states, (self.rings[0], xBC[:, : -self.widths[2]]), (self.rings[1], dt))
        return y

    def decode(self, tokens, states, chunks):
        xBC, dt = (x[tokens] for x in self.inputs)
        rings = {"inputs": self.rings[0], "ring": self.rings[1]}
        return continue_scan(xBC, states, chunks, dt=dt, z=self.z[tokens], **rings, **self.of_layer)


class OfDelta:
    small, real = (1, 2, 16, 48), (16, 64, 128, 128)  # the second: of `gdn-4b`

    def __init__(self, device, dtype, tokens, sizes=small, rings=4):
        key_heads, heads, key_dim, value_dim = sizes
        of_keys = (tokens, key_heads, key_dim)
        self.inputs = drawn(device, dtype, 5, of_keys, of_keys, (tokens, heads, value_dim), *[(tokens, heads)] * 2)
        self.inputs[3], self.inputs[4] = -self.inputs[3].float().abs() / 8, torch.sigmoid(self.inputs[4])
        self.chunk, self.shape = 64, (heads, key_dim, value_dim)
        self.of_ring = self.inputs[1:]
        self.rings = [x.new_full((rings, 64, *x.shape[1:]), float("nan")) for x in self.of_ring]

    def prefill(self, rows, states, step):
        inputs = [x[rows] for x in self.inputs]
        bounds = {"chunk_bounds": step.chunks[64].bounds}
        y = scan_delta_rule(*inputs, states, normalise=True, **bounds, **of_states(step))
        if step.is_open:
            step.leave_open(64, states, *zip(self.rings, inputs[1:], strict=True))
        return y

    def decode(self, tokens, states, chunks):
        inputs = (x[tokens] for x in self.inputs)
        return continue_delta_rule(*inputs, states, chunks, rings=self.rings, normalise=True)


# Of each row: its tokens in the layer's inputs, where its prefill begins, where that ends and decodes begin, and its ring.
ROWS = [(0, 0, 40, 3), (200, 0, 126, 0), (400, 64, 128, 1)]
STEPS, BLOCK, SOURCE, KEPT = (3 if INTERPRETED else 70), 192, 6, 7  # a slot that a row starts from, and a checkpoint


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [OfMamba2, OfDelta])
@pytest.mark.parametrize("width", [1, 3])
def test_decodes_after_a_prefill_have_the_bits_of_one_prefill(width, kind, dtype, device, monkeypatch):
    """Outputs of each token, drafts that are not rejected among them, and the states at the ends of chunks. Rings begin as NaN."""
    if device == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    layer, grid = kind(device, dtype, 600), ChunkGrid(chunk_tokens=64, block_tokens=BLOCK)
    pool = drawn(device, torch.float32, 8, (8, *layer.shape))[0]
    pool[0:3] = float("nan")  # live slots
    sizes = {"quanta": [64], "block_tokens": BLOCK, "max_tokens": 600, "max_sequences": 4, "device": device}
    steps = {is_open: PrefillStep(**sizes, is_open=is_open) for is_open in (False, True)}

    def prefill(is_open, states, ends, **kept):
        spans = [
            PrefillSpan(start_tokens=start, tokens=end - start, source_slot=SOURCE, live_slot=live, ring=ring, **kept)
            for live, ((_, start, _, ring), end) in enumerate(zip(ROWS, ends, strict=True))
        ]
        tokens = [torch.arange(at + start, at + end) for (at, start, _, _), end in zip(ROWS, ends, strict=True)]
        step = steps[is_open]
        step.prepare(spans, tokens=sum(map(len, tokens)), sequences=4)
        step.copy()
        step.show()
        with invariant(True):
            return layer.prefill(torch.cat(tokens).to(device), states, step).split([*map(len, tokens)])

    lasts = [first + STEPS for _, _, first, _ in ROWS]
    whole = prefill(False, pool.clone(), lasts)
    found, states = prefill(True, pool, [first for _, _, first, _ in ROWS]), pool
    parts = [[each] for each in found]
    decodes = DecodeStep(1, max_requests=4, device=device, grids=[grid], step_tokens=width)
    rings, slots = np.array([row[3] for row in ROWS]), torch.tensor([0, 1, 2, -1], device=device)
    begins, dice = np.array([row[2] for row in ROWS], dtype=np.int32), np.random.default_rng(1)
    while (begins < lasts).any():
        decodes.prepare(rings, begins, np.full(3, width, np.int32), np.arange(3), decodes=3)
        decodes.copy()
        decodes.show(slots)
        accepted = 1 + np.minimum(dice.integers(0, width, 3), decodes.most_drafts[rings])
        accepted = np.minimum(accepted, np.array(lasts) - begins)
        ahead = np.arange(width)  # tokens of what is rejected are those of others
        tokens = np.array([[row[0] for row in ROWS]]).T + begins[:, None] + ahead + 7 * (ahead >= accepted[:, None])
        tokens = torch.tensor([*tokens.flatten() % 600, *[0] * width], device=device)
        with invariant(True):
            y = layer.decode(tokens, states, decodes.rows.chunks[64])
        for part, row, count in zip(parts, y.unflatten(0, (4, width)), accepted, strict=False):
            part.append(row[:count])
        begins = begins + accepted
    for part, expected in zip(parts, whole, strict=True):
        assert torch.equal(torch.cat(part), expected)
    ends = [int(grid.begin(last)) for last in lasts]
    at_ends = pool.clone()
    prefill(False, at_ends, ends)
    for live, (row, end) in enumerate(zip(ROWS, ends, strict=True)):
        assert torch.equal(states[live], at_ends[live] if end > row[1] else pool[SOURCE])


OF_KERNELS = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu(gib=8))]


@pytest.mark.parametrize("device", OF_KERNELS)
@pytest.mark.parametrize("kind", [OfMamba2, OfDelta])
def test_any_fill_alone_and_among_others(kind, device, monkeypatch):
    """One token of each row, of real sizes on a GPU, against a prefill of its chunk; and the states behind chunks that it fills."""
    if INTERPRETED:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    sizes, dtype = (kind.small, torch.float32) if INTERPRETED else (kind.real, torch.bfloat16)
    generator, chunk = np.random.default_rng(1), 64 if kind is OfDelta else sizes[4]
    counts = np.array([chunk, 1, *generator.integers(1, chunk + 1, 4 if INTERPRETED else 62)], np.int32)
    rows, starts = len(counts), np.cumsum(counts) - counts
    layer = kind(device, dtype, int(counts.sum()), sizes, rows)
    own, tokens = generator.permutation(rows), torch.tensor(starts + counts - 1, device=device)
    pool = drawn(device, torch.float32, 8, (2 * rows, *layer.shape))[0]
    step = PrefillStep(quanta=[chunk], block_tokens=384, max_tokens=9000, max_sequences=rows, device=device)
    spans = [
        PrefillSpan(start_tokens=0, tokens=int(count), source_slot=row, live_slot=rows + row)
        for row, count in enumerate(counts)
    ]
    step.prepare(spans, tokens=int(counts.sum()), sequences=rows)
    step.copy()
    step.show()
    whole = layer.prefill(slice(None), pool, step)[tokens]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for ring, inputs in zip(layer.rings, layer.of_ring, strict=True):
            ring[own[row], : count - 1] = inputs[start : start + count - 1]
    grid, before = ChunkGrid(chunk_tokens=chunk, block_tokens=384), pool.clone()
    decodes = DecodeStep(1, max_requests=rows, device=device, grids=[grid])
    for which in (np.arange(rows), *np.arange(rows)[:: 1 if INTERPRETED else 7, None], np.arange(rows)[::-1]):
        pool[:rows] = before[:rows]
        decodes.prepare(own[which], counts[which] - 1, np.ones_like(counts[which]), which, decodes=len(which))
        decodes.copy()
        decodes.show(torch.tensor(which.copy(), device=device))
        at = torch.tensor(which.copy(), device=device)
        assert torch.equal(layer.decode(tokens[at], pool, decodes.rows.chunks[chunk]), whole[at])
        full = torch.tensor(counts[which] == chunk, device=device)
        assert torch.equal(pool[at], torch.where(full[:, None, None, None], pool[rows:][at], before[at]))


class HalfGrid(ChunkGrid):
    def begin(self, position_tokens):
        return position_tokens - position_tokens % (self.chunk_tokens // 2)


@pytest.mark.parametrize("device", OF_KERNELS)
@pytest.mark.parametrize("kind", [OfMamba2, OfDelta])
@pytest.mark.parametrize("mutant", ["a chunk off the grid", "a sum in another order", "a state in bfloat16"])
def test_kernels_of_decodes_with_other_bits_are_noticed(mutant, kind, device, monkeypatch):
    decode, opened = kind.decode, DecodeStep._open

    def spoiled(self, tokens, states, chunks):
        if "state" in mutant:
            states.copy_(states.bfloat16())
        out = decode(self, tokens, states, chunks)
        return out + 2.0**12 - 2.0**12 if "order" in mutant else out

    def halved(self, grid, *given):
        opened(self, HalfGrid(chunk_tokens=grid.chunk_tokens, block_tokens=grid.block_tokens), *given)

    monkeypatch.setattr(kind, "decode", spoiled)
    if "grid" in mutant:
        monkeypatch.setattr(DecodeStep, "_open", halved)
    with pytest.raises(AssertionError, match="equal"):
        test_any_fill_alone_and_among_others(kind, device, monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("taps", [2, 4])
def test_a_convolution_of_one_token_after_another_has_the_bits_of_a_prefill(taps, dtype, device, monkeypatch):
    """The window is written at each token, and is then that of a prefill."""
    if device == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    dim, count = 40, 5 if INTERPRETED else 20
    inputs, window = drawn(device, dtype, 1, (count, dim), (1, dim, taps))
    weight, bias = drawn(device, dtype, 2, (dim, taps), (dim,))
    nowhere = torch.zeros(count, dtype=torch.int32, device=device)
    prefill = {"sources": nowhere, "starts": nowhere, "wrong": nowhere.clone()}
    whole, windows = convolve_from_slots(inputs, window, weight, bias, **prefill), window.clone()
    recent = torch.full((1, taps, dim), float("nan"), device=device, dtype=dtype)
    decodes, slots = DecodeStep(1, max_requests=1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    one = np.zeros(1, np.int64)
    for token in range(count):
        decodes.prepare(one, np.array([token], np.int32), one + 1, one, decodes=1)
        decodes.copy()
        decodes.show(slots)
        y = convolve_tokens(inputs[None, token : token + 1], windows, weight, bias, recent=recent, rows=decodes.rows)
        assert torch.equal(y[0, 0], whole[token])
        seen = torch.cat([window[0].T, inputs[:token]])[-taps:]
        assert torch.equal(windows[0], seen.T)
