"""Exact prefix caching for hybrid (attention + recurrent) models in megatron-core's dynamic inference engine.

Importing this package patches nothing and does not import megatron.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.mcore import (
        add_hybrid_prefix_args,
        build_engine,
        hybrid_prefix_config_from_args,
        install,
        installed,
        invariant_forward,
        uninstall,
    )

_PARTS = {
    "HybridPrefixConfig": "config",
    "add_hybrid_prefix_args": "mcore",
    "build_engine": "mcore",
    "hybrid_prefix_config_from_args": "mcore",
    "install": "mcore",
    "installed": "mcore",
    "invariant_forward": "mcore",
    "uninstall": "mcore",
}

__all__ = [
    "HybridPrefixConfig",
    "add_hybrid_prefix_args",
    "build_engine",
    "hybrid_prefix_config_from_args",
    "install",
    "installed",
    "invariant_forward",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron_hybrid_prefix.{_PARTS[name]}"), name)
