"""Answers of ``tiny-moe`` with the experts on two ranks, as JSON. Usage: ``torchrun expert_parallel.py OUT.json``.

Each rank serves requests of its own, and takes part in the other's forwards when it has none.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import write_findings

BLOCK_TOKENS = 64
MODES = ("legacy", "async")


def prompts(rank):
    """Prompts of one rank, with a prefix per rank. Rank 1 has fewer, and is idle at the end."""
    prefix = random_tokens(3 * BLOCK_TOKENS, seed=rank)
    tails = (1, 2, 60, 130, 3) if rank == 0 else (2, 70)
    return [prefix + random_tokens(own, seed=10 * rank + own) for own in tails]


def herd(rank):
    """Prompts of rank 0 that arrive at once, with a long new prefix."""
    prefix = random_tokens(5 * BLOCK_TOKENS, seed=77)
    return [prefix + random_tokens(9 + number, seed=80 + number) for number in range(3)] if rank == 0 else []


def answers(model, rank, mode, prefix, ranks=1):
    """Answers of this rank's requests, sent one by one and all at once."""
    engine = build_engine(
        model, prefix, max_sequence_length=512, max_requests=8, block_size_tokens=BLOCK_TOKENS, async_sched_mode=mode
    )
    finished: dict = {}
    idle_forwards = 0
    for batches in ([prompt] for prompt in prompts(rank)), [prompts(rank)], [herd(rank)]:
        for batch in batches:
            for prompt in batch:
                engine.add_request(len(finished) + len(engine.requests), prompt, greedy(6))
            while engine.has_unfinished_requests():
                together(True, ranks)
                run_to_end(engine, finished, steps=1)
                if prefix is not None:
                    engine.context.check_integrity()
        while together(False, ranks):
            engine.controller.dummy_forward()
            idle_forwards += 1
            if prefix is not None:
                engine.context.check_integrity()
    return {
        "answers": [
            {
                "tokens": list(map(int, request.generated_tokens)),
                "log_probs": list(request.generated_log_probs),
                "cached_tokens": request.num_cached_tokens,
            }
            for _, request in sorted(finished.items())
        ],
        "idle_forwards": idle_forwards,
        "slots_used": 0 if prefix is None else engine.context.prefix_stats().slots_used,
    }


def together(working, ranks):
    """Whether any rank has work; every rank asks before each of its forwards."""
    if ranks == 1:
        return working
    flag = torch.tensor([int(working)], device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def main(out):
    platform = ensure_platform(ep=2, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    model = build_hybrid_model("tiny-moe", seed=0, platform=platform)
    found = {mode: answers(model, dist.get_rank(), mode, HybridPrefixConfig(mamba_gb=0.002), ranks=2) for mode in MODES}
    found["local_experts"] = sum("local_experts.1.linear_fc1" in name for name, _ in model.named_parameters())
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
