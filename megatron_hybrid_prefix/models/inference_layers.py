"""What megatron's layers of ``transformer_impl="inference_optimized"`` need, and what they do not compute.

They are Transformer Engine's, with weights of the same names, and forwards of their own in inference. Router, dispatcher and experts are
megatron's: each rank has whole experts (``expert_tensor_parallel_size=1``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.platform import Platform

NAME = "inference_optimized"
EXPERTS_DTYPE = "bfloat16"
"""The only one: megatron's dispatcher returns it, whatever came in."""


def inference_fields(config: HybridModelConfig, platform: Platform) -> dict[str, Any]:
    """Fields of a ``TransformerConfig`` that these layers require."""
    fields: dict[str, Any] = {"sequence_parallel": platform.tp > 1}
    if config.has_experts:
        fields |= {"moe_router_dtype": "fp32", "moe_grouped_gemm": True}
        if config.activation == "relu2":
            from megatron.core.activations import squared_relu

            fields["activation_func"] = squared_relu  # megatron compares: it knows its own function only
    return fields


def check_inference_layers(config: HybridModelConfig, platform: Platform, overrides: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if these layers cannot compute a model.

    Args:
        config: Its dimensions.
        platform: The ranks.
        overrides: Fields of a ``TransformerConfig`` by name; one that is absent has the default.
    """
    if not platform.has_transformer_engine:
        raise _refusal("needs a GPU and an installed Transformer Engine", use="local")
    if "G" in config.symbols:
        raise _refusal("has no Gated DeltaNet layers")
    if config.residual_multiplier != 1.0:
        raise _refusal(f"does not multiply residuals (residual_multiplier={config.residual_multiplier})")
    if platform.tp > 1 and not overrides.get("sequence_parallel", True):
        raise _refusal(f"with tp={platform.tp} needs sequence_parallel=True, its default here", use=None)
    if not config.has_experts:
        return
    from megatron_hybrid_prefix.upstream.moe import INFERENCE_ACTIVATIONS

    if config.activation not in INFERENCE_ACTIVATIONS:
        able = " or ".join(map(repr, INFERENCE_ACTIVATIONS))
        raise _refusal(f"computes experts with activation={able} only in this megatron, not {config.activation!r}")
    if config.dtype != EXPERTS_DTYPE:
        raise _refusal(f"computes experts in {EXPERTS_DTYPE} only, not {config.dtype}", use="local")
    if config.moe_router_groups:
        raise _refusal(f"does not choose experts by groups (moe_router_groups={config.moe_router_groups})")
    if platform.etp != 1:
        raise _refusal(f"needs whole experts, not etp={platform.etp}: call ensure_platform(etp=1) first", use=None)


def _refusal(why: str, use: str | None = "transformer_engine") -> ValueError:
    return ValueError(f"transformer_impl={NAME!r} {why}{'' if use is None else f'; use {use!r}'}")
