"""A cold prompt's first token with megatron-core's own engine, caching off, and with this package's; and a hit's. On an idle GPU::

    python -m tests.gpu.cold_prompt [--preset hybrid-4b] [--tokens 8492] [--own 300] [--seconds 120]

The engines take turns in one process, prompt by prompt, until the time is over. A hit is a third sighting: all but ``--own`` tokens are
cached; it is compared with a cold prompt of ``--own`` tokens of the same engine. (An engine without a cache computes it whole.) Then the ``--kernels`` longest kernels of one cold prompt, products left out.
Gated DeltaNet is not in megatron-core's engine: "off" is then this package's. ``--states 4 --tokens 8193`` compares instead a cold prompt that
keeps no state with one that keeps four, as they are and in int8. ``--preset tiny --tokens 556 --seconds 5`` tries it on a CPU.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.decode_profile import part_of
from tests.gpu.measure import BLOCK_TOKENS, ON_GPU, FirstTokens, engine_fields, started, synchronize
from tests.harness.engine_helpers import cache_gb_for
from tests.harness.named_models import named

OFF, OURS = "megatron-core, off", "this package"
NONE_KEPT = "no state kept"


def main(args) -> None:
    began_s = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began_s:7.1f} s: {what}", flush=True)

    model, dice = build_hybrid_model(named(args.preset), seed=0, cuda_graph_impl="none"), random.Random(0)
    fields = engine_fields(model, args.tokens, prompts=4)
    blocks = 12 * (args.tokens // BLOCK_TOKENS + 1)
    cache_gb = cache_gb_for(model, blocks, states=32, block_tokens=BLOCK_TOKENS, max_requests=fields["max_requests"])
    off = build_engine if "G" in model.hybrid_config.layer_pattern else build_upstream_engine
    if args.states:
        kept = {"retention_interval_tokens": args.tokens // BLOCK_TOKENS // args.states * BLOCK_TOKENS}
        settings = {NONE_KEPT: {"mamba_gb": 0}, "kept as live": kept, "int8": kept | {"checkpoint_dtype": "int8"}}
    else:
        settings = {OURS: {}}
    engines = {} if args.states else {OFF: off(model, **fields)}
    for name, changed in settings.items():
        engines[name] = build_engine(model, HybridPrefixConfig(cache_gb=cache_gb, **changed), **fields)
    say("engines are built")
    tokens = FirstTokens()

    def new(count: int) -> list[int]:
        return [dice.randrange(model.hybrid_config.vocab_size) for _ in range(count)]

    shared = new(args.tokens - args.own)
    for name, engine in engines.items():
        for _ in range(3):  # the first compile kernels and choose their configurations
            for prompt in (new(args.tokens), shared + new(args.own), new(args.own)):
                ms = tokens.send(engine, prompt)[0]
        say(f"{name} is warm: {ms:.2f} ms for {args.own} tokens")
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    end_s = time.perf_counter() + args.seconds
    while time.perf_counter() < end_s:
        for name in dice.sample(list(engines), len(engines)):
            for kind, prompt in (("whole", new(args.tokens)), ("own", new(args.own)), ("hit", shared + new(args.own))):
                times[name][kind].append(tokens.send(engines[name], prompt)[0])
        if len(times[name]["own"]) % 20 == 1:
            say(", ".join(f"{statistics.median(found):.2f}" for of_one in times.values() for found in of_one.values()))
    kernels: dict[str, Counter[str]] = {name: Counter() for name in engines}
    parts: dict[str, Counter[str]] = {name: Counter() for name in engines}
    for name, engine in engines.items() if ON_GPU else ():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            tokens.send(engine, new(args.tokens), count=1)
            synchronize()
        for event in profiled.key_averages():
            ms = event.self_device_time_total / 1e3
            parts[name][part_of(event.key)] += ms
            if ms and part_of(event.key) != "products":
                kernels[name][f"{event.count:4} x {event.key[:100]}"] += ms
    for name, found in kernels.items():
        for kernel, ms in found.most_common(args.kernels):
            print(f"{name:20} {ms:8.3f} ms {kernel}")
    for part in sorted({part for found in parts.values() for part in found}):
        print(f"{part:20} " + ", ".join(f"{name} {found[part]:.2f} ms" for name, found in parts.items()))
    print()
    first = next(iter(engines))
    for name, found in times.items():
        for kind, ms in found.items():
            print(f"{name:20} {kind:6} {statistics.median(ms):8.2f} ms, fastest {min(ms):8.2f}, {len(ms)} times")
        pairs = (("whole", first, "whole"), ("own", first, "own"), ("hit", name, "own"))
        ratios = (
            statistics.median(a / b for a, b in zip(found[kind], times[of][other], strict=True))
            for kind, of, other in pairs
        )
        print("{:20} whole and own over {}'s {:.3f} {:.3f}, hit over own {:.3f}".format(name, first, *ratios))
        stats = engines[name].context.prefix_stats() if name in settings else None
        print(f"{'':20} states kept: {stats and stats.checkpoints_published}")


if __name__ == "__main__":
    with started(__doc__, preset="hybrid-4b", tokens=8492, own=300, states=0, seconds=120.0, kernels=24) as arguments:
        main(arguments)
