"""Cost of keeping states, and copies made for them. Usage: ``checkpoint_cost.py PRESET TOKENS REPEATS``.

Prefills TOKENS new tokens with no state kept and with four states kept, in turns; reports medians of CUDA event times.
Then a prompt resumes under the profiler: operators and copies that move as much as a layer's state. Prints JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import Counter

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason
from tests.harness.engine_helpers import greedy, random_tokens

CHECKPOINTS = 4
MOVING = ("copy_", "index", "gather", "scatter", "clone", "cat", "contiguous")


def keep_four(cache):
    """Prompts keep four evenly spaced states, whatever the policy says; none while `wanted` is off."""
    wanted = {"on": True}

    def boundaries(match, breakpoints):
        blocks = match.chain.tokens // cache.block_tokens
        positions = sorted({blocks * (i + 1) // CHECKPOINTS * cache.block_tokens for i in range(CHECKPOINTS)})
        return tuple(Boundary(position, CheckpointReason.JUNCTION) for position in positions) if wanted["on"] else ()

    cache._planner.boundaries = boundaries
    return wanted


def first_step_ms(engine, request_id, prompt):
    """CUDA event time of the step that prefills the prompt."""
    engine.add_request(request_id, prompt, greedy(2, return_log_probs=False))
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    engine.step_modern()
    end.record()
    torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step_modern()
    return start.elapsed_time(end)


def moved(engine, request_id, prompt):
    """Of the first step: operators that move whole states, and the largest device-to-device copy, in bytes."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    engine.add_request(request_id, prompt, greedy(2, return_log_probs=False))
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        engine.step_modern()
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step_modern()
    state_shapes = [tuple(tensor.shape[2:]) for tensor in engine.context.shared_memory.states.values()]
    operators = Counter()
    for event in profile.events():
        for shape in map(tuple, event.input_shapes or ()):
            if any(shape[-len(state) :] == state for state in state_shapes) and any(
                part in event.name for part in MOVING
            ):
                operators[f"{event.name} {shape}"] += 1
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json") as file:
            events = json.load(file)["traceEvents"]
    sizes = [event["args"].get("bytes", 0) for event in events if "Memcpy DtoD" in event.get("name", "")]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    return dict(operators), max(sizes, default=0), kernels


def main(preset, tokens, repeats):
    platform = ensure_platform()
    model = build_hybrid_model(preset, seed=0)
    engine = build_engine(
        model,
        HybridPrefixConfig(mamba_gb=8),
        max_sequence_length=32768,
        max_requests=8,
        max_tokens=32768,
        buffer_size_gb=10,
    )
    wanted = keep_four(engine.context.prefix_cache)
    vocabulary, tokens, times = get_preset(preset).vocab_size, int(tokens), {True: [], False: []}
    with torch.inference_mode():
        for number in range(2 * int(repeats) + 6):
            wanted["on"] = bool((number + number // 2) % 2)  # off, on, on, off, ...
            kept = engine.context.prefix_stats().checkpoints_published
            ms = first_step_ms(engine, number, random_tokens(tokens, seed=number, vocabulary=vocabulary))
            kept = engine.context.prefix_stats().checkpoints_published - kept
            assert kept == (CHECKPOINTS if wanted["on"] else 0), kept
            if number >= 6:
                times[wanted["on"]].append(ms)
        last = random_tokens(tokens, seed=99_999, vocabulary=vocabulary)
        wanted["on"] = True
        first_step_ms(engine, 10_000, last)
        reused = engine.context.prefix_stats().reused_tokens
        hit = last[: tokens // 2 + 256] + random_tokens(300, seed=7, vocabulary=vocabulary)
        operators, copied_bytes, kernels = moved(engine, 10_001, hit)
        reused = engine.context.prefix_stats().reused_tokens - reused
    medians = {name: statistics.median(values) for name, values in (("none", times[False]), ("four", times[True]))}
    report = {"platform": platform.describe(), "preset": preset, "tokens": tokens, "repeats": int(repeats)}
    report |= {"median_ms": medians, "four_over_none": medians["four"] / medians["none"]}
    report |= {"hit_reused_tokens": reused, "moving_operators": operators, "largest_copy_bytes": copied_bytes}
    report |= {
        "kernels": kernels,
        "state_bytes_of_a_layer": engine.context.state_layout.slot_bytes // engine.context.num_mamba_layers,
    }
    print(json.dumps(report))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
