"""What ``exact="bits"`` costs: tokens/s of prefills and decodes over the default's, and the kernels that make the difference.

    python tests/gpu/bits_cost.py --out out/bits                # both 4.1B hybrids: about two minutes on an H200
    python tests/gpu/bits_cost.py --products --out out/bits     # its products beside cuBLAS', and nothing else

Engines of one process take turns; figures are medians. "float32 states" is the default with states of that type, which
``exact="bits"`` needs: the rest of the cost is that of its kernels. ``--device cpu --preset tiny`` tries the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.bench.engines import contestants
from megatron_hybrid_prefix.console.engine_options import ENGINES
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.bits_tiles import COLD_BYTES, DEVICE, DTYPE, LARGE_ROWS, ON_GPU, SMALL_ROWS, shapes, time_us
from tests.harness.engine_helpers import random_tokens
from tests.harness.named_models import named

CONFIGS = {"default": {}, "float32 states": {"state_dtype": "float32"}, "bits": {"exact": "bits"}}
DECODING, DECODE_PROMPT, DECODED = 64, 100, 65
LOG_PROBS = {"return_log_probs": True, "skip_prompt_log_probs": True}
SHOWN = 12  # kernels of a profile
CUBLAS = re.compile("nvjet|gemm|splitK")


def products(presets):
    """Times of each product of the models, and those of cuBLAS: rows of (name, out, in, rows, ours us, cuBLAS us)."""
    from megatron_hybrid_prefix.ops.invariant.linear_triton import linear

    found = []
    print(f"{'product':>10} {'out x in':>14} {'rows':>5} {'ours us':>9} {'cuBLAS us':>9}  cuBLAS/ours", flush=True)
    for (columns, depth), name in shapes(*presets).items():
        copies = max(2, -(-COLD_BYTES // (columns * depth * 2))) if ON_GPU else 1
        weights = torch.randn(copies, columns, depth, device=DEVICE).to(DTYPE)
        for rows in (*SMALL_ROWS, *LARGE_ROWS) if ON_GPU else (2,):
            x, calls = torch.randn(rows, depth, device=DEVICE).to(DTYPE), copies if rows <= max(SMALL_ROWS) else 2
            ours = time_us(lambda copy: linear(x, weights[copy]), calls)  # noqa: B023
            blas = time_us(lambda copy: F.linear(x, weights[copy]), calls)  # noqa: B023
            found.append((name, columns, depth, rows, ours, blas))
            print(
                f"{name:>10} {columns:>6} x {depth:<5} {rows:>5} {ours:9.1f} {blas:9.1f}  {blas / ours:.2f}", flush=True
            )
    for rows in sorted({row[3] for row in found}):
        ours, blas = (sum(row[at] for row in found if row[3] == rows) for at in (4, 5))
        print(f"all of {rows} rows: {blas / ours:.3f} of cuBLAS' speed", flush=True)
    return found


def kernels_of(call, cuda):
    """Microseconds of each kernel while ``call`` runs, the longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profile:
        call()
        if cuda:
            torch.cuda.synchronize()
    times = Counter()
    for event in profile.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == cuda and (cuda or event.cpu_parent is None):
            times["cuBLAS" if CUBLAS.search(event.name) else event.name.split("(")[0][:80]] += (
                event.time_range.elapsed_us()
            )
    return dict(times.most_common())


def decode_step(contestant, prompts):
    """A function that runs one decode of all prompts; call it once."""
    from megatron_hybrid_prefix.upstream.names import SamplingParams

    engine = contestant.engine
    for number, prompt in enumerate(prompts):
        engine.add_request(
            number, prompt, SamplingParams(num_tokens_to_generate=12, top_k=1, termination_id=-1, **LOG_PROBS)
        )
    for _ in range(6):
        engine.step_modern()
    return engine.step_modern


def pin(contestant):
    """Kernels are pinned for the exact engine only: others run what Triton found fastest, which the report says."""
    from megatron_hybrid_prefix.layers.invariant_cuda import pin_kernels, unpin_kernels

    (pin_kernels if contestant.name == "bits" else unpin_kernels)()


def tuned():
    """{kernel: the configurations that Triton found fastest}."""
    from megatron_hybrid_prefix.upstream.ssd_kernels import AUTOTUNED

    return {name: sorted({str(config) for config in kernel.cache.values()}) for name, kernel in AUTOTUNED.items()}


def finish(contestant):
    while contestant.engine.has_unfinished_requests():
        contestant.engine.step_modern()


def measure(preset, options, platform):
    """{prefill, decode: {engine: tokens/s}}, and kernels of a step of each."""
    config, cuda = named(preset), platform.device.type == "cuda"
    tokens = partial(random_tokens, vocabulary=config.vocab_size)
    prefill, batch, generate = (options.tokens, DECODING, DECODED) if cuda else (70, 4, 5)
    fields = {
        "max_sequence_length": prefill + 256,
        "max_requests": batch,
        "max_tokens": max(prefill, batch * DECODE_PROMPT) + 64,
        "buffer_size_gb": 8 if cuda else 0.25,
        "num_cuda_graphs": 4 if cuda else None,
        "use_cuda_graphs_for_non_decode_steps": False,
    }
    own = {
        name: lambda budgets, more=more: {"prefix": HybridPrefixConfig(mamba_gb=4.0 if cuda else 0.02, **more)}
        for name, more in CONFIGS.items()
    }
    seconds = {kind: {name: [] for name in CONFIGS} for kind in ("prefill", "decode")}
    report = {"kernels": {}}
    with (
        patch.dict(ENGINES, own),
        contestants(
            tuple(CONFIGS),
            partial(build_hybrid_model, config, seed=0, **({"cuda_graph_impl": "local"} if cuda else {})),
            lambda model: dict(fields),
            lambda model: None,
            cuda_graphs=cuda,
            crash_when_built=False,
            should_stop=lambda: False,
        ) as running,
        torch.inference_mode(),
    ):
        print(f"{preset}: engines built", flush=True)
        seed = 0
        for repeat in range(-2, options.repeats):  # two rounds to warm up: Triton compiles, then tunes
            for contestant in running:
                seed += 1
                pin(contestant)
                _, wall_s = contestant.send([tokens(prefill, seed=seed)], 1, attributes=[LOG_PROBS])
                prompts = [tokens(DECODE_PROMPT, seed=10000 + batch * seed + i) for i in range(batch)]
                rates, _ = contestant.send(prompts, generate, attributes=[LOG_PROBS] * batch)
                if repeat >= 0:
                    seconds["prefill"][contestant.name].append(prefill / wall_s)
                    seconds["decode"][contestant.name].append(sum(result.tokens_per_second for result in rates))
        for contestant in running:
            seed += 1
            pin(contestant)
            prompt = tokens(prefill, seed=seed)
            whole = kernels_of(lambda: contestant.send([prompt], 1, attributes=[LOG_PROBS]), cuda)  # noqa: B023
            step = decode_step(contestant, [tokens(DECODE_PROMPT, seed=90000 + batch * seed + i) for i in range(batch)])
            one = kernels_of(step, cuda)
            finish(contestant)
            report["kernels"][contestant.name] = {"prefill": whole, "decode": one}
    report["tuned"] = tuned()
    print(f"{preset}: fastest configurations: {report['tuned']}", flush=True)
    for kind, rates in seconds.items():
        medians = {name: statistics.median(values) for name, values in rates.items()}
        report[kind] = {"tokens_per_second": medians, "samples": rates}
        ratios = ", ".join(f"{name} {value / medians['default']:.3f}" for name, value in medians.items())
        print(f"{preset}, {kind}: default {medians['default']:,.0f} tokens/s; of the default: {ratios}", flush=True)
    for kind in seconds:
        found = {name: report["kernels"][name][kind] for name in CONFIGS}
        print(f"{preset}, {kind}, us of kernels: " + ", ".join(f"{n} {sum(t.values()):,.0f}" for n, t in found.items()))
        difference = Counter(found["bits"])
        difference.subtract(found["default"])
        for name, us in sorted(difference.items(), key=lambda item: -abs(item[1]))[:SHOWN]:
            print(
                f"    {us:+10.1f} us ({found['default'].get(name, 0):9.1f} -> {found['bits'].get(name, 0):9.1f})  {name}"
            )
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", default=["hybrid-4b", "gdn-4b"])
    parser.add_argument("--products", action="store_true", help="products only")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prefill")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin, report = time.perf_counter(), {}
    if options.products:
        report["device"] = torch.cuda.get_device_name() if ON_GPU else "interpreter"
        with torch.no_grad():
            report["products"] = products(options.preset)
    else:
        platform = ensure_platform(device=options.device)
        report["platform"] = platform.describe()
        print(report["platform"], flush=True)
        for preset in options.preset:
            report[preset] = measure(preset, options, platform)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{time.perf_counter() - begin:.1f} s since the start", flush=True)
    path = options.out / ("bits_products.json" if options.products else "bits_cost.json")
    path.write_text(json.dumps(report, indent=1))
    if not options.products:
        shut_down()


if __name__ == "__main__":
    main()
