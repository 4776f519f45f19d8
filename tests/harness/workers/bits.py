"""Bits of requests in one layout, as JSON. Usage: ``torchrun bits.py OUT.json PRESET TP PP``.

Every rank runs the same random requests: batches, and with them the messages between ranks, differ in size from those of a
request alone.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from megatron_hybrid_prefix.layers import invariant
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.ops.invariant.reduce import sum_over_ranks
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.bits import BitsTraffic, by_rows
from tests.harness.workers.launch import write_findings

REQUESTS = 8
COUNTS = (1, 2, 4, 6, 10)


def sum_by_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks in an order that depends on the size of the message, as that of an all-reduce does."""
    return sum_over_ranks(x, group) if dist.get_world_size(group) == 1 else by_rows(sum_over_ranks(x, group))


def main() -> None:
    """See the module."""
    out, preset, tp, pp = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    platform = ensure_platform(tp=tp, pp=pp, device="cpu")
    stages = "|".join([get_preset(preset).layer_pattern] * pp)
    model = build_hybrid_model(get_preset(preset, layer_pattern=stages), seed=0, platform=platform)
    traffic = BitsTraffic(model, 0, REQUESTS, blocks=None, host_gb=0.0, check_ranks=True, counts=COUNTS)
    traffic.run()
    alone = traffic.alone()
    found = {"differing": traffic.differing(alone), "finished": len(traffic.harness.finished)}
    in_order, invariant.sum_over_ranks = invariant.sum_over_ranks, sum_by_rows
    traffic = BitsTraffic(model, 0, REQUESTS, blocks=None, host_gb=0.0, counts=COUNTS)
    traffic.run()
    invariant.sum_over_ranks = in_order
    found["differing_by_rows"] = traffic.differing(alone)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main()
