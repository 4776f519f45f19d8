"""First tokens with a shared folder: a cold prompt with and without it, and a hit after a restart, from memory and from disk.

Usage: ``python -m tests.gpu.shared_tier [--preset hybrid-4b] [--tokens 8192] [--prompts 6] [--folder DIR] [--out DIR]
[--graphs] [--threads 8 16] [--groups 32 48 1000]``.

The first process sends cold prompts to an engine without caching, to one with the cache, to one with a host tier, and to one with
the host tier and the folder, in turns. The next one is the restart: each prompt goes on where the first process stopped. Its
entries are in the page cache for half of the prompts (all files are read before), and were dropped from it (posix_fadvise) for the
others; a folder in memory has no others. There is one restart for each of ``--threads``; ``--groups`` (MiB, `GROUP_BYTES` of
``tiers/tier_moves.py``) take turns.

A first token's time is that of its step, on the host, with the device synchronised. The milestones say how far the engine was when:
milliseconds since the request was sent, medians.
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

from megatron_hybrid_prefix.tiers.file import FolderSettings
from megatron_hybrid_prefix.tiers.tier_moves import GROUP_BYTES

BLOCK, OWN_TOKENS, SPARE = 256, 300, 3  # SPARE prompts of each kind warm up
SECRET = "a secret of this measurement only"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=6, help="measured prompts of each kind and group")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[FolderSettings(folder=Path(), budget_bytes=0).threads]
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[GROUP_BYTES // 2**20])
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs; takes a minute per engine")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default a temporary one")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--part", choices=("first", "restart"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Milestones:
    """When the parts of a step were reached, in milliseconds since `start`; on any thread."""

    def __init__(self):
        from megatron_hybrid_prefix.cache import HybridPrefixCache
        from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
        from megatron_hybrid_prefix.mcore.context.decode import DecodedStates
        from megatron_hybrid_prefix.mcore.context.request import RequestLoads
        from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
        from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
        from megatron_hybrid_prefix.mcore.state.moves import HostMoves
        from megatron_hybrid_prefix.tiers import file
        from megatron_hybrid_prefix.tiers.jobs import TierThreads
        from megatron_hybrid_prefix.tiers.loads import LoadCopies
        from megatron_hybrid_prefix.tiers.stores import StoreCopies
        from megatron_hybrid_prefix.upstream.context import ContextSeam

        self._first, self._last, self._spent = {}, {}, {}
        self.start()
        for owner, name, label in (
            (RequestLoads, "load_back", "lookup"),
            (HostMoves, "start_load", "start"),
            (TierThreads, "read", "begin to read"),
            (file, "read_file", "read"),
            (LoadCopies, "run", "load launch"),
            (StoreCopies, "run", "store launch"),
            (StoreCopies, "send", "store launch: copies after the forward"),
            (HostMoves, "fetch", "wait"),
            (HybridPrefixContext, "prefix_request", "keys"),
            (HybridPrefixContext, "add_request", "admission"),
            (HybridPrefixCache, "admit", "admission: the cache"),
            (ContextSeam, "add_admitted", "admission: megatron"),
            (HybridPrefixCache, "plan", "admission: the plan"),
            (HybridPrefixContext, "initialize_attention_state", "metadata and preparation"),
            (HybridPrefixContext, "zero_live_states", "stores and zeros"),
            (HybridPrefixContext, "transfer_bookkeeping_to_gpu", "preparation"),
            (HybridPrefixCache, "publish", "publication"),
            (HybridPrefixContext, "forward_launched", "beside the forward"),
            (HybridPrefixContext, "update_requests", "bookkeeping"),
            (HybridPrefixContext, "release_memory_blocks_from_request_indexes", "bookkeeping: release"),
            (DecodedStates, "follow", "bookkeeping: decode"),
            (HybridPrefixController, "tokens_sampled", "sampled"),
            (HybridPrefixEngine, "post_process_requests", "answers"),
            (HostMoves, "launch", "launches of copies"),
            (file.FileTier, "look", "look of the thread"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def start(self):
        """A request is about to be sent."""
        for each in (self._first, self._last, self._spent):
            each.clear()
        self._start = time.perf_counter()

    def _timed(self, work, label):
        def timed(*args, **options):
            begin = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                end = time.perf_counter()
                self._first.setdefault(label, (begin - self._start) * 1e3)
                self._last[label] = (end - self._start) * 1e3
                self._spent[label] = self._spent.get(label, 0.0) + (end - begin) * 1e3

        return timed

    def found(self):
        """Label: (the first began, the last ended, all took)."""
        return {label: (self._first[label], self._last[label], self._spent[label]) for label in list(self._last)}


def milestones_table(found):
    """Lines of a table from what `Milestones.found` returned for several requests."""
    labels = sorted(
        {label for one in found for label in one}, key=lambda label: min(o[label] for o in found if label in o)
    )
    yield "| | the first begins | the last ends | all take, ms | requests |"
    yield "|---|---|---|---|---|"
    for label in labels:
        cells = [statistics.median(each) for each in zip(*(one[label] for one in found if label in one), strict=True)]
        yield f"| {label} | {' | '.join(f'{ms:.2f}' for ms in cells)} | {sum(label in one for one in found)} |"


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
        self.milestones = Milestones()
        args.folder.mkdir(parents=True, exist_ok=True)
        self.in_memory = args.folder.resolve().is_relative_to("/dev/shm")
        self.prompts = args.prompts * len(args.groups) * (1 if self.in_memory else 2)

    def engine(self, *, cached=True, host=False, shared=False):
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
            url = f"file://{self.args.folder}?gb=64&min_tokens={BLOCK}&threads={self.args.threads[0]}&wait_s=20"
            tier = {"host_gb": 3.0 if on_gpu else 0.1} if host or shared else {}
            tier |= {"shared": url} if shared else {}
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
        own_seed = 10_000 * self.args.threads[0] + seed  # another one in each restart: hits are written, too
        return tokens[:kept] + random_tokens(OWN_TOKENS, seed=own_seed, vocabulary=self.vocabulary)

    def send(self, engine, prompt, count=4):
        """Milliseconds to the first token, milestones, and the finished request."""
        import torch

        from tests.harness.engine_helpers import greedy, run_to_end

        self.next_id += 1
        finished = {}
        self._wait()
        self.milestones.start()
        start = time.perf_counter()
        with torch.inference_mode():
            engine.add_request(self.next_id, prompt, greedy(count))
            run_to_end(engine, finished, steps=1)
            step_ms = (time.perf_counter() - start) * 1e3
            self._wait()
            ms = (time.perf_counter() - start) * 1e3
            milestones = self.milestones.found() | {"step": (0.0, step_ms, step_ms), "device": (0.0, ms, ms)}
            run_to_end(engine, finished)
        return ms, milestones, finished[self.next_id]

    def _wait(self):
        if self.platform.device.type == "cuda":
            import torch

            torch.cuda.synchronize()


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
    times, milestones, stored = ({name: [] for name in engines} for _ in range(3))
    for number in range(SPARE + run.prompts):
        for name in sorted(engines, key=lambda name: (number + len(name)) % 4):
            moves = getattr(engines[name].context, "host_moves", None)
            before = 0 if moves is None else moves.arena.stores.bytes
            ms, found, _ = run.send(engines[name], run.prompt(number, goes_on=False))
            if moves is not None:
                moves.launch()
                moves.finish()
                assert moves.drain(60), "the entries were not written"
            if number >= SPARE:
                times[name].append(ms)
                milestones[name].append(found)
                stored[name].append(0 if moves is None else moves.arena.stores.bytes - before)
        print(f"cold prompt {number}: {', '.join(f'{n} {t[-1]:.1f}' for n, t in times.items() if t)} ms", flush=True)
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
    from megatron_hybrid_prefix.tiers import tier_moves

    run = Run(args)
    engine, off = run.engine(shared=True), run.engine(cached=False)
    print("engines are built", flush=True)
    times, milestones, differences, waited = {}, {}, [], {}
    arena_loads = engine.context.host_moves.arena.loads.queue
    for number in range(SPARE + run.prompts):
        from_disk = number >= SPARE and number % 2 and not run.in_memory
        group_mib = args.groups[number // (2 - run.in_memory) % len(args.groups)]
        kind = f"from {'disk' if from_disk else 'memory'}, groups of {group_mib} MiB"
        tier_moves.GROUP_BYTES = group_mib * 2**20
        assert engine.context.host_moves.drain(60), "the entries were not written"  # no file comes or goes
        (drop_from_memory if from_disk else bring_to_memory)(args.folder)
        prompt = run.prompt(number, goes_on=True)
        before, moved = engine.context.prefix_stats(), arena_loads.seconds()
        found = {kind: run.send(engine, prompt)}
        after, moved_after = engine.context.prefix_stats(), arena_loads.seconds()
        found["on the device"] = run.send(engine, [*prompt[:-1], prompt[-1] ^ 1])
        found["cold"] = run.send(off, prompt)
        found["short cold"] = run.send(off, prompt[-OWN_TOKENS:])
        hit, cold = found[kind][-1], found["cold"][-1]
        assert hit.num_cached_tokens == len(prompt) - OWN_TOKENS, (hit.num_cached_tokens, after.fallbacks)
        assert after.fallbacks == before.fallbacks, after.fallbacks
        pairs = zip(hit.generated_log_probs, cold.generated_log_probs, strict=True)
        same = hit.generated_tokens == cold.generated_tokens
        differences.append(max(abs(one - other) for one, other in pairs) if same else None)
        if number >= SPARE:
            for name, (ms, reached, _) in found.items():
                times.setdefault(name, []).append(ms)
                milestones.setdefault(name, []).append(reached)
            tiers = after.tiers["shared"], before.tiers["shared"]
            seconds = (tiers[0].seconds_waited - tiers[1].seconds_waited, *map(float.__sub__, moved_after, moved))
            waited.setdefault(kind, []).append([each * 1e3 for each in seconds])
        print(f"hit {number}: {', '.join(f'{name} {each[0]:.1f}' for name, each in found.items())} ms", flush=True)
    tier = engine.context.prefix_stats().as_dict()["tiers"]["shared"]
    result = {"times": times, "milestones": milestones, "waited": waited, "log_prob_differences": differences}
    result["mb"] = tier["bytes_loaded"] / (SPARE + run.prompts) / 1e6
    return result | {"tier": tier, "gigabytes_per_second": rates(args.folder)}


def print_cold(found):
    """Tables of the first process."""
    median = {name: statistics.median(times) for name, times in found["times"].items()}
    print("\n| a cold prompt's first token, ms | median | over the cache alone | over the host tier | MB to the host |")
    print("|---|---|---|---|---|")
    for name, ms in median.items():
        over = [f"{ms / median[other]:.3f}" for other in ("cache", "cache, host")]
        print(
            f"| {name} | {ms:.2f} | {' | '.join(over)} | {statistics.median(found['stored_bytes'][name]) / 1e6:.0f} |"
        )
    for name in ("cache", "cache, host", "cache, host, folder"):
        print(f"\ncold, {name}:", *milestones_table(found["milestones"][name]), sep="\n")


def print_restart(threads, found):
    """Tables of a restart."""
    median = {name: statistics.median(times) for name, times in found["times"].items()}
    print(f"\n| after the restart, {threads} threads, {found['mb']:.0f} MB | median, ms | over cold | waits |")
    print("|---|---|---|---|")
    for name, ms in median.items():
        waits = ""
        if name in found["waited"]:
            wait, load, model = (statistics.median(each) for each in zip(*found["waited"][name], strict=True))
            waits = f"{wait:.1f} for reads ({found['mb'] / wait:.1f} GB/s), {load:.1f} loads, {model:.1f} the model for them"
        print(f"| {name} | {ms:.2f} | {ms / median['cold']:.3f} | {waits} |")
    for name in [*found["waited"], "short cold"]:
        print(f"\n{name}:", *milestones_table(found["milestones"][name]), sep="\n")
    print(f"\nlog-probs of hits and cold prompts differ by {found['log_prob_differences']} (None: another token)")
    print(f"this machine, GB/s: {found['gigabytes_per_second']}\ntier: {json.dumps(found['tier'])}", flush=True)


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
        options |= {"folder": folder, "out": args.out, "groups": args.groups}
        command = [sys.executable, "-m", "tests.gpu.shared_tier", *(["--graphs"] if args.graphs else [])]
        for name, value in options.items():
            command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]

        def run(part, threads):
            start = time.perf_counter()
            secret = os.environ | {"HYBRID_PREFIX_SECRET": SECRET}
            subprocess.run([*command, "--threads", str(threads), "--part", part], check=True, env=secret)
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
            place = args.out / f"shared_tier_{part}.json"
            return json.loads(place.rename(args.out / f"shared_tier_{part}_{threads}.json").read_text())

        print_cold(run("first", args.threads[0]))
        for threads in args.threads:
            print_restart(threads, run("restart", threads))
        disk = subprocess.run(["df", "-hT", folder], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    print(f"{args.preset}, {args.tokens} + {OWN_TOKENS} tokens, graphs: {args.graphs}, {disk}")


if __name__ == "__main__":
    main()
