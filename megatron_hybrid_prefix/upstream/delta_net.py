"""Megatron's Gated DeltaNet layer, which its own engine cannot run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

from megatron_hybrid_prefix.upstream.delta_product import GatedDeltaProductMixer


def has_fla() -> bool:
    """Whether flash-linear-attention is there, whose kernels megatron trains the layer with."""
    return bool(gated_delta_net.HAVE_FLA)


def scale_beta(model: torch.nn.Module, scale: float, norm_epsilon: float | None) -> None:
    """Multiply beta of Gated DeltaNet layers, for engines and in megatron's own forward; and set the epsilon of their norms."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            layer: Any = module
            layer.beta_scale = scale
            layer.gated_delta_rule = partial(_with_scaled_beta, layer.gated_delta_rule, scale)
            layer.out_norm.eps = norm_epsilon or layer.out_norm.eps


def _with_scaled_beta(rule: Any, scale: float, *args: torch.Tensor, beta: torch.Tensor, **fields: Any) -> Any:
    return rule(*args, beta=scale * beta, **fields)


def mark_packed_parameters(model: torch.nn.Module) -> None:
    """Parameters say along which dimension they are divided, and how many rows of each part this rank holds, as megatron's Mamba mixers do."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            layer: Any = module
            qk, v = layer.qk_dim_local_tp, layer.v_dim_local_tp
            layer.in_proj.weight.partition_sizes = list(layer.in_proj_split_sections)
            for part in (layer.conv1d.weight, layer.conv1d.bias):
                if part is not None:
                    part.partition_sizes = [qk, qk, v]
        elif isinstance(module, GatedDeltaProductMixer):
            mixer: Any = module
            for part in (mixer.A_log, mixer.dt_bias, mixer.norm.weight):
                part.partition_dim = 0
