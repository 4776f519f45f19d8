"""Kernels of a decode with rings (a layer of `hybrid-4b`, and of `gdn-4b`), beside a copy of as many bytes. On a GPU::

    python -m tests.gpu.ring_kernels [--rows 8,32,64,256] [--rings 16,32,64] [--tiles "" "_WARPS=4;_BYTES=8192"]

Rows are at random phases: one in R of a step flushes. A CUDA graph runs through several layers' states, so that none is in the L2 cache.
``--tiles`` sets constants of a kernel's module, for one run each. First, outputs and states are compared with float64.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from unittest.mock import patch

import torch

from megatron_hybrid_prefix.layers.components import ring_entries
from megatron_hybrid_prefix.ops import delta_rule_triton, mamba_decode
from megatron_hybrid_prefix.ops.delta_rule import update_delta_rule
from megatron_hybrid_prefix.ops.rings import RingRows

HEADS, GROUPS, P, N, TAPS = 128, 8, 64, 128, 4
INNER, DIM = HEADS * P, HEADS * P + 2 * GROUPS * N
FLOOD = 400 * 2**20  # bytes of states that a graph runs through: several times the L2 cache
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


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


class Kernel:
    """Rows of some layers at random phases. A subclass has a state's shape, its kernel as ``update`` and that one's module."""

    module: ModuleType
    shape: tuple[int, ...]
    update: Callable[..., torch.Tensor]
    near = 2e-5  # of the largest

    def __init__(self, rows: int, R: int, dtype: torch.dtype) -> None:
        size = rows * math.prod(self.shape) * dtype.itemsize
        self.layers, self.entries = max(2, min(24, FLOOD // size)), ring_entries(R, 1)
        self.states = rand(self.layers, rows, *self.shape, dtype=dtype)
        self.phases, slots = torch.randint(R, (self.layers, rows), device="cuda"), torch.randperm(rows, device="cuda")
        ends = torch.full_like(self.phases, 4 * R).int()
        fields = zip(ends + self.phases.int(), ends - R * (self.phases == 0).int(), ends, strict=True)
        self.rows = [RingRows(slots, slots.flip(0), *each, torch.full_like(slots, -1)) for each in fields]
        flushed = (self.phases == 0).double().mean().item()
        self.step_bytes = (1 + flushed) * size + rows * self.entry_bytes * (
            1 + R * flushed + self.phases.double().mean().item()
        )

    def run(self, layer: int) -> torch.Tensor:
        return type(self).update(rows=self.rows[layer], **self.arguments(layer))


class Mamba2(Kernel):
    """Of `hybrid-4b`."""

    module, shape, update = mamba_decode, (HEADS, P, N), mamba_decode.update_states
    entry_bytes = 2 * (INNER + GROUPS * N) + 8 * HEADS

    def __init__(self, rows: int, R: int, dtype: torch.dtype) -> None:
        super().__init__(rows, R, dtype)
        self.fixed = {"xBC": rand(rows, 1, DIM), "dt": rand(rows, 1, DIM + HEADS)[..., DIM:], "D": rand(HEADS)}
        self.fixed |= {"A": -torch.rand(HEADS, device="cuda") - 0.5, "dt_bias": rand(HEADS)}
        self.inputs = rand(self.layers, rows, self.entries, INNER + GROUPS * N)
        self.steps = torch.rand(self.layers, rows, self.entries, 2, HEADS, device="cuda") * torch.tensor(
            [[1], [-1]], device="cuda"
        )

    def arguments(self, layer: int) -> dict[str, torch.Tensor]:
        return self.fixed | {name: getattr(self, name)[layer] for name in ("states", "inputs", "steps")}


class DeltaNet(Kernel):
    """Of `gdn-4b`."""

    module, shape, near = delta_rule_triton, (64, 128, 128), 2.0**-9  # what a token writes is rounded before it is used
    update = functools.partial(update_delta_rule, normalise=True)

    def __init__(self, rows: int, R: int, dtype: torch.dtype) -> None:
        self.entry_bytes = 2 * 16 * 128 + 64 * (128 * dtype.itemsize + 4)
        super().__init__(rows, R, dtype)
        self.fixed = {"q": rand(rows, 1, 16, 128), "k": rand(rows, 1, 16, 128), "v": rand(rows, 1, 64, 128)}
        self.fixed |= {"log_decay": -torch.rand(rows, 1, 64, device="cuda"), "beta": rand(rows, 1, 64).sigmoid()}
        rings = self.layers, rows, self.entries
        self.keys, self.written = rand(*rings, 16, 128), rand(*rings, 64, 128, dtype=dtype)
        self.decays = -torch.rand(*rings, 64, device="cuda") / R

    def arguments(self, layer: int) -> dict[str, torch.Tensor]:
        return self.fixed | {name: getattr(self, name)[layer] for name in ("states", "keys", "written", "decays")}


KERNELS = [Mamba2, DeltaNet]


def check(kind: type[Kernel], R: int, dtype: torch.dtype) -> None:
    """Raises AssertionError if outputs or states are further from float64 than types round."""
    kernel = kind(5, R, dtype)
    rows = kernel.rows[1]
    rows.slots[1], rows.positions[:2], rows.origins[:2] = -1, 4 * R, 3 * R
    exact = {name: tensor.double() for name, tensor in kernel.arguments(1).items()}
    got = kernel.run(1)
    kind.update(rows=rows, **exact)
    after = exact | {"states": kernel.states[1].double()}  # which a step reads rounded
    for found, of in (
        (got, kind.update(rows=rows._replace(origins=rows.ends), **after)),
        (kernel.states[1], exact["states"]),
    ):
        error = (found.double() - of).abs() - 1.01 * torch.finfo(found.dtype).eps / 2 * of.abs()
        assert error.max() <= kind.near * of.abs().max(), f"{kind.__name__}, R {R}: off by {error.max():.3g}"


def copy_us(nbytes: float) -> float:
    """Of a copy that reads and writes so many bytes in all."""
    half = int(nbytes) // 32 * 16
    layers = max(2, FLOOD // half)
    source, target = torch.empty(2, layers, half, dtype=torch.uint8, device="cuda")
    return us_of(lambda layer: target[layer].copy_(source[layer]), layers)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def table(kind: type[Kernel], tiles: str, of_rows: list[int], of_rings: list[int]) -> None:
    print(f"{kind.__name__} {tiles}\nstate   R rows       us  copy us     GB/s  of copy", flush=True)
    for (name, dtype), R in itertools.product(DTYPES.items(), of_rings):
        check(kind, R, dtype)
        for rows in of_rows:
            kernel = kind(rows, R, dtype)
            us, nbytes = us_of(kernel.run, kernel.layers), kernel.step_bytes
            del kernel
            copied = copy_us(nbytes)
            rate = nbytes / us / 1e3
            print(f"{name} {R:4} {rows:4} {us:8.1f} {copied:8.1f} {rate:8.0f} {copied / us:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, default=[8, 32, 64, 256])
    parser.add_argument("--rings", type=numbers, default=[16, 32, 64])
    parser.add_argument("--tiles", nargs="*", default=[""])
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    for kind, tiles in itertools.product(KERNELS, args.tiles):
        with ExitStack() as changed:
            for name, _, value in (word.partition("=") for word in tiles.split(";") if word):
                changed.enter_context(patch.object(kind.module, name, ast.literal_eval(value)))
            table(kind, tiles, args.rows, args.rings)


if __name__ == "__main__":
    main()
