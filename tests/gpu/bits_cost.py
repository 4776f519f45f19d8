"""What ``exact="bits"`` costs: tokens/s of prefills and decodes over the default's, and the kernels that make the difference.

    python -m tests.gpu.bits_cost --out out/bits                # both 4.1B hybrids: about two minutes on an H200
    python -m tests.gpu.bits_cost --products --out out/bits     # its products beside cuBLAS', and nothing else

Engines of one process take turns; figures are medians. "float32 states" is the default with states of that type, which
``exact="bits"`` needs: the rest of the cost is that of its kernels. ``--device cpu --preset tiny`` tries the script.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.measure import (
    COLD_BYTES,
    DEVICE,
    ON_GPU,
    FirstTokens,
    differences,
    engine_fields,
    graph_fields,
    graph_us,
    kernel_us,
    save,
    synchronize,
)
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end, state_bytes
from tests.harness.named_models import named

CONFIGS = {"default": {}, "float32 states": {"state_dtype": "float32"}, "bits": {"exact": "bits"}}
DECODE_PROMPT_TOKENS, DECODE_STEPS = 100, 50 if ON_GPU else 3
ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192) if ON_GPU else (2,)


@torch.no_grad()
def products(config):
    """Times of a model's products, and those of cuBLAS: rows of (name, out, in, rows, ours us, cuBLAS us)."""
    from megatron_hybrid_prefix.ops.invariant.linear_triton import linear

    weights = build_hybrid_model(config, seed=0).named_parameters()
    shapes, found = {tuple(weight.shape): name for name, weight in weights if weight.dim() == 2}, []
    for (columns, depth), name in shapes.items():
        copies = max(2, -(-COLD_BYTES // (columns * depth * 2))) if ON_GPU else 1
        weights = torch.randn(copies, columns, depth, device=DEVICE).bfloat16()
        for rows in ROWS:
            x, calls = torch.randn(rows, depth, device=DEVICE).bfloat16(), copies if rows <= 256 else 2
            ours, blas = (
                graph_us(lambda way=way: [way(x, weights[copy % copies]) for copy in range(calls)], calls)  # noqa: B023
                for way in (linear, F.linear)
            )
            found.append((name, columns, depth, rows, ours, blas))
            print(f"{columns:>6} x {depth:<5} {rows:>5} rows: {ours:9.1f} us, cuBLAS {blas:9.1f}  {name}", flush=True)
    for rows in ROWS:
        ours, blas = (sum(row[at] for row in found if row[3] == rows) for at in (4, 5))
        print(f"all of {rows} rows: {blas / ours:.3f} of cuBLAS' speed", flush=True)
    return found


def pin(name):
    """Kernels are pinned for the exact engine only: others run what Triton found fastest."""
    from megatron_hybrid_prefix.layers.invariant_cuda import pin_kernels, unpin_kernels

    if ON_GPU:
        (pin_kernels if name == "bits" else unpin_kernels)()


def start_decoding(engine, prompts, first):
    """Sends prompts, and runs their prefills and a few decodes."""
    for number, prompt in enumerate(prompts, start=first):
        engine.add_request(number, prompt, greedy(DECODE_STEPS + 8))
    run_to_end(engine, {}, steps=4)


@torch.inference_mode()
def measure(preset, options):
    """{prefill, decode: {engine: tokens/s}}, and microseconds of the kernels of a step of each."""
    config, batch = named(preset), 64 if ON_GPU else 4
    of_model, of_engine = graph_fields(True)
    engines = {}
    for name, more in CONFIGS.items():
        model = build_hybrid_model(config, seed=0, **of_model)
        fields = engine_fields(model, options.tokens, prompts=4, requests=batch) | of_engine
        fields["max_tokens"] = max(fields["max_tokens"], batch * DECODE_PROMPT_TOKENS)
        prefix = HybridPrefixConfig(mamba_gb=8.5 * state_bytes(model) / 2**30, **more)
        engines[name] = build_engine(model, prefix, use_cuda_graphs_for_non_decode_steps=False, **fields)
    print(f"{preset}: engines built", flush=True)
    rates = {kind: {name: [] for name in CONFIGS} for kind in ("prefill", "decode")}
    first_tokens, seed = FirstTokens(milestones=False), 0

    def prompt(tokens):
        nonlocal seed
        seed += 1
        return random_tokens(tokens, seed=seed, vocabulary=config.vocab_size)

    def prompts():
        return [prompt(DECODE_PROMPT_TOKENS) for _ in range(batch)]

    for repeat in range(-2, options.repeats):  # two rounds to warm up: Triton compiles, then tunes
        for name, engine in engines.items():
            pin(name)
            ms = first_tokens.send(engine, prompt(options.tokens))[0]
            start_decoding(engine, prompts(), first=10**6)
            synchronize()
            start_s = time.perf_counter()
            run_to_end(engine, {}, steps=DECODE_STEPS)
            synchronize()
            decode_s = time.perf_counter() - start_s
            run_to_end(engine, {})
            if repeat >= 0:
                rates["prefill"][name].append(1e3 * options.tokens / ms)
                rates["decode"][name].append(batch * DECODE_STEPS / decode_s)
    kernels = {kind: {} for kind in rates}
    for name, engine in engines.items():
        pin(name)
        tokens = prompt(options.tokens)
        kernels["prefill"][name] = kernel_us(lambda: first_tokens.send(engine, tokens))  # noqa: B023
        start_decoding(engine, prompts(), first=10**6)
        kernels["decode"][name] = kernel_us(engine.step_modern)
        run_to_end(engine, {})
    for kind, own in rates.items():
        medians = {name: statistics.median(values) for name, values in own.items()}
        ratios = ", ".join(f"{name} {value / medians['default']:.3f}" for name, value in medians.items())
        print(f"{preset}, {kind}: default {medians['default']:,.0f} tokens/s; of the default: {ratios}")
        print("  us of kernels: " + ", ".join(f"{name} {sum(us.values()):,.0f}" for name, us in kernels[kind].items()))
        print("  bits, default", *differences(kernels[kind]["bits"], kernels[kind]["default"]), sep="\n", flush=True)
    return {"tokens_per_second": rates, "kernels": kernels}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", default=["hybrid-4b", "gdn-4b"])
    parser.add_argument("--products", action="store_true", help="products only")
    parser.add_argument("--tokens", type=int, default=8192 if ON_GPU else 70, help="of a prefill")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {"platform": ensure_platform(device=options.device).describe()}
    print(report["platform"], flush=True)
    for preset in options.preset:
        report[preset] = products(named(preset)) if options.products else measure(preset, options)
        gc.collect()
        torch.cuda.empty_cache()
    save(options.out, "bits_products" if options.products else "bits_cost", report)
    shut_down()


if __name__ == "__main__":
    main()
