"""Megatron's Gated DeltaNet layer, which its own engine cannot run."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

from megatron_hybrid_prefix.upstream.delta_product import GatedDeltaProductMixer


def has_fla() -> bool:
    """Whether flash-linear-attention is there, whose kernels megatron trains the layer with."""
    return bool(gated_delta_net.HAVE_FLA)


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
