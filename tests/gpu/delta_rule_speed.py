"""Time of the gated delta rule's kernels: a prefill against fla's, a decode against megatron's Mamba2.

Usage: ``python -m tests.gpu.delta_rule_speed [--repeats N] [--out FOLDER]``, on a GPU. fla (``fla-core``) and
megatron are left out where they are not installed.

GPU times are sums over kernels, taken by the profiler: the median of rounds in which what is compared takes turns. Decodes
are replayed from CUDA graphs, with states that do not fit the cache of the GPU. Errors are against float64: a root of a
mean square over that of the exact values.

Without a GPU, ``TRITON_INTERPRET=1`` and small ``--tokens`` and ``--size`` run the same code, to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, scan_by_kernels, update_by_kernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter knows no bfloat16
EPSILON = 1e-6
BATCHES = (1, 8, 64, 256)
COLD_BYTES = 200 << 20  # of states between two uses of one


class Prefill:
    """Sequences of given lengths, each cut into chunks: ours, from and to slots, and fla's on the same inputs."""

    def __init__(self, lengths, key_heads, heads, size, kept=0, keys=None):
        tokens, dtype = sum(lengths), TYPE
        g = torch.Generator().manual_seed(tokens)

        def rand(*shape):
            return torch.randn(*shape, generator=g)

        self.lengths, self.size = lengths, size
        made = {"q": rand(tokens, key_heads, size), "k": rand(tokens, key_heads, size), "v": rand(tokens, heads, size)}
        if (
            keys is not None
        ):  # few different ones: what is written for one is soon overwritten, and products of keys are 1
            made["k"] = made["k"][torch.randint(keys, (tokens,), generator=g)]
        made = {name: x.to(dtype).to(DEVICE) for name, x in made.items()}
        made["log_decay"] = (-0.05 * torch.rand(tokens, heads, generator=g)).to(DEVICE)
        made["beta"] = torch.sigmoid(rand(tokens, heads)).to(dtype).to(DEVICE)
        self.inputs = made
        self.pool = (0.1 * rand(1 + len(lengths) + kept, heads, size, size)).to(DEVICE)
        bounds, first = [0], [0]
        for length in lengths:
            end = bounds[-1] + length
            while bounds[-1] < end:
                bounds.append(min(bounds[-1] + CHUNK, end))
            first.append(len(bounds) - 1)
        chunk_slots = [-1] * (len(bounds) - 1)
        for number in range(kept):
            chunk_slots[(number + 1) * len(chunk_slots) // (kept + 1)] = 1 + len(lengths) + number
        self.fields = {
            name: torch.tensor(values, dtype=torch.int32 if name == "chunk_bounds" else torch.int64, device=DEVICE)
            for name, values in {
                "chunk_bounds": bounds,
                "first_chunks": first,
                "source_slots": [0] * len(lengths),
                "live_slots": range(1, 1 + len(lengths)),
                "chunk_slots": chunk_slots,
            }.items()
        }

    def ours(self):
        return scan_by_kernels(**self.inputs, states=self.pool, normalise=True, epsilon=EPSILON, **self.fields)

    def exact(self):
        """Outputs and live states in float64."""
        pool = self.pool.double()
        inputs = {name: x.double() for name, x in self.inputs.items()}
        outputs = scan_delta_rule(**inputs, states=pool, normalise=True, **self.fields)
        return outputs, pool[1 : 1 + len(self.lengths)]

    def live(self):
        return self.pool[1 : 1 + len(self.lengths)]

    def fla(self):
        """Its function without arguments, which returns outputs and states; or None."""
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        except ImportError:
            return None
        names = {"q": "q", "k": "k", "v": "v", "log_decay": "g", "beta": "beta"}
        inputs = {names[name]: x[None] for name, x in self.inputs.items()}
        ends = None
        if len(self.lengths) > 1:
            ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int64, device=DEVICE)
        start = self.pool[:1].expand(len(self.lengths), -1, -1, -1).contiguous()

        def run():
            y, state = chunk_gated_delta_rule(
                **inputs,
                initial_state=start,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=ends,
            )
            return y[0], state

        return run


def kernel_times(call, calls=5):
    """Microseconds of each kernel in one call: {name: time}."""
    if not ON_GPU:
        start = time.perf_counter()
        call()
        return {"(interpreted)": (time.perf_counter() - start) * 1e6}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times = defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name.split("(")[0]] += event.time_range.elapsed_us() / calls
    return dict(times)


def in_turns(calls, rounds=5):
    """{name: median time of each kernel}, and {name: median of totals}."""
    for call in calls.values():
        for _ in range(3 if ON_GPU else 0):
            call()
    seen = defaultdict(list)
    for _ in range(rounds if ON_GPU else 1):
        for name, call in calls.items():
            seen[name].append(kernel_times(call))
    by_kernel = {
        name: {kernel: statistics.median(times.get(kernel, 0.0) for times in each) for kernel in each[0]}
        for name, each in seen.items()
    }
    return by_kernel, {name: statistics.median(sum(times.values()) for times in each) for name, each in seen.items()}


def time_us(call, calls=20):
    """Time of one call among several, by CUDA events."""
    if not ON_GPU:
        return kernel_times(call)["(interpreted)"]
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def off(got, exact):
    """Root mean square of the error, over that of what is exact."""
    return float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def show(*columns):
    print(" | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in columns), flush=True)


def measure_prefill(args):
    """By kernel, in total, keeping four states or none, errors; then other shapes in total."""
    shape = (args.key_heads, args.heads, args.size)
    plain, keeping = Prefill([args.tokens], *shape), Prefill([args.tokens], *shape, kept=4)
    calls = {"ours": plain.ours, "ours, four states kept": keeping.ours}
    fla = plain.fla()
    if fla is not None:
        calls["fla"] = fla
    for _ in range(args.repeats):
        by_kernel, totals = in_turns(calls)
        for name, times in by_kernel.items():
            for kernel, us in sorted(times.items(), key=lambda item: -item[1]):
                show(name, kernel[:60], us)
            show(name, "total us", totals[name], *([totals[name] / totals["fla"]] if fla is not None else []))
    errors = {}
    for keys, prefill in {"random keys": plain, "8 different keys": Prefill([args.tokens], *shape, keys=8)}.items():
        outputs, states = prefill.exact()
        got = {"ours": lambda prefill=prefill: (prefill.ours(), prefill.live())}
        if fla is not None:
            got["fla"] = prefill.fla()
        for name, call in got.items():
            y, state = call()
            errors[f"{name}, {keys}"] = off(y, outputs), off(state, states)
            show(f"error of {name}, {keys}: outputs, states", *errors[f"{name}, {keys}"])
    found = {"by_kernel_us": by_kernel, "total_us": totals, "errors": errors}
    found["four kept over none"] = totals["ours, four states kept"] / totals["ours"]
    show("four states kept over none", found["four kept over none"])
    if fla is not None:
        found["over fla"] = totals["ours"] / totals["fla"]
        found["four kept over fla"] = totals["ours, four states kept"] / totals["fla"]
        show("ours over fla; four states kept over fla", found["over fla"], found["four kept over fla"])
    found["shapes"] = {}
    if args.tokens >= 1024:
        lengths = {"1 x 300": [300], "16 x 512": [512] * 16, "64 x 100": [100] * 64, "1 x 16384": [16384]}
        cases = {name: Prefill(each, *shape) for name, each in lengths.items()}
        # fla tunes its kernels for each number of heads, which takes minutes.
        quarter = Prefill([args.tokens], args.key_heads // 4, args.heads // 4, args.size)
        for name, prefill in (cases | {"a quarter of the heads": quarter}).items():
            calls = {"ours": prefill.ours}
            if fla is not None and prefill is not quarter:
                calls["fla"] = prefill.fla()
            _, found["shapes"][name] = in_turns(calls, rounds=3)
            show(name, *(f"{which} {us:.0f} us" for which, us in found["shapes"][name].items()))
    return found


class Decode:
    """One token of each row, over and over: each call has states of other slots."""

    def __init__(self, rows, key_heads, heads, size):
        g = torch.Generator().manual_seed(rows)
        self.sets = max(2, -(-COLD_BYTES // (rows * heads * size * size * 4))) if ON_GPU else 2

        def rand(*shape, dtype=TYPE):
            return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)

        self.q, self.k = rand(rows, 1, key_heads, size), rand(rows, 1, key_heads, size)
        self.v, self.beta = rand(rows, 1, heads, size), rand(rows, 1, heads).sigmoid()
        self.log_decay = -rand(rows, 1, heads, dtype=torch.float32).abs()
        self.states = torch.zeros(self.sets * rows, heads, size, size, device=DEVICE)
        self.slots = torch.randperm(self.sets * rows, generator=g).view(self.sets, rows).to(DEVICE)

    def ours(self):
        for slots in self.slots:
            update_by_kernel(
                self.q,
                self.k,
                self.v,
                self.log_decay,
                self.beta,
                self.states,
                slots,
                normalise=True,
                epsilon=EPSILON,
                after=None,
            )

    def mamba2(self):
        """Megatron's decode of a Mamba2 layer of the same heads and state; or None."""
        try:
            from megatron.core.ssm.ops.mamba_ssm import selective_state_update
        except ImportError:
            return None
        rows, _, heads, size = self.v.shape
        x, b, c = self.v[:, 0], self.k[:, 0, :8].contiguous(), self.q[:, 0, :8].contiguous()  # 8 groups
        dt = torch.rand(rows, heads, device=DEVICE).bfloat16()[..., None].expand(-1, -1, size)
        a = -torch.rand(heads, device=DEVICE)[:, None, None].expand(-1, size, size)
        ones = torch.ones(heads, device=DEVICE)[:, None].expand(-1, size)

        def run():
            for slots in self.slots:
                selective_state_update(
                    self.states, x, dt, a, b, c, ones, z=None, dt_bias=ones, dt_softplus=True, state_batch_indices=slots
                )

        return run

    def us(self, call, rounds=5):
        """Time of one step: all sets of slots in a CUDA graph."""
        if not ON_GPU:
            return time_us(call) / self.sets
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return statistics.median(time_us(graph.replay, 5) for _ in range(rounds)) / self.sets


def measure_decode(args):
    """{rows: {ours, Mamba2, ratio}}."""
    found = {}
    for rows in BATCHES if ON_GPU else (2,):
        decode = Decode(rows, args.key_heads, args.heads, args.size)
        found[rows] = {"ours": decode.us(decode.ours)}
        theirs = decode.mamba2() if ON_GPU else None
        if theirs is not None:
            found[rows]["mamba2"] = decode.us(theirs)
            found[rows]["ratio"] = found[rows]["ours"] / found[rows]["mamba2"]
        show(f"decode of {rows}, us", *(f"{name} {us:.3g}" for name, us in found[rows].items()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1, help="of the first measurement")
    parser.add_argument("--no-decode", action="store_true", help="prefills only")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="writes delta_rule_speed.json there")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="of keys and values")
    args = parser.parse_args()
    found = {"device": torch.cuda.get_device_name() if ON_GPU else "interpreter", "torch": torch.__version__}

    def save(name, result):
        found[name] = result
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "delta_rule_speed.json").write_text(json.dumps(found, indent=1))

    with torch.no_grad():
        save("prefill", measure_prefill(args))
        if not args.no_decode:
            save("decode", measure_decode(args))


if __name__ == "__main__":
    main()
