"""The last rank kills itself between two steps. The others go on, and must not complete. Usage: ``torchrun killed.py OUT``.

Each rank writes its process id to ``OUT.rankN`` when it gets this far.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_hybrid_prefix.platform import ensure_platform
from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import DEVICE
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PATTERN = "M*-M*-"
STEPS_BEFORE_DEATH = 5


def main(out: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    platform = ensure_platform(tp=ranks, device=DEVICE, timeout_s=COLLECTIVE_HANG_S[DEVICE])
    model = build(PATTERN, ranks, 1, platform)
    session = Session(model, PATTERN, ranks, 1, mode="legacy", slots=8, check_ranks=True)
    for number in range(3):
        session.add(random_tokens(BLOCK_TOKENS + 9, seed=number), 40)
    session.run(steps=STEPS_BEFORE_DEATH)
    Path(f"{out}.rank{platform.rank}").write_text(str(os.getpid()))
    if platform.rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    session.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
