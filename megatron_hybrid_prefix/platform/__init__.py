"""Run megatron-core's dynamic engine on the machine at hand: `ensure_platform` picks CUDA or CPU and starts it.

Importing this package does not import megatron or replace any name. `ensure_platform` does both; `undo_platform` restores every
name. `patches` lists the replacements; `active_rebindings` returns those in force.
"""

from __future__ import annotations

from megatron_hybrid_prefix.platform.start import (
    Platform,
    active_rebindings,
    ensure_platform,
    join_ranks,
    replace_names,
    running_platform,
    shut_down,
    undo_platform,
)

__all__ = [
    "Platform",
    "active_rebindings",
    "ensure_platform",
    "join_ranks",
    "replace_names",
    "running_platform",
    "shut_down",
    "undo_platform",
]
