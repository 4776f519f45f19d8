"""A Mooncake Store that is late or incomplete on one rank, as JSON. Usage: ``torchrun mooncake_tier.py OUT.json``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import pytest

from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.limits import HANG_S
from tests.harness.workers.shared_tier import run_sessions


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


def main(out):
    use_fake_mooncake(pytest.MonkeyPatch(), FakeCluster())  # each rank has its namespace, so it can have a store, too
    run_sessions(
        out,
        ("M*-M*-", int(os.environ["WORLD_SIZE"]), 1),
        url_of=lambda wait_s: f"mooncake://127.0.0.1:50051?min_tokens=0&wait_s={wait_s}&ask_s={HANG_S}&refresh_s=1e-9",
        lose=lose,
    )


if __name__ == "__main__":
    main(sys.argv[1])
