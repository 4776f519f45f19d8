"""Answers of a model of stand-ins for inference-optimized layers, as JSON. Usage: ``torchrun inference_layers.py OUT.json TP EP``."""

from __future__ import annotations

import sys

import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.expert_parallel import answers
from tests.harness.workers.launch import write_findings


def findings(model, rank, ranks=1):
    """Answers without a cache, with one, with drafted tokens, and from wrong states of the last rank."""
    cache = HybridPrefixConfig(mamba_gb=0.002)
    last = dist.get_rank() == ranks - 1
    return {
        "off": answers(model, rank, "legacy", None, ranks),
        "on": answers(model, rank, "async", cache, ranks),
        "drafts": answers(model, rank, "async", cache, ranks, num_speculative_tokens=1),
        "damaged": answers(model, rank, "legacy", cache, ranks, damaged=last, only_first=True),
    }


def main(out, tp, ep):
    platform = ensure_platform(tp=tp, ep=ep, etp=1, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    from tests.harness import inference_layers as stand_ins  # imports megatron

    stand_ins.put_stand_ins(setattr)
    model = stand_ins.build(platform)
    found = findings(model, dist.get_rank() // tp, dist.get_world_size())
    found["sequence_parallel"] = model.config.sequence_parallel
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
