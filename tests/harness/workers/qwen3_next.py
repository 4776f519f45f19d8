"""Answers of ``tiny-qwen3-next`` in one layout on GPUs, as JSON. Usage: ``torchrun qwen3_next.py OUT.json NAME``.

One rank alone builds the layout's model undivided.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import described, greedy, random_tokens, run_to_end
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import damage_sources

BLOCK_TOKENS = 64
# Sizes of the layout, and changes of the preset: two ranks share one key/value head; each stage has attention.
LAYOUTS = {
    "tp2": ({"tp": 2}, {"num_query_groups": 1}),
    "pp2": ({"pp": 2}, {"layer_pattern": "GE*EGE*E"}),
    "ep2": ({"ep": 2}, {}),
}


def build(name, platform, seed=0):
    """This rank's shard of a layout's model, in float32: Transformer Engine's layers would multiply in TF32."""
    config = get_preset("tiny-qwen3-next", **LAYOUTS[name][1])
    return build_hybrid_model(config, seed=seed, platform=platform, transformer_impl="local")


def prompts():
    """One after another, then those in the last list together."""
    prefix = random_tokens(3 * BLOCK_TOKENS, seed=1)
    tails = [prefix[: 2 * BLOCK_TOKENS] + random_tokens(own, seed=10 + own) for own in (1, 3, 70)]
    return [[prefix], *[[tail] for tail in tails], [*tails, prefix[: BLOCK_TOKENS + 5]]]


def answers(model, damaged=False):
    """What the requests say, with the cache on. All data-parallel ranks send the same ones, and so step alike."""
    engine = build_engine(
        model,
        HybridPrefixConfig(cache_gb=0.01, check_ranks=True),
        max_sequence_length=512,
        max_requests=8,
        block_size_tokens=BLOCK_TOKENS,
        async_sched_mode="async",
    )
    if damaged:
        damage_sources(engine.context)
    finished: dict = {}
    for batch in prompts():
        for prompt in batch:
            engine.add_request(len(finished) + len(engine.requests), prompt, greedy(5))
        run_to_end(engine, finished)
    engine.context.check_integrity()
    return described(finished)


def main(out, name):
    sizes = LAYOUTS[name][0] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    platform = ensure_platform(device="cuda", timeout_s=COLLECTIVE_HANG_S["cuda"], **sizes)
    model = build(name, platform)
    found = {"answers": answers(model), "platform": platform.describe()}
    found["damaged"] = answers(model, damaged=dist.get_rank() == dist.get_world_size() - 1)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
