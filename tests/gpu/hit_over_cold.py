"""Where a hit takes longer than a cold prompt of the tokens that it computes: on the host, and on the GPU::

    python -m tests.gpu.hit_over_cold [--preset hybrid-4b] [--tokens 8192] [--rounds 30]

Hits of a shared prefix and cold prompts, of 300 own tokens each, take turns. Without a GPU it only tries the script:
``--preset tiny --device cpu --tokens 1024 --rounds 3``.
"""

from __future__ import annotations

import argparse
import statistics

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.measure import FirstTokens, differences, engine_fields, graph_fields, kernel_us, milestones_table
from tests.harness.engine_helpers import random_tokens, state_bytes

OWN_TOKENS = 300
WARM_UP, PROFILED = 4, 6  # prompts of each kind
NAMES = ("hit", "cold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=8192, help="of the shared prefix")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(ensure_platform(device=args.device).describe(), flush=True)
    of_model, of_engine = graph_fields(True)
    model = build_hybrid_model(args.preset, seed=0, **of_model)
    vocabulary = model.hybrid_config.vocab_size
    engine = build_engine(
        model,
        HybridPrefixConfig(mamba_gb=64.5 * state_bytes(model) / 2**30),
        **engine_fields(model, args.tokens + 2 * OWN_TOKENS, prompts=8, requests=8),
        **of_engine,
    )
    shared = random_tokens(args.tokens, seed=1, vocabulary=vocabulary)
    tokens = FirstTokens()

    def send(name, seed):
        own = random_tokens(OWN_TOKENS, seed=1000 + 2 * seed + (name == "cold"), vocabulary=vocabulary)
        return tokens.send(engine, shared + own if name == "hit" else own)

    results = {name: [] for name in NAMES}
    for seed in range(WARM_UP + args.rounds):
        for name in NAMES:
            found = send(name, seed)
            if seed >= WARM_UP:
                results[name].append(found)
    times = {name: [ms for ms, *_ in found] for name, found in results.items()}
    for name, found in results.items():
        print(f"{name}: {statistics.median(times[name]):.2f} ms")
        print(*milestones_table([parts for _, parts, _ in found]), sep="\n", flush=True)
    ratios = [hit / cold for hit, cold in zip(*times.values(), strict=True)]
    medians = statistics.median(times["hit"]) / statistics.median(times["cold"])
    print(f"hit over cold: {medians:.3f} of the medians, {statistics.median(ratios):.3f} median of the rounds")
    kernels = {}
    for name in NAMES:
        seeds = iter(range(10_000, 10_000 + PROFILED))
        kernels[name] = kernel_us(lambda name=name, seeds=seeds: send(name, next(seeds)), PROFILED)
        print(f"{name}: {sum(kernels[name].values()) / 1e3:.2f} ms of kernels, those of the second token included")
    print(*differences(*kernels.values()), sep="\n")
    shut_down()


if __name__ == "__main__":
    main()
