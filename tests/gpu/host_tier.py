"""Prompts that come back from the host while others run. Prints JSON.

Usage: ``host_tier.py legacy|async [PRESET]``.
"""

from __future__ import annotations

import random

import torch

from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import report, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, random_tokens
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.named_models import named

PROMPTS, ROUNDS, BLOCK = 12, 4, 256
HOST_GB = 2.0  # all prompts' entries: 12 of 8 blocks of 1 MiB and states of up to 8.25


def main(args):
    mode, preset = args.mode, args.preset
    model = build_hybrid_model(named(preset), seed=0, cuda_graph_impl="none")
    vocabulary = named(preset).vocab_size
    cache_gb = cache_gb_for(model, 44, states=6, block_tokens=BLOCK, max_requests=4)
    fields = {"max_sequence_length": 8192, "max_tokens": 8192, "block_size_tokens": BLOCK, "async_sched_mode": mode}
    served = EngineHarness(model, cache_gb=cache_gb, host_gb=HOST_GB, **fields)
    cache, memory, dice = served.cache, served.context.shared_memory, random.Random(0)
    prompts = [random_tokens(8 * BLOCK + 30, seed=i, vocabulary=vocabulary) for i in range(PROMPTS)]
    key_of = [cache.chain(prompt).keys[-1] for prompt in prompts]
    first, equal, unequal, compared, difference = {}, 0, 0, 0, 0.0
    states = {}

    def look():
        nonlocal equal, unequal
        synchronize()
        for index, key in enumerate(key_of):
            node = cache.node(key)
            if node is not None and node.slot >= 0:
                now = {name: tensor.clone() for name, tensor in memory.state(node.slot).items()}
                before = states.setdefault(index, now)
                same = all(torch.equal(now[name], before[name]) for name in now)
                equal, unequal = equal + (same and before is not now), unequal + (not same)

    for turn in range(ROUNDS):
        order = list(range(PROMPTS))
        dice.shuffle(order)
        for pair in zip(order[::2], order[1::2], strict=True):
            ids = {}
            for index in pair:
                ids[served.add(prompts[index], 16)] = index
                served.step(1 + dice.randrange(3))
            served.run()
            look()
            for request_id, index in ids.items():
                request = served.finished[request_id]
                if turn == 0:
                    first[index] = request
                    continue
                for token, log_prob, was, its in zip(
                    request.generated_tokens,
                    request.generated_log_probs,
                    first[index].generated_tokens,
                    first[index].generated_log_probs,
                    strict=True,
                ):
                    if token != was:
                        break
                    compared, difference = compared + 1, difference + abs(log_prob - its)
    stats = served.context.prefix_stats().as_dict()
    found = {name: stats[name] for name in ("reused_tokens_host", "fallbacks")}
    found |= {name: stats["tiers"]["host"][name] for name in ("loads", "stores", "seconds", "seconds_waited")}
    found |= {
        "moved_blocks": cache.memory_use().moved_blocks,
        "preset": preset,
        "mode": mode,
        "bit_equal_states": equal,
        "unequal_states": unequal,
        "tokens_compared": compared,
    }
    report(args, found | {"mean_log_prob_difference": difference / max(1, compared)})


if __name__ == "__main__":
    with started(__doc__, "mode", "preset=small") as arguments:
        main(arguments)
