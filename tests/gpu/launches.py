"""Kernels that a recurrent layer launches, and their time on the GPU: Gated DeltaNet's beside Mamba2's, of equal width.

    python tests/gpu/launches.py --out out/launches              # --device cpu --preset tiny-gdn --tokens 70: to try it

Two models of the preset's dimensions are profiled, with one recurrent layer and with five: a layer has a fourth of the
difference. Steps: prefills of ``--tokens``, and a decode of 8. On a CPU, operations of PyTorch are counted in place of kernels.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, random_tokens

FEW, MANY, ROWS = 1, 5, 8
Found = dict[str, tuple[int, float]]  # by kernel: launches and microseconds


def profiled(call: Any, cuda: bool) -> Found:
    """Launches and microseconds of each kernel while it runs."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profile:
        call()
        if cuda:
            torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    times_us: Counter[str] = Counter()
    for event in profile.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu != cuda or (not cuda and event.cpu_parent is not None):
            continue
        launches[event.name] += 1
        times_us[event.name] += event.time_range.elapsed_us()
    return {name: (count, times_us[name]) for name, count in launches.items()}


def steps_of(config: Any, lengths: list[int], cuda: bool) -> dict[str, Found]:
    """What each step of a model launches: prefills of these lengths, and a decode of `ROWS`."""
    model = build_hybrid_model(config, seed=0)
    fields = {"max_sequence_length": 2 * max(lengths), "max_requests": 16, "max_tokens": max(8192, *lengths)}
    engine = build_engine(model, HybridPrefixConfig(mamba_gb=0.5), buffer_size_gb=4 if cuda else 0.25, **fields)
    found: dict[str, Found] = {}
    number = 0

    def finish() -> None:
        while engine.has_unfinished_requests():
            engine.step_modern()

    with torch.inference_mode():
        for tokens in lengths:
            for repeat in range(3):  # the first compiles, the second tunes
                engine.add_request(number, random_tokens(tokens, seed=number), greedy(3, return_log_probs=False))
                if repeat == 2:
                    found[f"prefill of {tokens}"] = profiled(engine.step_modern, cuda)
                finish()
                number += 1
        for _ in range(ROWS):
            engine.add_request(number, random_tokens(20, seed=number), greedy(12, return_log_probs=False))
            number += 1
        for _ in range(6):
            engine.step_modern()
        found[f"decode of {ROWS}"] = profiled(engine.step_modern, cuda)
        finish()
    return found


def of_a_layer(few: Found, many: Found) -> Found:
    """The difference, for one layer."""
    names = set(few) | set(many)
    nothing = (0, 0.0)
    difference = {
        name: tuple(
            (a - b) / (MANY - FEW) for a, b in zip(many.get(name, nothing), few.get(name, nothing), strict=True)
        )
        for name in names
    }
    return {name: value for name, value in difference.items() if value[0] > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--preset", default="gdn-4b", help="a preset with G layers; its M layers are those of hybrid-4b"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[300, 8192])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    platform = ensure_platform(device=arguments.device)
    print(platform.describe(), flush=True)
    cuda = platform.device.type == "cuda"
    report: dict[str, Any] = {"platform": platform.describe(), "preset": arguments.preset}
    base = get_preset(arguments.preset)
    for symbol in "GM":
        counts = [
            steps_of(replace(base, layer_pattern=symbol * layers + "*"), arguments.tokens, cuda)
            for layers in (FEW, MANY)
        ]
        for step in counts[0]:
            layer = of_a_layer(counts[0][step], counts[1][step])
            launches, times_us = sum(n for n, _ in layer.values()), sum(t for _, t in layer.values())
            report[f"{symbol}, {step}"] = {"launches": launches, "us": times_us, "kernels": layer}
            print(f"{symbol}, {step}: {launches:.1f} launches, {times_us:.1f} us a layer", flush=True)
            for name, (count, time_us) in sorted(layer.items(), key=lambda item: -item[1][1]):
                print(f"    {count:5.2f} x {time_us:9.1f} us  {name[:110]}", flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "launches.json").write_text(json.dumps(report, indent=1) + "\n")
    shut_down()


if __name__ == "__main__":
    main()
