"""What `build_engine` chooses on a GPU where its caller leaves it open: the fastest way to schedule steps, and to launch them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_hybrid_prefix.support.environment import say
from megatron_hybrid_prefix.upstream.config import AsyncScheduleMode, get_attr_wrapped_model
from megatron_hybrid_prefix.upstream.graphs import block_problem, captures_whole_forward, has_graphs

logger = logging.getLogger(__name__)

GRAPHS = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 2048}
"""Kinds of step are chosen by `finer_kinds`. A step of more tokens keeps the GPU busy for as long as its kernels are launched."""


def fastest_fields(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of megatron's ``InferenceConfig`` that the caller does not set, on a GPU; a line says what they are.

    Asynchronous scheduling, and CUDA graphs if the model was built for them (``cuda_graph_impl="local"``, the default of
    `build_hybrid_model`). Nothing on a CPU, which launches nothing ahead.

    Args:
        model: Megatron's.
        given: The caller's fields.
    """
    if next(model.parameters()).device.type != "cuda":
        return {}
    config = get_attr_wrapped_model(model, "config")
    chosen: dict[str, Any] = {}
    words = []
    if "async_sched_mode" not in given:
        why = "megatron records the routes of experts in no other" if config.moe_enable_routing_replay else None
        chosen["async_sched_mode"] = AsyncScheduleMode.ASYNC if why is None else AsyncScheduleMode.LEGACY
        words.append("asynchronous scheduling" if why is None else f"legacy scheduling: {why}")
    if given.get("num_cuda_graphs", -1) == -1 and config.cuda_graph_impl == "local":
        why = _graph_problem(model, config, int(given.get("num_speculative_tokens") or 0))
        if why is None:
            few = given.get("materialize_only_last_token_logits", True)  # else a graph has logits of all its tokens
            chosen |= {name: value for name, value in GRAPHS.items() if name not in given and (few or value < 0)}
        what = "the whole forward" if captures_whole_forward(config) else "layers"
        words.append(f"CUDA graphs of {what}" if why is None else f"no CUDA graphs: {why}")
    if words:
        say(logger, ", ".join(words))
    return chosen


def _graph_problem(model: Any, config: Any, drafts: int) -> str | None:
    """Why an engine captures none, in a few words; None: it does."""
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, states_of_config

    if has_graphs(model):
        return "those of another engine are captured in this model"
    state = mamba_state_config(model)
    uncaptured = [] if state is None else states_of_config(state).uncaptured
    if uncaptured:
        return f"they cannot capture layers of kind {', '.join(uncaptured)}"
    return block_problem(config, drafts)
