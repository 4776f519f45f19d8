"""The cache inside megatron-core: context, block allocator, mixer, engine.

All names except those of ``build.py`` import megatron on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_hybrid_prefix.mcore.entrypoints.build import build_engine, build_engine_from_args, build_upstream_engine
from megatron_hybrid_prefix.upstream.version import check_version

_PARTS = {
    "add_hybrid_prefix_args": "mcore.entrypoints.arguments",
    "hybrid_prefix_config_from_args": "mcore.entrypoints.arguments",
    "HybridPrefixBlockAllocator": "mcore.context.blocks",
    "HybridPrefixContext": "mcore.context.context",
    "HybridPrefixController": "mcore.engine.controller",
    "HybridPrefixEngine": "mcore.engine.engine",
    "HybridPrefixMambaMixer": "layers.mamba2",
    "install": "mcore.entrypoints.install",
    "installed": "mcore.entrypoints.install",
    "invariant_forward": "mcore.entrypoints.trainer",
    "restore_mixers": "layers.kinds",
    "uninstall": "mcore.entrypoints.install",
    "use_slot_mixers": "layers.kinds",
}

__all__ = ["build_engine", "build_engine_from_args", "build_upstream_engine", *_PARTS]


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _PARTS[name] not in ("mcore.entrypoints.arguments", "mcore.entrypoints.install"):  # all others import megatron
        check_version()
    return getattr(import_module(f"megatron_hybrid_prefix.{_PARTS[name]}"), name)
