"""Counts calls that make the CPU wait for the GPU, in steps of each engine; and forbids them in the cache's own code.

Usage: ``syncs.py [PRESET]``. Prints JSON: synchronising calls that torch warned of, by engine and kind of step. In the
end memory moves between KV and states.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from contextlib import contextmanager

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import report, started
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, random_tokens
from tests.harness.named_models import named, runs_on_megatron

PREFIX_TOKENS = 1024
SHORT_TOKENS, LONG_TOKENS = 300, 2600
SIZES = {"block_tokens": 256, "max_requests": 8}
BLOCKS = 120
# Sampling with which a decode step of asynchronous scheduling waits for no forward.
ASYNC_OPTIONS = {
    "greedy": {},
    "sampled": {"top_k": 0, "top_p": 0.9, "temperature": 0.7},
    "log-probs": {"top_k": 0, "return_log_probs": True},
}


@contextmanager
def mode(name):
    """A context with ``torch.cuda.set_sync_debug_mode``; without a GPU nothing."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(name)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def forbid_syncs(engine):
    """Waiting for the GPU raises in plan, publish, and all parts of a forward that this package runs."""
    from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer  # needs a platform that runs
    from megatron_hybrid_prefix.layers.slot_layer import SlotLayer

    context = engine.context
    parts = [
        (context.prefix_cache, ("match", "admit", "plan", "publish", "release", "can_admit")),
        (context, ("prefix_request", "check_availability", "blocks_of_chunk", "prepare_step", "show_step")),
        (context, ("allow_one_token_prefills", "zero_live_states")),
        (context.prefill_step, ("prepare", "copy", "show")),
        (context.states, ("flush",)),
    ]
    names_of = {
        HybridPrefixMambaMixer: ("prefill", "decode"),
        SlotLayer: ("slot_inputs", "slot_prefill", "slot_decode_rows", "slot_outputs"),
    }
    parts += [
        (module, names)
        for module in engine.controller.inference_wrapped_model.model.modules()
        for kind, names in names_of.items()
        if isinstance(module, kind)
    ]
    called = Counter()

    def forbidding(name, original):
        def call(*args, **kwargs):
            called[name] += 1
            with mode("error"):
                return original(*args, **kwargs)

        return call

    if context.moves is not None:
        parts.append((context.moves, ("launch",)))
    for owner, names in parts:
        for name in names:
            setattr(owner, name, forbidding(name, getattr(owner, name)))
    return called


def waits(caught):
    """How many of the warnings are of calls that make the CPU wait for the GPU."""
    return sum("synchronizing" in str(warning.message) for warning in caught)


def counted(engine, prompt, request_id, **options):
    """Synchronising calls of a request: of its admission and first step, and the least of the decode steps after it."""
    found = []
    engine.add_request(request_id, prompt, greedy(6, **{"return_log_probs": False} | options))
    while engine.has_unfinished_requests():
        with warnings.catch_warnings(record=True) as caught, mode("warn"):
            warnings.simplefilter("always")
            engine.step_modern()
        found.append(waits(caught))
    return {"prefill": found[0], "decode": min(found[1:-1])}


def move_memory(engine, seed):
    """Sends short prompts, long ones and short ones again, each twice. Returns the most synchronising calls of a request."""
    lengths = [SHORT_TOKENS] * 30 + [LONG_TOKENS] * 6 + [SHORT_TOKENS] * 30
    found = []
    for number, length in enumerate(lengths):
        prompt = random_tokens(length, seed=1000 * seed + number)
        for again in range(2):
            found.append(counted(engine, prompt, 1000 * seed + 2 * number + again))
    return {kind: max(one[kind] for one in found) for kind in found[0]}


def main(args):
    preset = args.preset
    model = build_hybrid_model(named(preset), seed=0, cuda_graph_impl="none")
    plain = build_upstream_engine if runs_on_megatron(named(preset)) else build_engine
    fields = {"max_sequence_length": 4096, "max_requests": SIZES["max_requests"], **kv_budget(model, BLOCKS, **SIZES)}
    prefix = random_tokens(PREFIX_TOKENS, seed=1)
    found = {}
    engines = {
        "off": None,
        # With "lru" each kind of prompts takes the memory of the one before.
        "ours": HybridPrefixConfig(cache_gb=cache_gb_for(model, BLOCKS, **SIZES), eviction_policy="lru"),
    }
    with torch.inference_mode():
        for name, config in engines.items():
            engine = plain(model, **fields) if config is None else build_engine(model, config, **fields)
            for repeat in range(2):  # the first compiles kernels, which may wait
                if repeat == 1 and config is not None:
                    found[f"{name}, called"] = forbid_syncs(engine)
                first = [repeat, *prefix[:-1]]  # four blocks of 256, which the others share
                for number, (kind, own) in enumerate(
                    {"whole": 0, "short tail": 3, "long tail": 300, "answer that fills a block": 253}.items()
                ):
                    prompt = first + random_tokens(own, seed=2 + number)
                    found[f"{name}, {kind}"] = counted(engine, prompt, 10 * repeat + number)
            if config is not None:
                stats = engine.context.prefix_stats()
                found |= {f"{name}, reused": stats.reused_tokens, f"{name}, published": stats.checkpoints_published}
            for seed in (1, 2):  # as above
                found[f"{name}, moves"] = move_memory(engine, seed)
        found["memory use"] = dataclasses.asdict(engine.context.prefix_cache.memory_use())
        from megatron_hybrid_prefix.upstream.config import AsyncScheduleMode  # needs a platform that runs

        engine = build_engine(model, engines["ours"], async_sched_mode=AsyncScheduleMode.ASYNC, **fields)
        for number, (name, options) in enumerate(ASYNC_OPTIONS.items()):
            prompt = random_tokens(SHORT_TOKENS, seed=3)
            for again in range(2):  # the first compiles kernels
                found[f"async, {name}"] = counted(engine, prompt, 2 * number + again, **options)
    report(args, found)


if __name__ == "__main__":
    with started(__doc__, "preset=small") as arguments:
        main(arguments)
