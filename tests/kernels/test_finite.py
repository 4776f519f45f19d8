"""One token that is not finite, or huge: earlier tokens, other sequences and earlier states keep their bits, and the token is marked."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.layers.step import ChunkGrid, Chunks
from megatron_hybrid_prefix.ops.convolution import convolve_from_slots
from megatron_hybrid_prefix.ops.delta_gates import gates
from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule
from megatron_hybrid_prefix.ops.elementwise import replace_wrong_logits, zero_wrong_rows
from megatron_hybrid_prefix.ops.mamba_scan import chunk_decays, scan_by_slots
from tests.kernels.places import DEVICES, INTERPRETED, NAN

INF = float("inf")
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
VALUES = [NAN, 1e38] if INTERPRETED else [NAN, INF, -INF, 1e38, -3e38]
CHUNK = 64
LENGTHS = (70, 150) if INTERPRETED else (100, 300)  # of two sequences
FIRST, SECOND = LENGTHS
TOKENS = FIRST + SECOND
# Places in the second sequence: its first token, before and after the end of a chunk, and its last token.
PLACES = [CHUNK - 1, CHUNK + 5] if INTERPRETED else [0, CHUNK - 1, CHUNK, CHUNK + 20, SECOND - 1]
HEADS, HEADDIM, STATE = 2, 16, 32
GDN_HEADS, K, V = 2, 32, 48


def cut() -> Chunks:
    """The chunks of both sequences, each with a slot for its state but the last of each."""
    grid, bounds, first = ChunkGrid(chunk_tokens=CHUNK, block_tokens=CHUNK), [0], [0]
    for start, length in zip((0, FIRST), LENGTHS, strict=True):
        bounds += [start + end for end in grid.ends(0, length)]
        first.append(len(bounds) - 1)
    slots = [-1 if chunk + 1 in first else 2 + chunk for chunk in range(first[-1])]
    return Chunks(first=torch.tensor(first), slots=torch.tensor(slots), bounds=torch.tensor(bounds, dtype=torch.int32))


class Scan:
    """A layer's convolution, gates and scan over two sequences, and all that they return."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        chunks = cut()
        self.chunks = Chunks(**{name: getattr(chunks, name).to(device) for name in Chunks.__slots__})
        self.slots = {
            "first_chunks": self.chunks.first,
            "source_slots": torch.tensor([0, 1], device=device),
            "live_slots": torch.tensor([0, 1], device=device),
            "chunk_slots": self.chunks.slots,
        }
        starts = torch.tensor([0] * FIRST + [FIRST] * SECOND, dtype=torch.int32)
        self.per_token = {"sources": (starts > 0).int().to(device), "starts": starts.to(device)}
        self.generator = torch.Generator().manual_seed(3)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def convolve(self, rows: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1]
        self.generator.manual_seed(5)
        windows, weight = (self.rand(*shape).to(self.device, self.dtype) for shape in ((2, width, 4), (width, 4)))
        return convolve_from_slots(rows, windows, weight, None, **self.per_token, wrong=wrong)

    def states(self, *shape: int) -> torch.Tensor:
        self.generator.manual_seed(6)
        return self.rand(int(self.chunks.slots.max()) + 1, *shape).to(self.device)


class Mamba2(Scan):
    wide = HEADS * HEADDIM + 2 * STATE  # of what is convolved
    narrow = HEADS  # of what is not

    def run(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = rows.to(self.device, self.dtype)
        wrong = torch.zeros(TOKENS, dtype=torch.int32, device=self.device)
        convolved, dt = self.convolve(rows[:, : self.wide], wrong), rows[:, self.wide :]
        x, B, C = convolved.split([HEADS * HEADDIM, STATE, STATE], -1)
        states = self.states(HEADS, HEADDIM, STATE)
        x, B, C = x.unflatten(1, (HEADS, HEADDIM)), B.unflatten(1, (1, STATE)), C.unflatten(1, (1, STATE))
        A, zeros = torch.tensor([-1.0, -0.2], device=self.device), torch.zeros(HEADS, device=self.device)
        inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": zeros + 1, "z": None, "dt_bias": zeros}
        inputs |= {"chunk_tokens": CHUNK, "wrong": wrong}
        return scan_by_slots(states, self.chunks.bounds, **inputs, **self.slots), states, wrong


class GatedDeltaNet(Scan):
    wide = GDN_HEADS * (2 * K + V)
    narrow = 2 * GDN_HEADS

    def run(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = rows.to(self.device, self.dtype)
        wrong = torch.zeros(TOKENS, dtype=torch.int32, device=self.device)
        convolved, gate = self.convolve(rows[:, : self.wide], wrong), rows[:, self.wide :]
        q, k, v = convolved.split([GDN_HEADS * K, GDN_HEADS * K, GDN_HEADS * V], -1)
        zeros = torch.zeros(GDN_HEADS, device=self.device)
        decay, beta = gates(*gate.split([GDN_HEADS, GDN_HEADS], -1), zeros, zeros, wrong)
        states = self.states(GDN_HEADS, K, V)
        shapes = ((GDN_HEADS, K), (GDN_HEADS, K), (GDN_HEADS, V))
        q, k, v = (part.unflatten(1, shape) for part, shape in zip((q, k, v), shapes, strict=True))
        y = scan_delta_rule(q, k, v, decay, beta, states, normalise=True, chunk_bounds=self.chunks.bounds, **self.slots)
        return y, states, wrong


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_that_is_not_finite_marks_no_token_behind_the_chunk(device):
    marks, dt = torch.zeros(2 * CHUNK, dtype=torch.int32, device=device), torch.zeros(5, HEADS, device=device)
    rates = torch.full((HEADS,), float("nan"), device=device)
    chunk_decays(dt, rates, rates, bounds=torch.tensor([0, 5], device=device), wrong=marks[:5], chunk_tokens=CHUNK)
    assert marks.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [Mamba2, GatedDeltaNet])
def test_a_scan_is_causal_for_all_values(kind, dtype, device):
    scan = kind(device, dtype)
    rows = 0.3 * scan.rand(TOKENS, kind.wide + kind.narrow)
    y, states, wrong = scan.run(rows)
    assert not wrong.any() and y.isfinite().all()
    bounds, slots = scan.chunks.bounds.tolist(), scan.chunks.slots.tolist()
    parts = (slice(None), slice(0, 1), slice(kind.wide - 1, kind.wide), slice(kind.wide, None))
    for number, place in enumerate(PLACES):
        for value in VALUES[number::2] if INTERPRETED else VALUES:
            for part in parts[:: 3 if INTERPRETED else 1]:
                case, spoilt, at = (place, value, part), rows.clone(), FIRST + place
                spoilt[at, part] = value
                other, kept, marked = scan.run(spoilt)
                assert torch.equal(other[:at], y[:at]), case
                right = [slot for slot, end in zip(slots, bounds[1:], strict=True) if slot >= 0 and end <= at]
                assert torch.equal(kept[[0, *right]], states[[0, *right]]), case
                assert not marked[:at].any(), case
                finite_gate = part.start == kind.wide and (value == -INF or abs(value) < INF)
                assert marked.any() or finite_gate or kept.isfinite().all(), case
                if value != value:
                    assert marked[at], case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_keys_and_values(dtype, device):
    tokens = torch.randn(9, 2, 3, 20, generator=torch.Generator().manual_seed(0)).to(device, dtype)  # strided rows
    key, value = (tokens[:, part].unsqueeze(1) for part in range(2))
    key[2, 0, 1, 3], value[2, 0, 0, 0], value[5, 0, 2, 19], key[7, 0, 0, 0] = NAN, INF, -INF, 3e38
    before, wrong = tokens.clone(), torch.zeros(12, dtype=torch.int32, device=device)
    zero_wrong_rows([key, value], wrong)
    assert wrong.nonzero()[:, 0].tolist() == [2, 5]
    before[2], before[5, 1] = 0, 0
    assert torch.equal(tokens, before)
    zero_wrong_rows([key[:0], value[:0]], wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gathered", [False, True])
def test_rows_of_logits(gathered, device):
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 4999], logits[2, 0], logits[3, 7], logits[4], logits[5, 1:] = NAN, INF, -INF, -INF, -INF
    logits[6, [3, 4500]] = torch.tensor([NAN, INF], device=device)
    before = logits.clone()
    rows = torch.tensor([7, 6, 5, 2, 0, 4], device=device) if gathered else None
    looked_at = [7, 6, 5, 2] if gathered else [0, 1, 2, 3, 4]
    found = replace_wrong_logits(logits, rows, len(looked_at))
    wrong = [row for row in looked_at if row in (1, 2, 4, 6)]
    assert [row for row, bad in zip(looked_at, found.tolist(), strict=True) if bad] == wrong
    before[wrong] = 0
    assert torch.equal(logits.nan_to_num(5.0), before.nan_to_num(5.0))
    assert replace_wrong_logits(logits, None, 0).tolist() == []
