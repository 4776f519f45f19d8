"""A shared folder that is late or incomplete on one rank, as JSON. Usage: ``torchrun shared_tier.py OUT.json tp|pp FOLDER``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.tiers import file as file_tier
from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PROMPTS = [random_tokens(3 * BLOCK_TOKENS + 9, seed=70 + number) for number in range(2)]


@contextmanager
def slow(tier):
    """No read of this rank's disk comes back in time."""
    read_files = file_tier.read_files

    def late(*arguments):
        time.sleep(3 * tier.wait_s)
        return read_files(*arguments)

    file_tier.read_files = late
    yield
    file_tier.read_files = read_files


def main(out, layout, folder):
    ranks = int(os.environ["WORLD_SIZE"])
    tp, pp = (ranks, 1) if layout == "tp" else (1, ranks)
    platform = ensure_platform(tp=tp, pp=pp, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    pattern = "M*-M*-" if pp == 1 else "M*-|M*-"
    model = build(pattern, tp, pp, platform)
    last = dist.get_rank() == ranks - 1
    found, decisions = {}, []
    for name, wait_s in {"off": 0, "write": HANG_S, "late": 0.1, "missing": HANG_S, "hit": HANG_S}.items():
        shared = {"host_gb": 0.01, "shared": f"file://{folder}?gb=1&min_tokens=0&wait_s={wait_s}", "check_ranks": True}
        cached = name != "off"
        session = Session(model, pattern, tp, pp, mode="legacy", slots=8, cached=cached, **(shared if cached else {}))
        if cached:
            moves = session.engine.context.host_moves
            tier = session.engine.context.prefix_cache.inspect.host_tier.behind.tier
        if name == "missing" and last:
            for path in Path(folder, "v1", tier._name.hex()).rglob("state-*"):
                path.unlink()
        with slow(tier) if name == "late" and last else nullcontext():
            session.send(*PROMPTS)
        found[name] = {"answers": session.found()["answers"]}
        if cached:
            stats = session.engine.context.prefix_stats()
            found[name] |= {"fallbacks": stats.fallbacks, "faults": stats.tiers["shared"].faults}
            decisions.append(session.decisions)
            assert moves.drain(HANG_S)
        dist.barrier()
    write_findings(out, found | {"decisions": decisions})
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
