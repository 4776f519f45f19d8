"""A Mooncake Store that is late or incomplete on one rank, as JSON. Usage: ``torchrun mooncake_tier.py OUT.json fake|HOST:PORT``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import pytest

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import build
from tests.harness.workers.shared_sessions import run_sessions


@contextmanager
def lose(tier):
    """States of this rank are lost between the question and the read."""
    call = tier._client.call

    def without(method, *arguments):
        if method == "batch_get_into_multi_buffers" and "/state/" in arguments[0][0]:
            call("remove", arguments[0][0], True)
        return call(method, *arguments)

    tier._client.call = without
    yield


def main(out, master):
    ranks = int(os.environ["WORLD_SIZE"])
    if master == "fake":  # each rank has its namespace, so it can have a store, too
        use_fake_mooncake(pytest.MonkeyPatch(), FakeCluster())
        master = "127.0.0.1:50051"
    platform = ensure_platform(tp=ranks, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    pattern = "M*-M*-"
    found = run_sessions(
        build(pattern, ranks, 1, platform),
        (pattern, ranks, 1),
        url_of=lambda wait_s: f"mooncake://{master}?min_tokens=0&wait_s={wait_s}&ask_s={HANG_S}&refresh_s=1e-9",
        lose=lose,
    )
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
