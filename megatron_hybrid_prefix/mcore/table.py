"""Every name of megatron that the cache replaces. (What a machine lacks: ``platform/table.py``.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hybrid_prefix.platform.rebinding import Rebinding


def _accepting_subclasses(original: Callable[[Any], None]) -> Callable[[Any], None]:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    def _check_supported_type(meta: Any) -> None:
        if not isinstance(meta.value, DynamicInferenceContext):
            original(meta)

    return _check_supported_type


CONTEXT_IN_CUDA_GRAPHS = (
    Rebinding(
        owner="megatron.core.transformer.cuda_graphs",
        name="_check_supported_type",
        make=_accepting_subclasses,
        why="graphs of layers take the inference context by its exact class; only replaced when graphs are asked for",
        same_signature=True,
    ),
)
