"""The prefill kernels of the gated delta rule for many sizes of heads, a process for each, so that a fault hides no other one.

Usage: ``python -m tests.gpu.delta_rule_shapes [--jobs 12] [--out FOLDER]``, on a GPU.

For each pair of sizes, in float32 and bfloat16: outputs and states of random steps against float64 (`tests/kernels/test_delta_rule.py`),
from contiguous inputs and from slices of wider rows, with memory poisoned with NaN; and whether a resume on the grid has the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = ["bfloat16", "float32"] if ON_GPU else ["float32"]
SIZES = [(n, n) for n in (16, 32, 48, 64, 80, 96, 112, 128, 256)]
SIZES += [
    (16, 128),
    (128, 16),
    (48, 80),
    (80, 48),
    (256, 64),
    (64, 256),
    (112, 96),
    (32, 256),
    (256, 16),
    (128, 256),
    (96, 128),
]
SIZES += [(16, 48), (192, 128), (128, 192)]
EPSILON = 1e-6


def in_use(**given):
    from megatron_hybrid_prefix.ops.delta_rule_triton import scan_by_kernels

    return scan_by_kernels(**given, epsilon=EPSILON)


def sliced(scan):
    """The scan of q, k and v that are parts of wider rows; the rest is NaN."""

    def run(**given):
        parts = [given[name].flatten(1) for name in "qkv"]
        nan = parts[0].new_full((len(parts[0]), 64), float("nan"))
        wide = torch.cat([nan, *parts, nan], 1)
        views = wide[:, 64:].split([part.shape[1] for part in parts] + [64], 1)
        views = {name: view.unflatten(1, given[name].shape[1:]) for name, view in zip("qkv", views, strict=False)}
        return scan(**given | views)

    return run


def resumes(scan, dtype, key_size, value_size):
    """Whether a sequence that goes on from a kept multiple of 64 has the same bits as one that did not stop."""
    from tests.kernels.test_delta_rule import CHUNK, make

    tokens = 5 * CHUNK + 9
    args = make(tokens, 1, dtype=dtype, device=DEVICE, key_heads=1, heads=2, key_dim=key_size, value_dim=value_size)
    pool = torch.full((8, 2, key_size, value_size), float("nan"), device=DEVICE)
    pool[0] = 0

    def run(first, source, live, kept):
        ends = [min(CHUNK * n, tokens) - CHUNK * first for n in range(first, 7)]
        fields = {
            "first_chunks": [0, 6 - first],
            "source_slots": [source],
            "live_slots": [live],
            "chunk_slots": kept[first:],
        }
        return scan(
            **{name: x[CHUNK * first :] for name, x in args.items()},
            states=pool,
            normalise=True,
            chunk_bounds=torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            **{name: torch.tensor(value, device=DEVICE) for name, value in fields.items()},
        )

    whole, wrong = run(0, 0, 7, [1, 2, 3, 4, 5, -1]), []
    for first in range(1, 6):
        resumed = run(first, first, 6, [-1] * 6)
        if not (torch.equal(resumed, whole[CHUNK * first :]) and torch.equal(pool[6], pool[7])):
            wrong.append(first)
    return wrong


def far_slots(scan):
    """Slots more than 2**31 elements apart give the same bits as near ones."""
    from tests.kernels.test_delta_rule import make

    heads, size, tokens, far = 2, 128, 100, 2**30 + 16
    args = make(tokens, 1, dtype=torch.bfloat16, device=DEVICE, heads=heads, key_dim=size, value_dim=size)
    fields = {"first_chunks": [0, 2], "source_slots": [3], "live_slots": [2], "chunk_slots": [1, -1]}
    fields = {name: torch.tensor(value, device=DEVICE) for name, value in fields.items()}
    bounds = torch.tensor([0, 64, 100], dtype=torch.int32, device=DEVICE)
    start, got = torch.randn(heads, size, size, device=DEVICE), []
    for stride in (heads * size * size, far):
        pool = torch.empty_strided((4, heads, size, size), (stride, size * size, size, 1), device=DEVICE)
        pool[3] = start
        y = scan(**args, states=pool, normalise=True, chunk_bounds=bounds, **fields)
        got.append((y, pool[2].clone(), pool[1].clone()))
    return all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def say(*words):
    print(*words, flush=True)


def check(args):
    """All checks of one pair of sizes, in this process."""
    from tests.kernels import test_delta_rule as tests

    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
    key_size, value_size = args.size
    seen = []

    def within(got, expected, allowed):
        ratio = (got.double().cpu() - expected).abs() / allowed
        bad = ~(ratio <= 1)
        where = ""
        if bad.any():
            dims = [sorted(set(index.tolist())) for index in bad.nonzero(as_tuple=True)]
            where = f" of {tuple(got.shape)} at " + " ".join(f"{d[0]}-{d[-1]}({len(d)})" for d in dims)
        seen.append((float(ratio.nan_to_num(float("inf")).max()), f"{int(bad.sum())} wrong{where}"))

    tests.within = within
    counts = [(1, 2), (3, 3)] if key_size <= 64 else [(1, 1), (2, 4)]
    counts += [(4, 8)] if args.size == (128, 128) else []
    for dtype in args.types:
        kind = getattr(torch, dtype)
        sizes = {"key_dim": key_size, "value_dim": value_size}
        forms = {"plain": (in_use, 1), "sliced": (sliced(in_use), 3)}
        for (key_heads, heads), (form, (run, seed)) in zip(
            counts, [*forms.items(), ("plain", (in_use, 0))], strict=False
        ):
            del seen[:]
            started = time.perf_counter()
            try:
                tests.check_scan(seed, dtype=kind, device=DEVICE, scan=run, key_heads=key_heads, heads=heads, **sizes)
                ratio = max(seen)[0]
                line = f"{'ok' if ratio <= 1 else 'WRONG'} {ratio:.3g} {'; '.join(s[1] for s in seen if s[0] > 1)}"
            except Exception as error:
                line = f"FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:400]
            took = time.perf_counter() - started
            say(
                f"{key_size}x{value_size} | {dtype} | {key_heads}/{heads} heads | {form}, seed {seed} | {line} | {took:.1f} s"
            )
        try:
            wrong = resumes(in_use, kind, key_size, value_size)
            line = f"WRONG after {wrong} chunks" if wrong else "ok"
        except Exception as error:
            line = f"FAILED {type(error).__name__}"
        say(f"{key_size}x{value_size} | {dtype} | same bits after a resume | {line}")
        if args.far:
            say(f"{key_size}x{value_size} | {dtype} | far slots | {'ok' if far_slots(in_use) else 'WRONG'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=lambda text: tuple(map(int, text.split("x"))), help="one pair, in this process")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--far", action="store_true")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.size:
        with torch.no_grad():
            check(args)
        return
    started, lines = time.perf_counter(), []

    by_size = sorted(SIZES, key=lambda s: -s[0] * s[1])
    work = [(size, dtype) for dtype in TYPES for size in by_size]
    if ON_GPU:  # float32 of large heads takes longest to compile
        full = [
            (256, 256),
            (128, 128),
            (256, 64),
            (80, 48),
            (48, 48),
            (16, 48),
            (16, 128),
            (64, 64),
            (32, 32),
            (16, 16),
        ]
        work = [(size, "float32") for size in full[:3]] + [(size, "bfloat16") for size in by_size]
        work += [(size, "float32") for size in full[3:]]
    work = [(size, dtype) for size, dtype in work if dtype in args.types]

    def one(item):
        size, dtype = item
        left = args.limit_s - (time.perf_counter() - started)
        if left < 5:
            return [f"{size} {dtype}: no time"]
        command = [
            sys.executable,
            "-m",
            "tests.gpu.delta_rule_shapes",
            "--size",
            f"{size[0]}x{size[1]}",
            "--types",
            dtype,
        ]
        command += ["--far"] if size == (128, 128) and dtype == "bfloat16" and ON_GPU else []
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            out, err = process.communicate(timeout=left)
            ended = f"exit {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            ended = "no time"
        own = out.splitlines()
        if ended != "exit 0":
            own.append(f"{size} {dtype}: {ended}; {' / '.join(err.strip().splitlines()[-3:])[:400]}")
        for line in own:
            say(f"[{time.perf_counter() - started:4.0f} s] {line}")
        lines.extend(own)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "delta_rule_shapes.json").write_text(json.dumps(lines, indent=1))
        return own

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, work))
    bad = [line for line in lines if "| ok" not in line]
    say(f"{len(lines)} lines, {len(bad)} not ok")
    for line in bad:
        say("  ", line)


if __name__ == "__main__":
    main()
