"""A row of a chunk has the same bits whatever comes after it: other tokens, zeros, or nothing. Each kernel of a prefill.

So a decode may compute its row over the inputs that a chunk has so far. On the host the plain PyTorch versions run, on a GPU and with
TRITON_INTERPRET=1 the kernels.
"""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.ops import delta_rule, delta_rule_triton
from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule
from megatron_hybrid_prefix.ops.invariant.scope import invariant
from megatron_hybrid_prefix.ops.mamba_scan import chunk_decays, chunk_outputs, pass_states
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
