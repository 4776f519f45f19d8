"""What keeping states costs, and what is copied for it. Usage: ``checkpoint_cost.py PRESET TOKENS REPEATS``.

Prefills of TOKENS new tokens, keeping no state and keeping four, in turns; medians of CUDA event times. Then a prompt
that resumes under the profiler: operators and copies that move as much as a layer's state. Prints JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.policy.boundaries import Boundary, Reason
from tests.engine_helpers import greedy, random_tokens

CHECKPOINTS = 4
MOVING = ("copy_", "index", "gather", "scatter", "clone", "cat", "contiguous")


def keep_four(cache):
    """Whatever the policy says, prompts keep four states, evenly spread; while `wanted` is off, none."""
    wanted = {"on": True}

    def boundaries(match):
        blocks = match.chain.tokens // cache.block_tokens
        positions = sorted({blocks * (i + 1) // CHECKPOINTS * cache.block_tokens for i in range(CHECKPOINTS)})
        return tuple(Boundary(position, Reason.JUNCTION) for position in positions) if wanted["on"] else ()

    cache._boundaries = boundaries
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


def moved(engine, request_id, prompt, state_elements):
    """Operators of the first step with an input as large as one layer's SSM state, and device-to-device copies."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    engine.add_request(request_id, prompt, greedy(2, return_log_probs=False))
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        engine.step_modern()
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step_modern()
    operators, copies = Counter(), Counter()
    for event in profile.events():
        shapes = [tuple(shape) for shape in event.input_shapes or () if shape]
        large = [
            s for s in shapes if math.prod(s) >= state_elements and s[-1:] == engine.context.mamba_ssm_states_shape[-1:]
        ]
        if large and any(part in event.name for part in MOVING):
            operators[f"{event.name} {large[0]}"] += 1
        if "Memcpy DtoD" in event.name:
            copies[event.name] += 1
    return dict(operators), dict(copies)


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
        state = math.prod(engine.context.mamba_ssm_states_shape)
        hit = last[: tokens // 2 + 256] + random_tokens(300, seed=7, vocabulary=vocabulary)
        operators, copies = moved(engine, 10_001, hit, state)
        reused = engine.context.prefix_stats().reused_tokens - reused
    medians = {name: statistics.median(values) for name, values in (("none", times[False]), ("four", times[True]))}
    report = {"platform": platform.describe(), "preset": preset, "tokens": tokens, "repeats": int(repeats)}
    report |= {"median_ms": medians, "four_over_none": medians["four"] / medians["none"]}
    report |= {"hit_reused_tokens": reused, "moving_operators": operators, "device_copies": copies}
    print(json.dumps(report))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
