"""Exact prefix caching for hybrid (attention + recurrent) models in megatron-core's dynamic inference engine.

Importing this package changes nothing in torch or megatron, and does not import megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.mcore import build_engine

__all__ = ["HybridPrefixConfig", "build_engine"]


def __getattr__(name: str) -> Any:
    if name == "HybridPrefixConfig":
        from megatron_hybrid_prefix.config import HybridPrefixConfig

        return HybridPrefixConfig
    if name == "build_engine":
        from megatron_hybrid_prefix.mcore import build_engine

        return build_engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
