"""First tokens and tokens/s of one kind of layers, caching off and on. Run by hand, once for each kind, on the same machine:

    python tests/gpu/layers_speed.py --layers inference_optimized      # transformer_engine, local
    torchrun --nproc-per-node 2 tests/gpu/layers_speed.py --layers inference_optimized --ep 2 --cuda-graphs 0

Engines run one after another, each with a model of its own, as models with experts do not fit twice. Medians over the repeats; a
warm-up round is not counted.
"""

from __future__ import annotations

import argparse
import gc
import random

import torch

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.named_models import named

SHOWN = {
    "shared_prefix": ("first_token_1_ms", "first_token_2_ms", "first_token_3_ms", "computed_tokens_3", "hit_over_cold"),
    "no_reuse": ("tokens_per_second",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nemotron-3-nano-short")
    parser.add_argument("--layers", required=True, help="transformer_impl")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cuda-graphs", type=int, default=8, help="of the whole forward; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shared-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=32, help="of the throughput")
    parser.add_argument("--cache-gb", type=float, default=4.0)
    options = parser.parse_args()
    sizes = {"tp": options.tp, "ep": options.ep}
    if options.layers == "inference_optimized":
        sizes["etp"] = 1
    platform, config = ensure_platform(**sizes), named(options.preset)

    from megatron_hybrid_prefix.bench.engines import contestants
    from megatron_hybrid_prefix.bench.scenarios.no_reuse import NoReuse
    from megatron_hybrid_prefix.bench.scenarios.shared_prefix import SharedPrefix
    from megatron_hybrid_prefix.bench.stats import median
    from megatron_hybrid_prefix.console.engine_options import Budgets
    from megatron_hybrid_prefix.models import build_hybrid_model

    fields = {"transformer_impl": options.layers}
    if options.cuda_graphs:
        fields |= {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}
    engine_fields = {
        "max_sequence_length": options.shared_tokens + 364,
        "max_requests": max(16, options.requests),
        "max_tokens": 16384,
        "num_cuda_graphs": options.cuda_graphs or None,
    }
    scenarios = [
        SharedPrefix(
            requests=4,
            shared_tokens=options.shared_tokens,
            own_tokens=300,
            generate=4,
            cold_prompts=3,
            block_tokens=256,
        ),
        NoReuse(requests=options.requests, prompt_tokens=512, generate=128, block_tokens=256),
    ]
    for name in ("off", "ours"):
        built = contestants(
            [name],
            lambda _: build_hybrid_model(config, seed=0, **fields),
            lambda _, model: dict(engine_fields),
            lambda model: Budgets(cache_gb=options.cache_gb, mamba_gb=options.cache_gb / 4),
            cuda_graphs=bool(options.cuda_graphs),
            crash_when_built=False,
            should_stop=lambda: False,
        )
        with built as running:
            for scenario in scenarios:
                samples = []
                for repeat in range(-1, options.repeats):
                    workload = scenario.workload(random.Random(f"0 {repeat}"), config.vocab_size)
                    found = scenario.repeat(running, workload)
                    if running[0].crash:
                        raise RuntimeError(running[0].trace)
                    samples += [found[name]] if repeat >= 0 else []
                medians = {shown: median([sample[shown] for sample in samples]) for shown in SHOWN[scenario.name]}
                if platform.rank == 0:
                    shown = ", ".join(f"{key} {value:.2f}" for key, value in medians.items() if value is not None)
                    print(f"{options.layers} {name} {scenario.name}: {shown}", flush=True)
        del built, running
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            print(f"left on rank {platform.rank}: {torch.cuda.memory_allocated() / 2**30:.2f} GiB", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
