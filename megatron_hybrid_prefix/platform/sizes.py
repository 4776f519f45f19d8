"""The parallel sizes that run in this process, and whether a model, or the flags of a script, have the same.

Megatron takes the sizes of its process groups where it shards, and those of a config elsewhere. It compares them nowhere: with
``tensor_model_parallel_size=2`` over groups of one rank, each rank silently holds the whole model.
"""

from __future__ import annotations

from typing import Any

from megatron_hybrid_prefix.errors import PlatformError

_ATTRIBUTES = {  # of megatron's model configs, and of the arguments of megatron.training
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_OF_EXPERTS = ("ep", "etp")


def running_sizes(groups: Any = None) -> dict[str, int]:
    """Sizes by their short names. Empty if megatron's parallel state does not run.

    Args:
        groups: Process groups of a model, megatron's ``ProcessGroupCollection``; None: those of its parallel state.
    """
    if groups is not None:
        names = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "etp": "expt_tp"}
        found = {short: getattr(groups, name, None) for short, name in names.items()}
        return {short: group.size() for short, group in found.items() if group is not None}
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "vp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def check_sizes(asking: Any, who: str, groups: Any = None) -> None:
    """Compare sizes with those that run.

    Args:
        asking: A model config, or arguments of megatron.training. Sizes that it does not have are not compared, nor those
            for experts if it has none.
        who: What it is, for the error.
        groups: As of `running_sizes`.

    Raises:
        PlatformError: They differ; one line names both.
    """
    running = running_sizes(groups)
    has_experts = any(getattr(asking, name, None) for name in ("num_moe_experts", "num_experts"))
    asked = {
        short: getattr(asking, _ATTRIBUTES[short]) or 1
        for short in running
        if hasattr(asking, _ATTRIBUTES[short]) and (has_experts or short not in _OF_EXPERTS)
    }
    differ = [short for short in asked if asked[short] != running[short]]
    if not differ:
        return
    wanted, have = (" ".join(f"{short}={sizes[short]}" for short in differ) for sizes in (asked, running))
    own = {short: asked.get(short, 1) for short in ("tp", "pp", "ep")}
    if asked.get("etp") == 1 != own["tp"]:
        own["etp"] = 1
    remedy = "call ensure_platform(" + ", ".join(f"{short}={size}" for short, size in own.items()) + ") first"
    if groups is not None or all(own[short] == running.get(short) for short in own):
        remedy = "make the process groups with those sizes, before ensure_platform(), which keeps them"
    raise PlatformError(f"{who}: {wanted}, but this process runs with {have}; {remedy}")
