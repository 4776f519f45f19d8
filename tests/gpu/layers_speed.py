"""First tokens and tokens/s of one kind of layers, caching off and on. Run by hand, once for each kind, on the same machine:

    python tests/gpu/layers_speed.py --layers inference_optimized      # transformer_engine, local
    torchrun --nproc-per-node 2 tests/gpu/layers_speed.py --layers inference_optimized --ep 2 --cuda-graphs 0

Engines run one after another, each with a model of its own, as models with experts do not fit twice. Medians over the repeats; a
warm-up round is not counted. Lines come as it goes, and a table of rank 0 at the end.
"""

from __future__ import annotations

import argparse
import gc
import random
import time

import torch

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.named_models import named

COLUMNS = {
    "first_token_1_ms": "cold, ms",
    "hit_first_token_ms": "hit, ms",
    "hit_over_cold": "hit / as many cold tokens",
    "computed_tokens_3": "computed of the third prompt",
    "decoded_per_second": "decode, tokens/s",
    "tokens_per_second": "with prefill, tokens/s",
    "peak_gib": "peak, GiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nemotron-3-nano-short")
    parser.add_argument("--layers", required=True, help="transformer_impl")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cuda-graphs", type=int, default=8, help="of the whole forward; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shared-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=32, help="at once, of 512 tokens")
    parser.add_argument("--generate", type=int, default=128, help="tokens of each of these")
    parser.add_argument("--cache-gb", type=float, default=4.0)
    options = parser.parse_args()
    sizes = {"tp": options.tp, "ep": options.ep}
    if options.layers == "inference_optimized":
        sizes["etp"] = 1
    started_s = time.perf_counter()
    platform, config = ensure_platform(device=options.device, **sizes), named(options.preset)

    from megatron_hybrid_prefix.bench.engines import contestants
    from megatron_hybrid_prefix.bench.scenarios.no_reuse import NoReuse
    from megatron_hybrid_prefix.bench.scenarios.shared_prefix import SharedPrefix
    from megatron_hybrid_prefix.bench.stats import median, number_text
    from megatron_hybrid_prefix.console.engine_options import Budgets
    from megatron_hybrid_prefix.models import build_hybrid_model

    class AtOnce(NoReuse):
        """Also the tokens/s after the last first token."""

        def play(self, contestant, workload):
            results, wall_s = contestant.send(workload, self.generate)
            assert all(result.status == "completed" for result in results)
            after_s = wall_s - max(result.time_to_first_token_s for result in results)
            decoded = len(results) * (self.generate - 1)
            return {"decoded_per_second": decoded / after_s, "tokens_per_second": len(results) * self.generate / wall_s}

    def say(text: str) -> None:
        if platform.rank == 0:
            print(f"{time.perf_counter() - started_s:6.1f} s  {text}", flush=True)

    def make_model(_):
        model = build_hybrid_model(config, seed=0, **fields)
        say(
            f"{options.layers}: a model of {sum(each.numel() for each in model.parameters()) / 1e9:.1f} billion parameters"
        )
        return model

    fields = {"transformer_impl": options.layers}
    if options.cuda_graphs:
        fields |= {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}
    own_tokens, prompt_tokens, on_gpu = 300, 512, platform.device.type == "cuda"
    engine_fields = {
        "max_sequence_length": max(options.shared_tokens + own_tokens + 64, prompt_tokens + options.generate),
        "max_requests": options.requests,
        "max_tokens": max(options.requests * prompt_tokens, options.shared_tokens + 512),  # one step of prefill
        "num_cuda_graphs": options.cuda_graphs or None,
        "block_size_tokens": 256,
    }
    scenarios = [
        SharedPrefix(
            requests=4, shared_tokens=options.shared_tokens, own_tokens=own_tokens, generate=4, cold_prompts=3
        ),
        AtOnce(requests=options.requests, prompt_tokens=prompt_tokens, generate=options.generate),
    ]
    table = {}
    for name in ("off", "ours"):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        built = contestants(
            [name],
            make_model,
            lambda _, model: dict(engine_fields),
            lambda model: Budgets(cache_gb=options.cache_gb, mamba_gb=options.cache_gb / 4),
            cuda_graphs=bool(options.cuda_graphs),
            crash_when_built=False,
            should_stop=lambda: False,
        )
        medians = table[name] = {}
        with built as running:
            (contestant,) = running
            for scenario in scenarios:
                samples = []
                for repeat in range(-1, options.repeats):
                    if contestant.crash is None:
                        workload = scenario.workload(random.Random(f"0 {repeat}"), config.vocab_size)
                        samples += scenario.repeat(running, workload).values()
                    if contestant.crash is not None:
                        say(f"FAILED: {options.layers}, {options.cuda_graphs} CUDA graphs, {name}: {contestant.crash}")
                        raise RuntimeError(contestant.trace)
                    say(f"{name}: {scenario.name}, {'a warm-up round' if repeat < 0 else f'round {repeat + 1}'}")
                medians |= {shown: median([sample[shown] for sample in samples[1:]]) for shown in samples[0]}
        if on_gpu:
            medians["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        shown = ", ".join(f"{head} {number_text(medians.get(key))}" for key, head in COLUMNS.items())
        say(f"{options.layers}, {options.cuda_graphs} CUDA graphs, {name}: {shown}")
        del built, running, contestant
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            say(f"{torch.cuda.memory_allocated() / 2**30:.2f} GiB are left")
    if platform.rank == 0:
        print(f"| layers | graphs | tp x ep | caching | {' | '.join(COLUMNS.values())} |")
        print("|---" * (4 + len(COLUMNS)) + "|")
        for name, medians in table.items():
            row = [options.layers, str(options.cuda_graphs), f"{options.tp} x {options.ep}", name]
            print("|", " | ".join([*row, *(number_text(medians.get(key)) for key in COLUMNS)]), "|", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
