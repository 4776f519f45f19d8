"""Counts calls that make the CPU wait for the GPU, in steps of each engine; and forbids them in the cache's own code.

Usage: ``syncs.py [PRESET]``. Prints JSON: synchronising calls that torch warned of, by engine and kind of step.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from contextlib import contextmanager

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, random_tokens
from tests.harness.named_models import named, runs_on_megatron

PREFIX_TOKENS = 1024


@contextmanager
def mode(name):
    """A context with ``torch.cuda.set_sync_debug_mode``."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(name)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def forbid_syncs(engine):
    """Waiting for the GPU raises in plan, publish, and all parts of a forward that this package runs."""
    from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixPrefill  # needs a platform that runs
    from megatron_hybrid_prefix.layers.slot_layer import SlotLayer

    context = engine.context
    parts = [
        (context.prefix_cache, ("match", "admit", "plan", "publish", "release", "can_admit")),
        (context, ("prefix_request", "check_availability", "blocks_of_chunk", "prepare_prefill", "show_prefill")),
        (context, ("allow_one_token_prefills", "zero_live_states")),
        (context.prefill_step, ("prepare", "copy", "show")),
    ]
    names_of = {
        HybridPrefixPrefill: ("prefill",),
        SlotLayer: ("slot_inputs", "slot_prefill", "slot_decode", "slot_outputs"),
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

    for owner, names in parts:
        for name in names:
            setattr(owner, name, forbidding(name, getattr(owner, name)))
    return called


def counted(engine, prompt, request_id):
    """Synchronising calls of a request: of its admission and first step, and the least of the decode steps after it."""
    found = []
    engine.add_request(request_id, prompt, greedy(6, return_log_probs=False))
    while engine.has_unfinished_requests():
        with warnings.catch_warnings(record=True) as caught, mode("warn"):
            warnings.simplefilter("always")
            engine.step_modern()
        found.append(sum("synchronizing" in str(warning.message) for warning in caught))
    return {"prefill": found[0], "decode": min(found[1:-1])}


def main(preset="small"):
    ensure_platform()
    model = build_hybrid_model(named(preset), seed=0)
    plain = build_upstream_engine if runs_on_megatron(named(preset)) else build_engine
    fields = {"max_sequence_length": 4096, "max_requests": 8, "buffer_size_gb": 2}
    prefix = random_tokens(PREFIX_TOKENS, seed=1)
    found = {}
    with torch.inference_mode():
        for name, config in (("off", None), ("ours", HybridPrefixConfig(mamba_gb=1))):
            engine = plain(model, **fields) if config is None else build_engine(model, config, **fields)
            for repeat in range(2):  # the first compiles kernels, which may wait
                if repeat == 1 and config is not None:
                    called = forbid_syncs(engine)
                first = [repeat, *prefix[:-1]]  # four blocks of 256, which the others share
                for number, (kind, own) in enumerate((("whole", 0), ("short tail", 3), ("long tail", 300))):
                    prompt = first + random_tokens(own, seed=2 + number)
                    found[f"{name}, {kind}"] = counted(engine, prompt, 10 * repeat + number)
        stats = engine.context.prefix_stats()
        found |= {
            "called": dict(called),
            "reused_tokens": stats.reused_tokens,
            "published": stats.checkpoints_published,
        }
    print(json.dumps(found))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
