"""Copies of a step that resumes from a kept state and keeps others. Usage: ``kept_states.py PRESET TOKENS``.

A prompt of TOKENS, and one more, keeps four states. Then one that shares half of it resumes under the profiler:
operators that move whole states, and the largest copy on the device. Prints JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import report, started
from tests.harness.engine_helpers import cache_gb_for, greedy, random_tokens, run_to_end
from tests.harness.named_models import named

CHECKPOINTS, BLOCK_TOKENS = 4, 256
MOVING = ("copy_", "index", "gather", "scatter", "clone", "cat", "contiguous")


def moved(engine, request_id, prompt):
    """Of the first step: operators that move whole states, the largest copy on the device in bytes, and kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    engine.add_request(request_id, prompt, greedy(2, return_log_probs=False))
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        engine.step_modern()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    state_shapes = [tuple(tensor.shape[2:]) for tensor in engine.context.shared_memory.states.values()]
    operators = Counter()
    for event in profile.events():
        for shape in map(tuple, event.input_shapes or ()):
            is_state = any(shape[-len(state) :] == state for state in state_shapes)
            if is_state and any(part in event.name for part in MOVING):
                operators[f"{event.name} {shape}"] += 1
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    sizes = [event["args"].get("bytes", 0) for event in events if "Memcpy DtoD" in event.get("name", "")]
    return dict(operators), max(sizes, default=0), sum(event.get("cat") == "kernel" for event in events)


def main(args):
    tokens, vocabulary = int(args.tokens), named(args.preset).vocab_size
    model = build_hybrid_model(named(args.preset), seed=0, cuda_graph_impl="none")
    sizes = {"block_tokens": BLOCK_TOKENS, "max_requests": 2}
    engine = build_engine(
        model,
        HybridPrefixConfig(
            cache_gb=cache_gb_for(model, 6 * tokens // BLOCK_TOKENS, states=32, **sizes),
            retention_interval_tokens=tokens // CHECKPOINTS,
        ),
        max_sequence_length=2 * tokens,
        max_tokens=2 * tokens,
        max_requests=sizes["max_requests"],
        block_size_tokens=BLOCK_TOKENS,
    )
    with torch.inference_mode():
        prompts = [random_tokens(tokens + 1, seed=seed, vocabulary=vocabulary) for seed in (1, 2)]
        for number, prompt in enumerate(prompts):  # the first compiles kernels
            engine.add_request(number, prompt, greedy(2, return_log_probs=False))
            run_to_end(engine, {})
        before = engine.context.prefix_stats()
        assert before.checkpoints_published == CHECKPOINTS * len(prompts)
        hit = prompts[-1][: tokens // 2 + BLOCK_TOKENS] + random_tokens(300, seed=7, vocabulary=vocabulary)
        operators, copied_bytes, kernels = moved(engine, len(prompts), hit)
        reused = engine.context.prefix_stats().reused_tokens - before.reused_tokens
        run_to_end(engine, {})
    found = {"preset": args.preset, "hit_reused_tokens": reused, "kernels": kernels, "moving_operators": operators}
    layer_bytes = engine.context.state_layout.slot_bytes // engine.context.num_mamba_layers
    report(args, found | {"largest_copy_bytes": copied_bytes, "state_bytes_of_a_layer": layer_bytes})


if __name__ == "__main__":
    with started(__doc__, "preset", "tokens") as arguments:
        main(arguments)
