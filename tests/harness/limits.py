"""Limits of all tests: threads, and how long anything may take before it counts as hung."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# More threads only wait for each other in matrices this small, badly so beside other processes.
THREADS = int(os.environ.get("MHP_TEST_THREADS", "1"))

# A process, an answer or a condition that takes this long never comes. Not a judgement of speed: on an idle machine all
# of them take seconds, beside others ten times that. Shorter than pytest's own limit (pyproject.toml), which does
# not say what a test waited for.
HANG_S = 1200.0
# Of a collective that a rank does not join: shorter, so that the ranks themselves say what they waited for. On GPUs a rank
# learns of another's death by it.
COLLECTIVE_HANG_S = {"cpu": HANG_S / 3, "cuda": 60.0}


def wait_until(holds: Callable[[], object], what: str, *, pause_s: float = 0.05) -> None:
    """Polls until a condition holds; ``what`` names it in the AssertionError if it does not in time."""
    end_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end_s, f"not within {HANG_S:.0f} s: {what}"
        time.sleep(pause_s)
