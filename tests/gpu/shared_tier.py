"""First tokens with a shared folder: a cold prompt with and without it, and a hit after a restart, from memory and from disk.

Usage: ``python -m tests.gpu.shared_tier [--preset hybrid-4b] [--tokens 8192] [--prompts 6] [--folder DIR] [--out DIR]``.

The first process sends cold prompts to an engine without caching, to one with the cache, and to one with the cache and the
folder, in turns. The second one is the restart: each prompt goes on where the first process stopped. Its entries are in the
page cache for half of the prompts, and were dropped from it (posix_fadvise) for the others. Times are those of a step, on
the host, with the device synchronised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BLOCK, OWN_TOKENS, SPARE = 256, 300, 3  # SPARE prompts of each kind warm up
SECRET = "a secret of this measurement only"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=6, help="measured prompts of each kind")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs; takes a minute per engine")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default a temporary one")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--part", choices=("first", "restart"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Run:
    """Engines around one model, and times of first tokens."""

    def __init__(self, args):
        from megatron_hybrid_prefix.models import get_preset
        from megatron_hybrid_prefix.platform import ensure_platform

        self.args = args
        self.platform = ensure_platform(device=args.device)
        self.vocabulary = get_preset(args.preset).vocab_size
        self.model = None
        self.next_id = 0

    def engine(self, *, cached, shared):
        """An engine, with its own model if CUDA graphs are tied to its modules."""
        from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
        from megatron_hybrid_prefix.models import build_hybrid_model
        from tests.harness.engine_helpers import kv_budget, state_bytes

        on_gpu = self.platform.device.type == "cuda"
        if self.model is None or self.args.graphs:
            graphs = {"cuda_graph_impl": "local"} if self.args.graphs else {}
            self.model = build_hybrid_model(self.args.preset, seed=0, **graphs)
        model = self.model
        tokens, prefix = self.args.tokens + 2 * OWN_TOKENS, None
        blocks = 6 * (tokens // BLOCK + 2)
        if cached:
            url = f"file://{self.args.folder}?gb=64&min_tokens={BLOCK}&threads={self.args.threads}&wait_s=20"
            tier = {"host_gb": 3.0 if on_gpu else 0.1, "shared": url} if shared else {}
            prefix = HybridPrefixConfig(mamba_gb=24.5 * state_bytes(model) / 2**30, **tier)
        return build_engine(
            model,
            prefix,
            max_sequence_length=tokens + BLOCK,
            max_requests=4,
            max_tokens=(tokens // 64 + 1) * 64,
            block_size_tokens=BLOCK,
            **({"num_cuda_graphs": 8} if self.args.graphs else {}),
            **kv_budget(model, blocks, block_tokens=BLOCK, max_requests=4),
        )

    def prompt(self, seed, *, goes_on):
        """A prompt; or what follows it up to the last full block, with other tokens after it."""
        from tests.harness.engine_helpers import random_tokens

        tokens = random_tokens(self.args.tokens + OWN_TOKENS, seed=seed, vocabulary=self.vocabulary)
        if not goes_on:
            return tokens
        kept = len(tokens) // BLOCK * BLOCK
        return tokens[:kept] + random_tokens(OWN_TOKENS, seed=10_000 + seed, vocabulary=self.vocabulary)

    def send(self, engine, prompt, count=4):
        """Milliseconds to the first token, and the finished request."""
        import torch

        from tests.harness.engine_helpers import greedy, run_to_end

        self.next_id += 1
        finished = {}
        self._wait()
        start = time.perf_counter()
        with torch.inference_mode():
            engine.add_request(self.next_id, prompt, greedy(count))
            run_to_end(engine, finished, steps=1)
            self._wait()
            ms = (time.perf_counter() - start) * 1e3
            run_to_end(engine, finished)
        return ms, finished[self.next_id]

    def _wait(self):
        if self.platform.device.type == "cuda":
            import torch

            torch.cuda.synchronize()


def first(args):
    """Cold prompts."""
    run = Run(args)
    engines = {
        "off": run.engine(cached=False, shared=False),
        "cache": run.engine(cached=True, shared=False),
        "shared": run.engine(cached=True, shared=True),
    }
    print("engines are built", flush=True)
    times = {name: [] for name in engines}
    moves = engines["shared"].context.host_moves
    for number in range(SPARE + 2 * args.prompts):
        for name in sorted(engines, key=lambda name: (number + len(name)) % 3):
            ms, _ = run.send(engines[name], run.prompt(number, goes_on=False))
            if name == "shared":
                moves.launch()
                assert moves.drain(60), "the entries were not written"
            if number >= SPARE:
                times[name].append(ms)
        print(f"cold prompt {number}: {', '.join(f'{n} {t[-1]:.1f}' for n, t in times.items() if t)} ms", flush=True)
    return {"times": times, "tier": engines["shared"].context.prefix_stats().as_dict()["tiers"]["shared"]}


def drop_from_memory(folder):
    """Ask the kernel to forget the folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def rates(folder):
    """Gigabytes per second of this machine: a copy in memory, and reads of the folder's files from the page cache."""
    import torch

    paths = [path for path in folder.rglob("kv-*") if path.is_file()][:64]
    size = paths[0].stat().st_size
    one, other = (torch.ones(len(paths) * size, dtype=torch.uint8) for _ in range(2))
    view, found, blocked = memoryview(one.numpy()), {}, []

    def timed(name, work):
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        found[name] = round(len(paths) * size / best / 1e9, 1)

    def read(first, step, flags):
        for at in range(first, len(paths), step):
            file = os.open(paths[at], os.O_RDONLY)
            try:
                os.preadv(file, [view[at * size : (at + 1) * size]], 0, flags)
            except OSError as error:
                blocked.append(error.errno)
            os.close(file)

    def side_by_side(threads, flags):
        running = [threading.Thread(target=read, args=(number, threads, flags)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    timed("copy", lambda: one.copy_(other))
    for threads in (1, 4, 16):
        timed(f"read, {threads} threads", lambda threads=threads: side_by_side(threads, 0))
    timed("read what is in memory, 4 threads", lambda: side_by_side(4, os.RWF_NOWAIT))
    return found | {"errors": sorted(set(blocked)), "load average": os.getloadavg()[0]}


def restart(args):
    """Hits on what the first process computed."""
    run = Run(args)
    engine, off = run.engine(cached=True, shared=True), run.engine(cached=False, shared=False)
    print("engines are built", flush=True)
    times = {name: [] for name in ("cold", "from memory", "from disk", "on the device", "short cold")}
    waited, differences = {"from memory": [], "from disk": []}, []
    for number in range(SPARE + 2 * args.prompts):
        kind = "from disk" if number >= SPARE and number % 2 else "from memory"
        if kind == "from disk":
            drop_from_memory(args.folder)
        prompt = run.prompt(number, goes_on=True)
        before = engine.context.prefix_stats()
        found = {kind: run.send(engine, prompt)}
        after = engine.context.prefix_stats()
        found["on the device"] = run.send(engine, [*prompt[:-1], prompt[-1] ^ 1])
        found["cold"] = run.send(off, prompt)
        found["short cold"] = run.send(off, prompt[-OWN_TOKENS:])
        hit, cold = found[kind][1], found["cold"][1]
        assert hit.num_cached_tokens == len(prompt) - OWN_TOKENS, (hit.num_cached_tokens, after.fallbacks)
        assert after.fallbacks == before.fallbacks, after.fallbacks
        pairs = zip(hit.generated_log_probs, cold.generated_log_probs, strict=True)
        same = hit.generated_tokens == cold.generated_tokens
        differences.append(max(abs(one - other) for one, other in pairs) if same else None)
        if number >= SPARE:
            for name, (ms, _) in found.items():
                times[name].append(ms)
            tiers = after.tiers["shared"], before.tiers["shared"]
            waited[kind].append((tiers[0].seconds_waited - tiers[1].seconds_waited) * 1e3)
        print(f"hit {number} {kind}: {', '.join(f'{n} {ms:.1f}' for n, (ms, _) in found.items())} ms", flush=True)
    tier = engine.context.prefix_stats().as_dict()["tiers"]["shared"]
    result = {"times": times, "waited": waited, "log_prob_differences": differences, "tier": tier}
    return result | {"gigabytes_per_second": rates(args.folder)}


def main():
    args = parse()
    if args.part is not None:
        result = {"first": first, "restart": restart}[args.part](args)
        (args.out / f"shared_tier_{args.part}.json").write_text(json.dumps(result))
        os._exit(0)  # as if killed: nothing is tidied up
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "entries"
        options = {"preset": args.preset, "tokens": args.tokens, "prompts": args.prompts, "device": args.device}
        options |= {"threads": args.threads, "folder": folder, "out": args.out}
        command = [sys.executable, "-m", "tests.gpu.shared_tier", *(["--graphs"] if args.graphs else [])]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        found = {}
        for part in ("first", "restart"):
            start = time.perf_counter()
            subprocess.run([*command, "--part", part], check=True, env=os.environ | {"HYBRID_PREFIX_SECRET": SECRET})
            found[part] = json.loads((args.out / f"shared_tier_{part}.json").read_text())
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        disk = subprocess.run(["df", "-hT", folder], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    median = {name: statistics.median(times) for name, times in found["first"]["times"].items()}
    again = {name: statistics.median(times) for name, times in found["restart"]["times"].items()}
    waited = {name: statistics.median(times) for name, times in found["restart"]["waited"].items()}
    entry_bytes = found["restart"]["tier"]["bytes_loaded"] / (SPARE + 2 * args.prompts)
    print(
        f"\n{args.preset}, {args.tokens} + {OWN_TOKENS} tokens, {args.threads} threads, {entry_bytes / 1e6:.0f} MB a load, {disk}"
    )
    print("| first token, ms | median | over |")
    print("|---|---|---|")
    for name, ms in median.items():
        print(f"| cold prompt, {name} | {ms:.2f} | {ms / median['cache']:.3f} of the cache without the folder |")
    for name, ms in again.items():
        rate = (
            f", {waited[name]:.1f} ms of it reading, {entry_bytes / waited[name] / 1e6:.1f} GB/s"
            if name in waited
            else ""
        )
        print(f"| after the restart: {name}{rate} | {ms:.2f} | {ms / again['cold']:.3f} of cold |")
    print(
        f"log-probs of hits and cold prompts differ by {found['restart']['log_prob_differences']} (None: another token)"
    )
    print(f"this machine, GB/s: {found['restart']['gigabytes_per_second']}")
    print(json.dumps({"first": found["first"]["tier"], "restart": found["restart"]["tier"]}))


if __name__ == "__main__":
    main()
