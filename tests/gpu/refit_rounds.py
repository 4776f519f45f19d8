"""Rounds of RL: seconds of generation with and without the cache, and of a look at the weights.

Usage: ``refit_rounds.py PRESET [PROMPTS SAMPLES PROMPT_TOKENS NEW_TOKENS]``; no test runs it. A round samples a group of answers to
each prompt; then the engine is suspended, each weight changes in place, and it resumes. Graphs are kept. The engines take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.state.weights import WeightSamples
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform
from tests.gpu.measure import ON_GPU, graph_fields, synchronize
from tests.gpu.models import layers_for
from tests.harness.engine_helpers import random_tokens

ROUNDS = 3


def look_ms(model: Any) -> str:
    """Medians of a look at all weights, and of the part that waits for the device."""
    samples, spent = WeightSamples(model), []
    for _ in range(50):
        synchronize()
        start_s = time.perf_counter()
        assert samples.changed(experts=False) is None
        spent.append((time.perf_counter() - start_s) * 1e3)
    parameters = sum(weight.numel() for weight in model.parameters())
    tensors = len(list(model.parameters()))
    return f"{statistics.median(spent):.3f} ms ({min(spent):.3f} to {max(spent):.3f}): {parameters:,} parameters, {tensors} tensors"


def engine_of(model: Any, prefix: HybridPrefixConfig | None, rows: int, tokens: int) -> Any:
    """An engine that keeps its memory and graphs over a suspension, as NeMo-RL's."""
    from megatron_hybrid_prefix.upstream.names import KVCacheManagementMode

    return build_engine(
        model,
        prefix,
        max_sequence_length=tokens,
        max_requests=rows,
        buffer_size_gb=8 if ON_GPU else 0.5,
        kv_cache_management_mode=KVCacheManagementMode.PERSIST,
        **graph_fields(graphs=True)[1],
    )


@torch.inference_mode()
def generate(engine: Any, prompts: list[list[int]], samples: int, new_tokens: int) -> tuple[float, int]:
    """Seconds of a round, and prompt tokens that were not computed."""
    from megatron_hybrid_prefix.upstream.names import SamplingParams

    params = SamplingParams(
        num_tokens_to_generate=new_tokens, temperature=1.0, return_log_probs=True, skip_prompt_log_probs=True
    )
    synchronize()
    start_s = time.perf_counter()
    records = engine.generate([prompt for prompt in prompts for _ in range(samples)], params)
    synchronize()
    return time.perf_counter() - start_s, sum(record.merge().num_cached_tokens for record in records)


def main(preset: str, *sizes: str) -> None:
    groups, samples, prompt_tokens, new_tokens = map(int, sizes or (4, 8, 600, 256) if ON_GPU else (2, 2, 300, 8))
    print(ensure_platform().describe(), flush=True)
    config = get_preset(preset)
    if ON_GPU:
        twice = get_preset(preset, layer_pattern=config.layer_pattern * 2)
        print(
            f"a look at twice the layers: {look_ms(build_hybrid_model(twice, seed=0, **layers_for(twice)))}", flush=True
        )
        torch.cuda.empty_cache()
    fields = layers_for(config) | graph_fields(graphs=True)[0]
    # A model each: megatron's graphs of a layer take one class of contexts.
    models = [build_hybrid_model(config, seed=0, **fields) for _ in range(2)]
    print(f"a look: {look_ms(models[0])}", flush=True)
    made = (groups * samples, prompt_tokens + new_tokens)
    prefixes = {"off": None, "this cache": HybridPrefixConfig()}
    engines = {name: engine_of(model, prefixes[name], *made) for name, model in zip(prefixes, models, strict=True)}
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(ROUNDS + 1):  # the first one warms up
        prompts = [random_tokens(prompt_tokens, 100 * number + group, config.vocab_size) for group in range(groups)]
        for name, engine in sorted(engines.items(), reverse=number % 2 == 1):
            seconds, reused = generate(engine, prompts, samples, new_tokens)
            spent[name].append(seconds)
            print(
                f"round {number}, {name}: {seconds:.3f} s, {reused:,} of {groups * samples * prompt_tokens:,} reused",
                flush=True,
            )
        for engine in engines.values():
            engine.suspend()
        for model in models:
            for weight in model.parameters():
                weight.data.mul_(1.01)
        for engine in engines.values():
            engine.resume()
    for name, seconds in spent.items():
        print(f"{name}: median {statistics.median(seconds[1:]):.3f} s a round")


if __name__ == "__main__":
    main(*sys.argv[1:])
