"""A Mooncake Store that is late or incomplete on one rank, as JSON. Usage: ``torchrun mooncake_tier.py OUT.json fake|HOST:PORT``."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch.distributed as dist

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import random_tokens
from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PROMPTS = [random_tokens(3 * BLOCK_TOKENS + 9, seed=70 + number) for number in range(2)]


def slow(tier):
    """No read of this rank comes back in time."""
    call = tier._client.call

    def late(method, *arguments):
        if method == "batch_get_into_multi_buffers":
            time.sleep(3 * tier.wait_s)
        return call(method, *arguments)

    tier._client.call = late


def lose(tier):
    """States of this rank are lost between the question and the read."""
    call = tier._client.call

    def without(method, *arguments):
        if method == "batch_get_into_multi_buffers" and "/state/" in arguments[0][0]:
            call("remove", arguments[0][0], True)
        return call(method, *arguments)

    tier._client.call = without


def main(out, master):
    ranks = int(os.environ["WORLD_SIZE"])
    if master == "fake":  # each rank has its namespace, so it can have a store, too
        use_fake_mooncake(pytest.MonkeyPatch(), FakeCluster())
        master = "127.0.0.1:50051"
    platform = ensure_platform(tp=ranks, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    model = build("M*-M*-", ranks, 1, platform)
    last = dist.get_rank() == ranks - 1
    found, decisions = {}, []
    for name, wait_s in {"off": 0, "write": HANG_S, "late": 0.1, "missing": HANG_S, "hit": HANG_S}.items():
        url = f"mooncake://{master}?min_tokens=0&wait_s={wait_s}&ask_s={HANG_S}&refresh_s=1e-9"
        fields = {"host_gb": 0.01, "shared": url, "check_ranks": True} if name != "off" else {}
        session = Session(model, "M*-M*-", ranks, 1, mode="legacy", slots=8, cached=name != "off", **fields)
        if last and name in ("late", "missing"):
            tier = session.engine.context.prefix_cache.inspect.host_tier.behind.tier
            {"late": slow, "missing": lose}[name](tier)
        session.send(*PROMPTS)
        found[name] = {"answers": session.found()["answers"]}
        if name != "off":
            stats = session.engine.context.prefix_stats()
            found[name] |= {"fallbacks": stats.fallbacks, "faults": stats.tiers["shared"].faults}
            decisions.append(session.decisions)
            assert session.engine.context.host_moves.drain(HANG_S)
        dist.barrier()
    write_findings(out, found | {"decisions": decisions})
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
