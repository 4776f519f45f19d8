"""The four multipliers of `HybridModelConfig`, as Granite 4 has them. They are applied, and weights stay those of the checkpoint.

Multiplying a weight is exact for powers of two only, and tied embeddings are one weight with two multipliers. Applying costs two
small kernels a forward, on the embeddings and on the logits; the other two are arguments of kernels that run anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig

_RESIDUAL_ADDS = {
    "mamba_layer": "mamba_bda",
    "gdn_layer": "self_attn_bda",
    "attention_layer": "self_attn_bda",
    "mlp_layer": "mlp_bda",
    "moe_layer": "mlp_bda",
}
"""By layer of megatron's ``HybridStackSubmodules``: its submodule that adds the residual."""


def multiplier_fields(config: HybridModelConfig) -> dict[str, Any]:
    """Fields of a ``TransformerConfig``: megatron multiplies embeddings and logits as part of its MuP, at width 1."""
    fields: dict[str, Any] = {}
    if config.attention_multiplier is not None:
        fields["softmax_scale"] = config.attention_multiplier
    if (config.embedding_multiplier, config.logits_scaling) != (1.0, 1.0):
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        HybridModel.mup_warning_printed = True  # "MuP is experimental": in training
        fields |= dict(
            use_mup=True, mup_embedding_mult=config.embedding_multiplier, mup_output_mult=1.0 / config.logits_scaling
        )
        fields.setdefault("softmax_scale", config.kv_channels**-0.5)  # MuP has another default
    return fields


def scale_attention(model: Any) -> None:
    """Give each attention layer of a built model ``softmax_scale``: megatron's dynamic engine looks for it there, not in the config."""
    from megatron.core.transformer.attention import SelfAttention

    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.softmax_scale = model.config.softmax_scale


def scale_residuals(spec: Any, multiplier: float) -> Any:
    """Megatron's ``ModuleSpec`` of a hybrid stack, with layers whose output is multiplied before the residual is added."""
    if multiplier == 1.0:
        return spec
    add = _residual_add(multiplier)
    layers = {name: with_parts(getattr(spec.submodules, name), **{part: add}) for name, part in _RESIDUAL_ADDS.items()}
    return with_parts(spec, **layers)


def with_parts(spec: Any, **submodules: Any) -> Any:
    """A copy of megatron's ``ModuleSpec`` with other submodules; the spec itself is shared by all models."""
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **submodules))


def _residual_add(multiplier: float) -> Callable[..., Any]:
    """Megatron's ``get_bias_dropout_add`` with a multiplier."""

    def get_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        def add(
            x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            x, bias = x_with_bias
            x = torch.nn.functional.dropout(x if bias is None else x + bias, dropout, training)
            if x.is_cuda:
                return torch.add(residual, x, alpha=multiplier)
            # On a CPU, ``alpha`` rounds the last values of a tensor in another way than those before: not for exact="bits".
            return residual + x * multiplier

        return add

    return get_add
