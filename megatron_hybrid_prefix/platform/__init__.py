"""Run megatron-core's dynamic engine on the machine at hand: `ensure_platform` picks CUDA or CPU and starts it.

Importing this package changes nothing and does not import megatron; `ensure_platform` does both, `undo_platform` undoes
every replacement (listed in `table`; `active_rebindings` says which are in force).
"""

from __future__ import annotations

from megatron_hybrid_prefix.platform.start import (
    Platform,
    active_rebindings,
    ensure_platform,
    replace_names,
    running_platform,
    shut_down,
    undo_platform,
)

__all__ = [
    "Platform",
    "active_rebindings",
    "ensure_platform",
    "replace_names",
    "running_platform",
    "shut_down",
    "undo_platform",
]
