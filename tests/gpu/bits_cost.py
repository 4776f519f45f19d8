"""What ``exact="bits"`` costs a prefill, and a score over the prefill of its tokens; engines take turns in one process. On an idle GPU::

    python -m tests.gpu.bits_cost [--preset hybrid-4b] [--tokens 8192] [--rounds 6]

``--preset tiny --device cpu --tokens 500`` tries it. Milliseconds, the median without the first round. Decodes: `tests.gpu.decode_profile`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import BLOCK_TOKENS, engine_fields, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, greedy

MORE_TOKENS = 50  # of a second score, behind what the first has left


@torch.inference_mode()
def main(args) -> None:
    model, dice = (
        build_hybrid_model(args.preset, seed=0, cuda_graph_impl="none", transformer_impl="local"),
        random.Random(0),
    )
    fields, took = engine_fields(model, args.tokens + MORE_TOKENS, prompts=4), defaultdict(list)
    blocks, sizes = (
        4 * (args.tokens // BLOCK_TOKENS + 2),
        {"block_tokens": BLOCK_TOKENS, "max_requests": 4, "is_open": True},
    )
    fields |= {"max_requests": 4, "materialize_only_last_token_logits": False}
    kinds = {"default, float32": {"state_dtype": "float32"}, "default": {}, "bits": {"exact": "bits"}}
    memory, params = cache_gb_for(model, blocks, states=16, **sizes), greedy(1, return_log_probs=False)
    engines = {
        name: build_engine(model, HybridPrefixConfig(cache_gb=memory, **kind), **fields) for name, kind in kinds.items()
    }

    def tokens(count):
        return [dice.randrange(model.hybrid_config.vocab_size) for _ in range(count)]

    def measure(name, call, given):
        synchronize()
        start_s = time.perf_counter()
        call(given)
        synchronize()
        took[name].append(1e3 * (time.perf_counter() - start_s))

    for _ in range(args.rounds):
        for name, engine in engines.items():
            measure(name, lambda prompt, engine=engine: engine.generate([prompt], params), tokens(args.tokens))
        scored = tokens(args.tokens)
        measure("score", engines["bits"].score, scored)
        measure(f"score of {MORE_TOKENS} more", engines["bits"].score, scored + tokens(MORE_TOKENS))
    for name, ms in took.items():
        print(f"{args.preset}: {name:20} {statistics.median(ms[1:]):9.1f}", flush=True)


if __name__ == "__main__":
    with started(__doc__, preset="hybrid-4b", tokens=8192, rounds=6) as arguments:
        main(arguments)
