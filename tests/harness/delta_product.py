"""A Gated Delta Product mixer for a megatron-core that has none: the parameters of that of its main, and no forward of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_hybrid_prefix.platform.gated_norm import GatedRMSNorm
from megatron_hybrid_prefix.upstream import delta_product

HAS_MEGATRONS = delta_product.IS_THERE
mixer_spec = delta_product.mixer_spec


class StandIn(delta_product.GatedDeltaProductMixer):
    """What `GatedDeltaProductBySlots` uses of megatron's."""

    def __init__(
        self, config: Any, submodules: Any, d_model: int, pairs: int, d_conv: int, pg_collection: Any, **others: Any
    ) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.num_householder, self.d_conv, self.rmsnorm = config, pairs, d_conv, True
        tp, n = pg_collection.tp.size(), pairs
        self.d_state, self.headdim = config.mamba_state_dim, config.mamba_head_dim
        self.nheads_local_tp, self.ngroups_local_tp = config.mamba_num_heads // tp, config.mamba_num_groups // tp
        self.d_inner_local_tp = inner = self.nheads_local_tp * self.headdim
        keys, heads, dtype = self.ngroups_local_tp * self.d_state, self.nheads_local_tp, config.params_dtype
        of_conv = [inner] * n + [keys] * n + [keys]
        of_tokens = [inner, *of_conv, *[heads] * n, heads]
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        first = linear | {"init_method": config.init_method, "gather_output": False}
        last = linear | {"init_method": config.init_method, "input_is_parallel": True, "skip_bias_add": True}
        self.in_proj = build_module(submodules.in_proj, d_model, sum(of_tokens) * tp, **first)
        self.out_proj = build_module(submodules.out_proj, inner * tp, d_model, **last)
        channels = sum(of_conv)
        self.conv1d = torch.nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False, dtype=dtype)
        self.dt_bias = torch.nn.Parameter(torch.empty(heads, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(inner, group_size=inner // self.ngroups_local_tp, norm_before_gate=False, dtype=dtype)
        for part in (self.conv1d.weight, self.dt_bias, self.A_log, self.norm.weight):
            part.tensor_model_parallel = True
        self.in_proj.weight.partition_sizes = of_tokens
        self.conv1d.weight.partition_dim, self.conv1d.weight.partition_sizes = 0, of_conv


def _spec(in_proj: Any, out_proj: Any, pairs: int) -> ModuleSpec:
    submodules = SimpleNamespace(in_proj=in_proj, out_proj=out_proj)
    return ModuleSpec(module=StandIn, submodules=submodules, params={"pairs": pairs})


def put_stand_in() -> None:
    """`build_hybrid_model` builds the stand-in where megatron has no such layer."""
    if not HAS_MEGATRONS:
        delta_product.mixer_spec = _spec
