"""A tier behind the host with different entries on each rank, as JSON. Usage: ``torchrun tier_behind.py OUT.json``."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PATTERN = "M*-M*-"
HOST_GB = 0.0003
PROMPTS = [random_tokens((2 + number % 3) * BLOCK_TOKENS + 9, seed=70 + number) for number in range(12)]


def forgetful(behind):
    """The last rank's tier refuses every third entry."""
    put, offered = behind.put, iter(range(10**9))
    behind.put = lambda namespace, entry: next(offered) % 3 > 0 and put(namespace, entry)


def main(out):
    platform = ensure_platform(tp=int(os.environ["WORLD_SIZE"]), pp=1, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    model = build(PATTERN, platform.world_size, 1, platform)
    found = {}
    for name, fields in {
        "off": {"cached": False},
        "behind": {"host_gb": HOST_GB, "shared": f"dictionary://?min_tokens=0&wait_s={HANG_S}", "check_ranks": True},
    }.items():
        session = Session(model, PATTERN, platform.world_size, 1, mode="legacy", slots=2, blocks=9, **fields)
        if session.cached and dist.get_rank() == dist.get_world_size() - 1:
            forgetful(session.engine.context.prefix_cache._store.host.behind.tier)
        for _ in range(3):
            for prompt in PROMPTS:
                session.send(prompt)
                if session.cached:
                    session.engine.context.host_moves.drain(HANG_S)  # what one rank writes later, the other may lose
        found[name] = session.found()
        if session.cached:
            found["kept"] = len(session.engine.context.prefix_cache._store.host.behind.tier.entries)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
