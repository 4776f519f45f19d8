"""Time of the gated delta rule's kernels: a prefill beside fla's, a decode beside megatron's Mamba2.

Usage: ``python -m tests.gpu.delta_rule_speed [--repeats N] [--out FOLDER]``, on a GPU. fla (``fla-core``) is left out
where it is not installed.

GPU times are sums over kernels, taken by the profiler: the median of rounds in which what is compared takes turns.
Decodes are replayed from CUDA graphs, with states that do not fit the cache of the GPU. Without a GPU,
``TRITON_INTERPRET=1`` and ``--tokens 128 --key-heads 1 --heads 2 --size 16`` try the script.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import torch

from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, scan_by_kernels, update_by_kernel
from tests.gpu.measure import COLD_BYTES, DEVICE, ON_GPU, graph_us, kernel_us, save

TYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter knows no bfloat16
EPSILON = 1e-6
BATCHES = (1, 8, 64, 256) if ON_GPU else (2,)
ROUNDS, CALLS = (5, 5) if ON_GPU else (1, 1)


class Prefill:
    """A sequence cut into chunks: ours, from and to slots, and fla's on the same inputs."""

    def __init__(self, tokens, key_heads, heads, size, kept=0):
        g = torch.Generator().manual_seed(tokens)

        def rand(*shape):
            return torch.randn(*shape, generator=g)

        made = {"q": rand(tokens, key_heads, size), "k": rand(tokens, key_heads, size), "v": rand(tokens, heads, size)}
        made["beta"] = torch.sigmoid(rand(tokens, heads))
        self.inputs = {name: x.to(TYPE).to(DEVICE) for name, x in made.items()}
        self.inputs["log_decay"] = (-0.05 * torch.rand(tokens, heads, generator=g)).to(DEVICE)
        self.pool = (0.1 * rand(2 + kept, heads, size, size)).to(DEVICE)
        bounds = [*range(0, tokens, CHUNK), tokens]
        chunks = len(bounds) - 1
        chunk_slots = [-1] * chunks
        for number in range(kept):
            chunk_slots[(number + 1) * chunks // (kept + 1)] = 2 + number
        slots = {"first_chunks": [0, chunks], "source_slots": [0], "live_slots": [1], "chunk_slots": chunk_slots}
        self.fields = {name: torch.tensor(value, device=DEVICE) for name, value in slots.items()}
        self.fields["chunk_bounds"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)

    def ours(self):
        return scan_by_kernels(**self.inputs, states=self.pool, normalise=True, epsilon=EPSILON, **self.fields)

    def fla(self):
        """Its function without arguments; or None."""
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        except ImportError:
            return None
        names = {"q": "q", "k": "k", "v": "v", "log_decay": "g", "beta": "beta"}
        inputs = {names[name]: x[None] for name, x in self.inputs.items()}
        options = {"initial_state": self.pool[:1], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return lambda: chunk_gated_delta_rule(**inputs, **options)


def measure_prefill(args):
    """{ours, ours keeping four states, fla: us of each kernel}."""
    shape = (args.tokens, args.key_heads, args.heads, args.size)
    plain = Prefill(*shape)
    calls = {"ours": plain.ours, "ours, four states kept": Prefill(*shape, kept=4).ours}
    if (fla := plain.fla()) is not None:
        calls["fla"] = fla
    found = {}
    for _ in range(args.repeats):
        for call in calls.values():
            for _ in range(3):
                call()
        seen = defaultdict(list)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                seen[name].append(kernel_us(call, CALLS))
        for name, each in seen.items():
            found[name] = {kernel: statistics.median(us.get(kernel, 0.0) for us in each) for kernel in each[0]}
        totals = {name: statistics.median(sum(us.values()) for us in each) for name, each in seen.items()}
        for name, us in found.items():
            print(*(f"{name} | {kernel[:60]} | {time:.1f}" for kernel, time in us.items()), sep="\n")
        for name, total in totals.items():
            over = ", ".join(f"{total / totals[other]:.3f} of {other}" for other in totals if other != name)
            print(f"{name}: {total:.1f} us, {over}", flush=True)
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
        inputs = (self.q, self.k, self.v, self.log_decay, self.beta)
        for slots in self.slots:
            update_by_kernel(*inputs, self.states, slots, normalise=True, epsilon=EPSILON, after=None)

    def mamba2(self):
        """Megatron's decode of a Mamba2 layer of the same heads and state."""
        from megatron.core.ssm.ops.mamba_ssm import selective_state_update

        rows, _, heads, size = self.v.shape
        x, b, c = self.v[:, 0], self.k[:, 0, :8].contiguous(), self.q[:, 0, :8].contiguous()  # 8 groups
        dt = torch.rand(rows, heads, device=DEVICE).bfloat16()[..., None].expand(-1, -1, size)
        a = -torch.rand(heads, device=DEVICE)[:, None, None].expand(-1, size, size)
        ones = torch.ones(heads, device=DEVICE)[:, None].expand(-1, size)
        options = {"z": None, "dt_bias": ones, "dt_softplus": True}

        def run():
            for slots in self.slots:
                selective_state_update(self.states, x, dt, a, b, c, ones, state_batch_indices=slots, **options)

        return run


def measure_decode(args):
    """{rows: {ours, mamba2: us}}."""
    found = {}
    for rows in BATCHES:
        decode = Decode(rows, args.key_heads, args.heads, args.size)
        found[rows] = {"ours": graph_us(decode.ours, decode.sets)}
        said = ""
        if ON_GPU:
            found[rows]["mamba2"] = graph_us(decode.mamba2(), decode.sets)
            said = f", Mamba2 {found[rows]['mamba2']:.1f}: {found[rows]['ours'] / found[rows]['mamba2']:.3f} of it"
        print(f"decode of {rows}: {found[rows]['ours']:.1f} us{said}", flush=True)
    return found


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1, help="of the prefill")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="writes delta_rule_speed.json there")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="of keys and values")
    args = parser.parse_args()
    found = {"device": torch.cuda.get_device_name() if ON_GPU else "interpreter", "torch": torch.__version__}
    found |= {"prefill": measure_prefill(args), "decode": measure_decode(args)}
    save(args.out, "delta_rule_speed", found)


if __name__ == "__main__":
    main()
