"""Transformer Engine's layers beside megatron-core's own ("local"): first tokens and throughput, caching off and on, in one process.

    python tests/gpu/layers_speed.py --out out/layers                     # hybrid-4b with 8 CUDA graphs
    python tests/gpu/layers_speed.py --cuda-graphs 0 --out out/layers     # without graphs, where the host sets the pace

Each engine gets the same prompts, in an order that rotates. A warm-up round is not counted. Figures are medians over the
repeats, printed as each scenario ends; details are in ``layers_speed_GRAPHS.json`` of ``--out``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_hybrid_prefix.bench.engines import contestants
from megatron_hybrid_prefix.bench.scenarios.no_reuse import NoReuse
from megatron_hybrid_prefix.bench.scenarios.shared_prefix import SharedPrefix
from megatron_hybrid_prefix.bench.stats import median, rotated
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.named_models import named

LAYERS = {"te": "transformer_engine", "local": "local"}
SHOWN = {
    "shared_prefix": ("first_token_1_ms", "first_token_2_ms", "first_token_3_ms", "cold_first_token_ms"),
    "no_reuse": ("tokens_per_second", "wall_s"),
}


def play(scenario, running, repeats, vocab_size, seed=0):
    """Samples of each repeat by engine's name; an engine that raised is left out from then on."""
    samples = {contestant.name: [] for contestant in running}
    for repeat in range(-1, repeats):
        workload = scenario.workload(random.Random(f"{seed} {repeat}"), vocab_size)
        alive = [contestant for contestant in running if contestant.crash is None]
        for name, sample in scenario.repeat(rotated(alive, repeat), workload).items():
            if repeat >= 0:
                samples[name].append(sample)
    return samples


def table(title, names, samples):
    """Medians, and the ratio of both kinds of layers."""
    rows = [[title, *samples, *(f"te/local {engine}" for engine in ("off", "ours"))]]
    for name in names:
        medians = {engine: median([sample.get(name) for sample in row]) for engine, row in samples.items()}
        ratios = [(medians.get(f"te {engine}"), medians.get(f"local {engine}")) for engine in ("off", "ours")]
        cells = [*medians.values(), *(a / b if a and b else None for a, b in ratios)]
        rows.append([name, *("-" if cell is None else f"{cell:.3f}" for cell in cells)])
    return "\n".join("  ".join(f"{cell:>16}" for cell in row) for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--cuda-graphs", type=int, default=8, help="graphs to capture; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--shared-tokens", type=int, default=8192)
    parser.add_argument("--own-tokens", type=int, default=300)
    parser.add_argument("--requests", type=int, default=32, help="of the throughput")
    parser.add_argument("--buffer-gb", type=float, default=8.0)
    parser.add_argument("--mamba-gb", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    platform, config, start = ensure_platform(), named(options.preset), time.perf_counter()
    print(platform.describe(), flush=True)
    scenarios = [
        SharedPrefix(
            requests=4,
            shared_tokens=options.shared_tokens,
            own_tokens=options.own_tokens,
            generate=4,
            cold_prompts=3,
            block_tokens=256,
        ),
        NoReuse(requests=options.requests, prompt_tokens=512, generate=128, block_tokens=256),
    ]
    fields = {
        "max_sequence_length": options.shared_tokens + options.own_tokens + 64,
        "max_requests": max(16, options.requests),
        "max_tokens": 16384,
        "buffer_size_gb": options.buffer_gb,
        "num_cuda_graphs": options.cuda_graphs or None,
    }
    graphs = {"cuda_graph_impl": "local"} if options.cuda_graphs else {}
    report = {"platform": platform.describe(), "preset": options.preset, "cuda_graphs": options.cuda_graphs}
    with ExitStack() as stack:
        running = []
        for layers in options.layers:
            found = contestants(
                ("off", "ours"),
                partial(build_hybrid_model, config, seed=0, transformer_impl=LAYERS[layers], **graphs),
                lambda model: dict(fields),
                lambda model: (options.mamba_gb, 0.0, None),
                cuda_graphs=bool(graphs),
                crash_when_built=True,
                should_stop=lambda: False,
            )
            for contestant in stack.enter_context(found):
                contestant.name = f"{layers} {contestant.name}"
                running.append(contestant)
            print(f"{layers}: engines built, {time.perf_counter() - start:.1f} s since the start", flush=True)
        for scenario in scenarios:
            samples = play(scenario, running, options.repeats, config.vocab_size)
            report[scenario.name] = {"workload": scenario.describe(), "samples": samples}
            print(f"{scenario.describe()}; {time.perf_counter() - start:.1f} s since the start", flush=True)
            print(table(scenario.name, SHOWN[scenario.name], samples), flush=True)
            report["crashes"] = {contestant.name: contestant.trace for contestant in running if contestant.crash}
            path = options.out / f"layers_speed_{options.cuda_graphs}.json"
            path.write_text(json.dumps(report, indent=1))
        for name, trace in report["crashes"].items():
            print(f"{name} crashed:\n{trace}", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
