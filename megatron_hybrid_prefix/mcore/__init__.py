"""The cache inside megatron-core: context, block allocator, mixer, engine.

Everything but `build_engine` and `build_upstream_engine` imports megatron when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_hybrid_prefix.mcore.build import build_engine, build_upstream_engine
from megatron_hybrid_prefix.platform.megatron_version import check_version

_PARTS = {
    "add_hybrid_prefix_args": "arguments",
    "build_engine_from_args": "arguments",
    "hybrid_prefix_config_from_args": "arguments",
    "HybridPrefixBlockAllocator": "blocks",
    "HybridPrefixContext": "context",
    "HybridPrefixController": "controller",
    "HybridPrefixEngine": "engine",
    "HybridPrefixMambaMixer": "mixer",
    "install": "installation",
    "installed": "installation",
    "restore_mixers": "mixer",
    "uninstall": "installation",
    "use_slot_mixers": "mixer",
}

__all__ = ["build_engine", "build_upstream_engine", *_PARTS]


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _PARTS[name] not in ("arguments", "installation"):  # the others import megatron
        check_version()
    return getattr(import_module(f"megatron_hybrid_prefix.mcore.{_PARTS[name]}"), name)
