"""A shared folder that is late or incomplete on one rank, as JSON. Usage: ``torchrun shared_tier.py OUT.json tp|pp FOLDER``."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.tiers import file as file_tier
from megatron_hybrid_prefix.tiers.shared_tier_moves import SharedTierMoves
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S, wait_until
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import build
from tests.harness.workers.shared_sessions import run_sessions


@contextmanager
def slow(tier):
    """No read of this rank's disk comes back in time. A request that waits gives up once that is known."""
    over, file_reads, fetched = threading.Event(), file_tier.FileReads, SharedTierMoves.fetched

    def late_reads(*arguments):
        assert over.wait(HANG_S)
        return file_reads(*arguments)

    def fetched_late(moves, load_id, wait_s=0.0):
        if wait_s:
            wait_until(tier._is_stuck, "the read takes longer than a request waits")
        return fetched(moves, load_id, wait_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_tier, "FileReads", late_reads)
        patched.setattr(SharedTierMoves, "fetched", fetched_late)
        yield
    over.set()


@contextmanager
def lose(folder, tier):
    """This rank's states are gone."""
    for path in Path(folder, "v1", tier._name.hex()).rglob("state-*"):
        path.unlink()
    yield


def main(out, layout, folder):
    ranks = int(os.environ["WORLD_SIZE"])
    pattern, tp, pp = ("M*-M*-", ranks, 1) if layout == "tp" else ("M*-|M*-", 1, ranks)
    platform = ensure_platform(tp=tp, pp=pp, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    found = run_sessions(
        build(pattern, tp, pp, platform),
        (pattern, tp, pp),
        url_of=lambda wait_s: f"file://{folder}?gb=1&min_tokens=0&wait_s={wait_s}",
        faults={"late": slow, "missing": partial(lose, folder)},
    )
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
