"""Run megatron-core's dynamic engine on the machine at hand: `ensure_platform` picks CUDA or CPU and starts it.

Importing this package does not import megatron or replace any name. `ensure_platform` does both, and `patch_platform` does it without
starting process groups; `undo_platform` restores every name. `patches` lists the replacements; `active_rebindings` returns those in force.
"""

from __future__ import annotations

from megatron_hybrid_prefix.platform.start import (
    Machine,
    Platform,
    active_rebindings,
    ensure_platform,
    join_ranks,
    patch_platform,
    patched_machine,
    replace_names,
    running_platform,
    shut_down,
    undo_platform,
)

__all__ = [
    "Machine",
    "Platform",
    "active_rebindings",
    "ensure_platform",
    "join_ranks",
    "patch_platform",
    "patched_machine",
    "replace_names",
    "running_platform",
    "shut_down",
    "undo_platform",
]
