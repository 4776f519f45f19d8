"""First token of prompts that evict KV and states: without a cache, without a host tier, and with one. On an idle GPU::

    python -m tests.gpu.host_cost [--preset hybrid-4b] [--tokens 8492] [--warm-up 8] [--prompts 32] [--row 4]

Every prompt is new. Once the device is full, each one evicts what an earlier one left. After 50 or 60 of them an engine
has learned that guesses are of no use here, and evicts less: ``--warm-up 80`` times that. The engines take turns,
prompt by prompt, in random order, and each prompt's time is divided by that of the prompt without a cache of the same
round. A prompt begins when the GPU is idle. What still goes to the host after its token costs the next prompt: so
prompts are also sent ``--row`` at a time, one right after the other, and that time is divided likewise (0: they are
not). ``--preset tiny --device cpu --tokens 300 --host-gb 0.1 --prompts 4`` tries the script.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import BLOCK_TOKENS, FirstTokens, engine_fields, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, greedy, run_to_end

REQUESTS = 4


def paired(times, off):
    """Median time, and the median of its ratios to ``off`` with the middle half of them, as text."""
    ratios = sorted(own / other for own, other in zip(times, off, strict=True))
    quarter = len(ratios) // 4
    return (
        f"{statistics.median(times):8.2f} ms, {statistics.median(ratios):.3f} of off ({ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f})"
    )


@torch.inference_mode()
def row_ms(engine, prompts):
    """Milliseconds a prompt, of prompts one right after the other."""
    synchronize()
    start_s = time.perf_counter()
    for number, tokens in enumerate(prompts):
        engine.add_request(number, tokens, greedy(1))
    run_to_end(engine, {})
    return (time.perf_counter() - start_s) * 1e3 / len(prompts)


def main(args) -> None:
    model, dice = build_hybrid_model(args.preset, seed=0, cuda_graph_impl="none"), random.Random(0)
    fields = engine_fields(model, args.tokens, prompts=REQUESTS, requests=REQUESTS)
    blocks = 10 * (args.tokens // BLOCK_TOKENS + 1)
    cache_gb = cache_gb_for(model, blocks, states=18, block_tokens=BLOCK_TOKENS, max_requests=REQUESTS)
    settings = {
        "off": None,
        "no host tier": HybridPrefixConfig(cache_gb=cache_gb),
        "host tier": HybridPrefixConfig(cache_gb=cache_gb, host_gb=args.host_gb),
    }
    engines = {name: build_engine(model, prefix, **fields) for name, prefix in settings.items()}
    tokens, found, stored, rowed = FirstTokens(), *(defaultdict(list) for _ in range(3))

    def new_prompts(count):
        return [[dice.randrange(model.hybrid_config.vocab_size) for _ in range(args.tokens)] for _ in range(count)]

    def stored_mib(engine):
        moves = getattr(engine.context, "host_moves", None)
        return 0 if moves is None else moves.to_host.bytes / 2**20

    for number in range(args.warm_up + args.prompts):
        for name in dice.sample(list(engines), len(engines)):
            before = stored_mib(engines[name])
            ms, _ = tokens.send(engines[name], *new_prompts(1))
            if number >= args.warm_up:
                found[name].append(ms)
                stored[name].append(stored_mib(engines[name]) - before)
    for _ in range(args.prompts // args.row if args.row else 0):
        for name in dice.sample(list(engines), len(engines)):
            rowed[name].append(row_ms(engines[name], new_prompts(args.row)))
    for name in engines:
        print(
            f"{name:14} {paired(found[name], found['off'])}, {statistics.fmean(stored[name]):.0f} MiB stored a prompt"
        )
        if args.row:
            print(f"{'':14} {args.row} in a row, each {paired(rowed[name], rowed['off'])}", flush=True)


if __name__ == "__main__":
    with started(__doc__, preset="hybrid-4b", tokens=8492, warm_up=8, prompts=32, row=4, host_gb=10.0) as arguments:
        main(arguments)
