"""The cache inside megatron-core: engine, context, allocators, mixer."""

from __future__ import annotations

from megatron_hybrid_prefix.mcore.engine import build_engine

__all__ = ["build_engine"]
