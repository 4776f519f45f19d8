"""The decode of a Mamba2 layer of `hybrid-4b` and a Gated DeltaNet layer of `gdn-4b`, against a copy of the states. On a GPU::

    python -m tests.gpu.decode_speed [--rows 1,8,32,64,128,256]

A line has the time of a layer: the update of the states alone, all of the decode between both projections, and megatron's
kernels, if it can be imported. "copy" moves as many bytes; "share" is the copy's time by that of the update, and of all. A CUDA
graph runs through several layers' states, so that none is in the L2 cache. First, outputs and states are compared with float64.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from megatron_hybrid_prefix.ops.delta_rule import update_delta_rule
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, update_states

HEADS, GROUPS, P, N, TAPS = 128, 8, 64, 128, 4
INNER, DIM = HEADS * P, HEADS * P + 2 * GROUPS * N
GDN = {"heads": 64, "key_heads": 16, "size": 128}
FLOOD = 400 * 2**20  # bytes of states that a graph runs through: several times the L2 cache
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def us_of(work: Callable[[int], object], layers: int) -> float:
    """Microseconds of ``work(layer)`` in a graph of all layers, the least of several."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            work(layer)
    found = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / layers)
    return min(found[2:])


@functools.cache
def megatrons_kernels() -> tuple[Any, Any] | None:
    """Of the convolution and the update; None without megatron."""
    try:
        from megatron_hybrid_prefix.upstream import modules

        folder = modules.CAUSAL_CONV1D.rpartition(".")[0]
        convolve = import_module(f"{folder}.causal_conv1d_triton").causal_conv1d_update
        return convolve, import_module(f"{modules.SSD_KERNELS}.mamba_ssm").selective_state_update
    except ImportError as error:
        print(f"without megatron's kernels: {error}", flush=True)
        return None


class Mamba2:
    """Inputs, weights and states of some layers."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.layers = max(2, min(24, FLOOD // (rows * INNER * N * dtype.itemsize)))
        self.inputs = rand(rows, 1, INNER + DIM + HEADS)
        self.states = rand(self.layers, rows, HEADS, P, N, dtype=dtype)
        self.windows = rand(self.layers, rows, DIM, TAPS)
        self.weight, self.bias, self.norm = rand(DIM, TAPS), rand(DIM), rand(INNER)
        self.heads = {"A": -torch.rand(HEADS, device="cuda") - 0.5, "D": rand(HEADS), "dt_bias": rand(HEADS)}
        self.slots = torch.randperm(rows, device="cuda")
        self.z, self.xBC, self.dt = self.inputs.split([INNER, DIM, HEADS], -1)
        self.convolved = self.convolve(0)

    def convolve(self, layer: int) -> torch.Tensor:
        return convolve_tokens(self.xBC, self.windows[layer], self.weight, self.bias, slots=self.slots)

    def update(self, layer: int, convolved: torch.Tensor | None = None) -> torch.Tensor:
        xBC = self.convolved if convolved is None else convolved
        return update_states(xBC, self.dt, self.states[layer], self.slots, **self.heads)

    def gated(self, y: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(y, self.norm, self.z, 1e-5, INNER // GROUPS, False)

    def all(self, layer: int) -> torch.Tensor:
        return self.gated(self.update(layer, self.convolve(layer)))

    def megatrons(self) -> Callable[[int], torch.Tensor] | None:
        """As its mixer calls its kernels."""
        kernels = megatrons_kernels()
        if kernels is None:
            return None
        convolve, update = kernels
        A = self.heads["A"].view(-1, 1, 1).expand(-1, P, N)

        def run(layer: int) -> torch.Tensor:
            slots, windows = self.slots, self.windows[layer]
            xBC = convolve(self.xBC, windows, self.weight, self.bias, "silu", conv_state_indices=slots)
            x, B, C = xBC.split([INNER, GROUPS * N, GROUPS * N], -1)
            y = update(
                self.states[layer],
                x.unflatten(-1, (HEADS, P)),
                self.dt.unsqueeze(-1).expand(-1, -1, -1, P),
                A,
                B.unflatten(-1, (GROUPS, N)),
                C.unflatten(-1, (GROUPS, N)),
                self.heads["D"].unsqueeze(1).expand(-1, P),
                dt_bias=self.heads["dt_bias"].unsqueeze(1).expand(-1, P),
                dt_softplus=True,
                state_batch_indices=slots,
            )
            return self.gated(y.flatten(-2))

        return run


class DeltaNet:
    """The same of the gated delta rule, whose update is one kernel."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        heads, key_heads, size = GDN.values()
        self.layers = max(2, min(24, FLOOD // (rows * heads * size * size * dtype.itemsize)))
        self.q, self.k, self.v = (rand(rows, 1, count, size) for count in (key_heads, key_heads, heads))
        self.gates = -torch.rand(rows, 1, heads, device="cuda"), torch.rand(rows, 1, heads, device="cuda").bfloat16()
        self.states = rand(self.layers, rows, heads, size, size, dtype=dtype, scale=0.1)
        self.slots = torch.randperm(rows, device="cuda")

    def update(self, layer: int) -> torch.Tensor:
        inputs = self.q, self.k, self.v, *self.gates, self.states[layer]
        return update_delta_rule(*inputs, self.slots, normalise=True)


def copy_us(states: torch.Tensor) -> float:
    target = torch.empty_like(states[0])
    return us_of(lambda layer: target.copy_(states[layer]), len(states))


def compare(dtype: torch.dtype) -> None:
    """Raises AssertionError if the kernels are further from float64 than the types round."""
    torch.manual_seed(0)
    mamba, delta = Mamba2(5, dtype), DeltaNet(5, dtype)
    mamba.slots[1] = delta.slots[1] = -1
    exact = {name: tensor.double() for name, tensor in mamba.heads.items()}
    windows, states = mamba.windows[1].clone(), mamba.states[1].double()
    given = mamba.xBC.double(), windows.clone().double(), mamba.weight.double(), mamba.bias.double()
    wanted = convolve_tokens(*given, slots=mamba.slots)
    convolved = mamba.convolve(1)
    near(convolved, wanted, torch.bfloat16)
    assert torch.equal(mamba.windows[1].double(), given[1])
    wanted = update_states(convolved.double(), mamba.dt.double(), states, mamba.slots, **exact)
    near(mamba.update(1, convolved), wanted, torch.bfloat16)
    near(mamba.states[1], states, dtype)
    states = delta.states[1].double()
    inputs = [x.double() for x in (delta.q, delta.k, delta.v, *delta.gates)]
    wanted = update_delta_rule(*inputs, states, delta.slots, normalise=True)
    near(delta.update(1), wanted, torch.bfloat16)
    near(delta.states[1], states, dtype)


def near(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - wanted).abs() - torch.finfo(dtype).eps / 2 * 1.01 * wanted.abs()
    assert error.max() <= 2e-5 * wanted.abs().max(), (
        f"off by {float(error.max()):.3g} of {float(wanted.abs().max()):.3g}"
    )


def cell(us: float | None) -> str:
    return f"{'-':>9}" if us is None else f"{us:9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,128,256")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, us of a layer", flush=True)
    for dtype in DTYPES.values():
        compare(dtype)
    titles = "copy", "update", "all", "megatron", "GB/s copy", "share", "of all", "speed-up"
    print(f"{'layer':15} {'state':5} {'rows':>4} " + " ".join(f"{title:>9}" for title in titles), flush=True)
    for rows in map(int, args.rows.split(",")):
        for name, dtype in DTYPES.items():
            made: Any
            for kind, made in (("Mamba2", Mamba2), ("Gated DeltaNet", DeltaNet)):
                layer = made(rows, dtype)
                copied, update = copy_us(layer.states), us_of(layer.update, layer.layers)
                whole = theirs = None
                if kind == "Mamba2":
                    whole, run = us_of(layer.all, layer.layers), layer.megatrons()
                    theirs = None if run is None else us_of(run, layer.layers)
                speed = 2 * layer.states[0].nbytes / copied / 1e3
                shares = copied / update, None if whole is None else copied / whole
                gain = None if theirs is None or whole is None else theirs / whole
                line = " ".join(map(cell, (copied, update, whole, theirs, speed)))
                line += "".join(f" {'-':>9}" if x is None else f" {x:9.2f}" for x in (*shares, gain))
                print(f"{kind:15} {name:5} {rows:4} {line}", flush=True)
                del layer


if __name__ == "__main__":
    main()
