"""Hybrid models by preset or by dimensions: Mamba2, attention, MLP and mixture-of-experts layers, in any parallel layout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig, get_preset
from megatron_hybrid_prefix.models.hf.family import Family, register_family
from megatron_hybrid_prefix.models.hf.folder import HfFolder, open_folder

if TYPE_CHECKING:
    from megatron_hybrid_prefix.models.build import build_hybrid_model
    from megatron_hybrid_prefix.models.checkpoint import load_checkpoint, save_checkpoint
    from megatron_hybrid_prefix.models.hf_save import save_hf_folder

__all__ = [
    "PRESETS",
    "Family",
    "HfFolder",
    "HybridModelConfig",
    "build_hybrid_model",
    "get_preset",
    "load_checkpoint",
    "open_folder",
    "register_family",
    "save_checkpoint",
    "save_hf_folder",
]


_NEED_MEGATRON = {
    "build_hybrid_model": "build",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "save_hf_folder": "hf_save",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_MEGATRON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_MEGATRON[name]}"), name)
