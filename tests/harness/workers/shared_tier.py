"""A shared folder that is late or incomplete on one rank, as JSON. Usage: ``torchrun shared_tier.py OUT.json tp|pp FOLDER``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import build
from tests.harness.workers.shared_sessions import run_sessions


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
        url_of=lambda wait_s: f"file://{folder}?gb=1&min_tokens=0&wait_s={wait_s}&refresh_s=1000000",
        lose=partial(lose, folder),
    )
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
