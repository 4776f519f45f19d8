"""A Gated Delta Product mixer for a megatron-core that has none: the parameters of that of its main, and no forward of its own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_hybrid_prefix.platform.gated_norm import GatedRMSNorm
from megatron_hybrid_prefix.upstream import delta_product


class StandIn(delta_product.GatedDeltaProductMixer):
    """What `GatedDeltaProductBySlots` uses of megatron's."""

    rmsnorm = True

    def __init__(
        self, config: Any, submodules: Any, d_model: int, d_conv: int, pg_collection: Any, **others: Any
    ) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.d_conv, self.num_householder = config, d_conv, others["pairs"]
        tp, n = pg_collection.tp.size(), others["pairs"]
        self.d_state, self.headdim = config.mamba_state_dim, config.mamba_head_dim
        self.nheads_local_tp, self.ngroups_local_tp = config.mamba_num_heads // tp, config.mamba_num_groups // tp
        self.d_inner_local_tp = inner = self.nheads_local_tp * self.headdim
        keys, heads, dtype = self.ngroups_local_tp * self.d_state, self.nheads_local_tp, config.params_dtype
        of_conv = [inner] * n + [keys] * n + [keys]
        rows, channels = [inner, *of_conv, *[heads] * n, heads], sum(of_conv)
        linear = {"config": config, "bias": False, "is_expert": False, "init_method": config.init_method}
        self.in_proj = submodules[0](d_model, sum(rows) * tp, gather_output=False, **linear)
        self.out_proj = submodules[1](inner * tp, d_model, input_is_parallel=True, skip_bias_add=True, **linear)
        self.conv1d = torch.nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False, dtype=dtype)
        self.dt_bias, self.A_log = (torch.nn.Parameter(torch.empty(heads, dtype=of)) for of in (dtype, torch.float32))
        self.norm = GatedRMSNorm(inner, group_size=inner // self.ngroups_local_tp, norm_before_gate=False, dtype=dtype)
        for part in (self.conv1d.weight, self.dt_bias, self.A_log, self.norm.weight):
            part.tensor_model_parallel, part.partition_dim = True, 0
        self.in_proj.weight.partition_sizes, self.conv1d.weight.partition_sizes = rows, of_conv


def put_stand_in() -> None:
    """`build_hybrid_model` builds the stand-in where megatron has no such layer."""
    if not delta_product.IS_THERE:
        delta_product.mixer_spec = lambda *parts: ModuleSpec(
            module=StandIn, submodules=parts[:2], params={"pairs": parts[2]}
        )
