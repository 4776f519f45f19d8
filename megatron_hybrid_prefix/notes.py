"""Lines for whoever runs the process, also where nobody has set up a log."""

from __future__ import annotations

import logging
import os
import sys


def say(logger: logging.Logger, line: str, *, on_each_rank: bool = False) -> None:
    """To the log, or, as most scripts build engines before they set one up, to stderr; then by the first rank only."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif on_each_rank or os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"megatron_hybrid_prefix: {line}", file=sys.stderr, flush=True)
