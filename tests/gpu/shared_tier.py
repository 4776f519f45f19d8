"""First tokens with a shared folder: a cold prompt with and without it, and a hit after a restart.

Usage: ``python -m tests.gpu.shared_tier [--preset hybrid-4b] [--tokens 8192] [--prompts 6] [--folder DIR] [--out DIR]
[--graphs]``.

The first process sends cold prompts to an engine without caching, to one with the cache, to one with a host tier, and
to one with the host tier and the folder, in turns. The next one is the restart: each prompt goes on where the first
process stopped. Its entries are in the page cache for half of the prompts (all files are read before), and were dropped
from it (posix_fadvise) for the others; a folder in memory has no others.

A first token's time is that of its step, on the host, with the device synchronised. The milestones say how far the
engine was when: milliseconds since the request was sent, medians. To try the script: ``--preset tiny --device cpu
--tokens 600 --prompts 2``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform
from tests.gpu.measure import BLOCK_TOKENS, FirstTokens, engine_fields, graph_fields, milestones_table, save
from tests.harness.engine_helpers import random_tokens, state_bytes
from tests.harness.named_models import named

CACHED_PROMPTS, OWN_TOKENS, SPARE = 6, 300, 3  # SPARE prompts of each kind warm up
HOST_GB = {"cuda": 3.0, "cpu": 0.1}
SECRET = "a secret of this measurement only"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=6, help="measured prompts of each kind")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs; takes a minute per engine")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default a temporary one")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--part", choices=("first", "restart"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Run:
    """Engines around one model, and prompts for them."""

    def __init__(self, args):
        self.args, self.config = args, named(args.preset)
        self.device = ensure_platform(device=args.device).device.type
        self.model = None
        self.send = FirstTokens().send
        args.folder.mkdir(parents=True, exist_ok=True)
        self.in_memory = args.folder.resolve().is_relative_to("/dev/shm")
        self.prompts = SPARE + args.prompts * (1 if self.in_memory else 2)

    def engine(self, *, cached=True, host=False, shared=False):
        """An engine, with its own model if CUDA graphs are tied to its modules."""
        of_model, of_engine = graph_fields(self.args.graphs)
        if self.model is None or of_model:
            self.model = build_hybrid_model(self.config, seed=0, **of_model)
        prefix = None
        if cached:
            tier = {"host_gb": HOST_GB[self.device]} if host or shared else {}
            tier |= {"shared": f"file://{self.args.folder}?gb=64&min_tokens={BLOCK_TOKENS}&wait_s=20"} if shared else {}
            prefix = HybridPrefixConfig(mamba_gb=24.5 * state_bytes(self.model) / 2**30, **tier)
        fields = engine_fields(self.model, self.args.tokens + 2 * OWN_TOKENS, prompts=CACHED_PROMPTS)
        return build_engine(self.model, prefix, **fields, **of_engine)

    def prompt(self, seed, *, goes_on):
        """A prompt; or what follows it up to the last full block, with other tokens after it."""
        tokens = random_tokens(self.args.tokens + OWN_TOKENS, seed=seed, vocabulary=self.config.vocab_size)
        if not goes_on:
            return tokens
        kept = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        return tokens[:kept] + random_tokens(OWN_TOKENS, seed=10_000 + seed, vocabulary=self.config.vocab_size)


def first(args):
    """Cold prompts."""
    run = Run(args)
    engines = {
        "off": run.engine(cached=False),
        "cache": run.engine(),
        "cache, host": run.engine(host=True),
        "cache, host, folder": run.engine(shared=True),
    }
    print("engines are built", flush=True)
    times, milestones, stored = (defaultdict(list) for _ in range(3))
    for number in range(run.prompts):
        for name in sorted(engines, key=lambda name: (number + len(name)) % 4):
            moves = getattr(engines[name].context, "host_moves", None)
            before = 0 if moves is None else moves.arena.stores.bytes
            ms, found, _ = run.send(engines[name], run.prompt(number, goes_on=False), 4)
            if moves is not None:
                moves.launch()
                moves.finish()
                assert moves.drain(60), "the entries were not written"
            if number >= SPARE:
                times[name].append(ms)
                milestones[name].append(found)
                stored[name].append(0 if moves is None else moves.arena.stores.bytes - before)
        print(f"cold prompt {number}: {', '.join(f'{n} {t[-1]:.1f}' for n, t in times.items())} ms", flush=True)
    tier = engines["cache, host, folder"].context.prefix_stats().as_dict()["tiers"]["shared"]
    return {"times": times, "milestones": milestones, "stored_bytes": stored, "tier": tier}


def drop_from_memory(folder):
    """Ask the kernel to forget the folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def bring_to_memory(folder):
    """Read the folder's files: the page cache has them afterwards, whatever was dropped before."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def restart(args):
    """Hits on what the first process computed."""
    run = Run(args)
    engine, off = run.engine(shared=True), run.engine(cached=False)
    print("engines are built", flush=True)
    times, milestones, waited, differences = (*(defaultdict(list) for _ in range(3)), [])
    arena_loads = engine.context.host_moves.arena.loads.queue
    for number in range(run.prompts):
        from_disk = number >= SPARE and number % 2 and not run.in_memory
        kind = f"from {'disk' if from_disk else 'memory'}"
        assert engine.context.host_moves.drain(60), "the entries were not written"  # no file comes or goes
        (drop_from_memory if from_disk else bring_to_memory)(args.folder)
        prompt = run.prompt(number, goes_on=True)
        before, moved = engine.context.prefix_stats(), arena_loads.seconds()
        found = {kind: run.send(engine, prompt, 4)}
        after, moved_after = engine.context.prefix_stats(), arena_loads.seconds()
        found["on the device"] = run.send(engine, [*prompt[:-1], prompt[-1] ^ 1], 4)
        found["cold"] = run.send(off, prompt, 4)
        found["short cold"] = run.send(off, prompt[-OWN_TOKENS:], 4)
        hit, cold = found[kind][-1], found["cold"][-1]
        assert hit.num_cached_tokens == len(prompt) - OWN_TOKENS, (hit.num_cached_tokens, after.fallbacks)
        assert after.fallbacks == before.fallbacks, after.fallbacks
        pairs = zip(hit.generated_log_probs, cold.generated_log_probs, strict=True)
        same = hit.generated_tokens == cold.generated_tokens
        differences.append(max(abs(one - other) for one, other in pairs) if same else None)
        if number >= SPARE:
            for name, (ms, reached, _) in found.items():
                times[name].append(ms)
                milestones[name].append(reached)
            tiers = after.tiers["shared"], before.tiers["shared"]
            seconds = (tiers[0].seconds_waited - tiers[1].seconds_waited, *map(float.__sub__, moved_after, moved))
            waited[kind].append([each * 1e3 for each in seconds])
        print(f"hit {number}: {', '.join(f'{name} {each[0]:.1f}' for name, each in found.items())} ms", flush=True)
    tier = engine.context.prefix_stats().as_dict()["tiers"]["shared"]
    result = {"times": times, "milestones": milestones, "waited": waited, "log_prob_differences": differences}
    return result | {"mb": tier["bytes_loaded"] / run.prompts / 1e6, "tier": tier}


def print_cold(found):
    """Tables of the first process."""
    median = {name: statistics.median(times) for name, times in found["times"].items()}
    print("\n| a cold prompt's first token, ms | median | over the cache alone | over the host tier | MB to the host |")
    print("|---|---|---|---|---|")
    for name, ms in median.items():
        over = [f"{ms / median[other]:.3f}" for other in ("cache", "cache, host")]
        megabytes = statistics.median(found["stored_bytes"][name]) / 1e6
        print(f"| {name} | {ms:.2f} | {' | '.join(over)} | {megabytes:.0f} |")
    for name in ("cache", "cache, host", "cache, host, folder"):
        print(f"\ncold, {name}:", *milestones_table(found["milestones"][name]), sep="\n")


def print_restart(found):
    """Tables of a restart."""
    median = {name: statistics.median(times) for name, times in found["times"].items()}
    print(f"\n| after the restart, {found['mb']:.0f} MB | median, ms | over cold | waits |\n|---|---|---|---|")
    for name, ms in median.items():
        waits = ""
        if name in found["waited"]:
            wait, load, model = (statistics.median(each) for each in zip(*found["waited"][name], strict=True))
            waits = f"{wait:.1f} for reads, {load:.1f} loads, {model:.1f} the model for them"
        print(f"| {name} | {ms:.2f} | {ms / median['cold']:.3f} | {waits} |")
    for name in [*found["waited"], "short cold"]:
        print(f"\n{name}:", *milestones_table(found["milestones"][name]), sep="\n")
    print(f"\nlog-probs of hits and cold prompts differ by {found['log_prob_differences']} (None: another token)")
    print(f"tier: {json.dumps(found['tier'])}", flush=True)


def main():
    args = parse()
    if args.part is not None:
        save(args.out, f"shared_tier_{args.part}", {"first": first, "restart": restart}[args.part](args))
        os._exit(0)  # as if killed: nothing is tidied up
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary) / "entries"
        command = [sys.executable, "-m", "tests.gpu.shared_tier", *(["--graphs"] if args.graphs else [])]
        for name in ("preset", "tokens", "prompts", "device", "folder", "out"):
            command += [] if getattr(args, name) is None else [f"--{name}", str(getattr(args, name))]
        for part, show in (("first", print_cold), ("restart", print_restart)):
            start_s = time.perf_counter()
            subprocess.run([*command, "--part", part], check=True, env=os.environ | {"HYBRID_PREFIX_SECRET": SECRET})
            print(f"{part}: {time.perf_counter() - start_s:.0f} s", flush=True)
            show(json.loads((args.out / f"shared_tier_{part}.json").read_text()))
        disk = (
            subprocess.run(["df", "-hT", args.folder], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
        )
    print(f"{args.preset}, {args.tokens} + {OWN_TOKENS} tokens, graphs: {args.graphs}, {disk}")


if __name__ == "__main__":
    main()
