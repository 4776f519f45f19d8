"""Layers of ``transformer_impl="inference_optimized"`` without Transformer Engine and a GPU.

Megatron's spec, router, dispatcher and layers run; its linear layers, norms, and the kernels of experts and of the router are replaced
by PyTorch's, in float32, so that answers agree closely. So names of weights, shapes, process groups and sequence parallelism are tested, and no kernel.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, inference_layers
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_layer, token_dispatcher_inference
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, InferenceGroupedMLP
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import InferenceTopKRouter

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.models import inference_layers as models_inference_layers

CONFIG = get_preset(
    "tiny-moe", dtype="float32", activation="relu2", layer_pattern="ME*E-", ffn_hidden_size=64, num_moe_experts=8,
    moe_router_topk=3, moe_router_score="sigmoid", moe_ffn_hidden_size=48, moe_latent_size=32,
    moe_shared_expert_intermediate_size=96, mtp_num_layers=1, mtp_layer_pattern="*E",
)  # fmt: skip


class _Torch:
    """``torch`` for the dispatcher, which casts to bfloat16."""

    bfloat16 = torch.float32

    def __getattr__(self, name):
        return getattr(torch, name)


class Norm:
    """Megatron's refuses sequence parallelism, which matters to its gradients only."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


class NormedColumns(ColumnParallelLinear):
    """A norm before the product, and its weight among the layer's."""

    def __init__(self, input_size, output_size, *, config, tp_comm_buffer_name=None, **fields):
        super().__init__(input_size, output_size, config=config, **fields)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x, *args, **fields):
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **fields)


class WholeLinear(torch.nn.Linear):
    """The same on all ranks."""

    def __init__(self, inputs, outputs, *, config, **_):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


class GroupedLinear(torch.nn.Module):
    """One numbered weight for each expert."""

    def __init__(self, experts, inputs, outputs, *, config, **_):
        super().__init__()
        for number in range(experts):
            weight = torch.empty(outputs, inputs, dtype=config.params_dtype)
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight))


def experts_forward(self, hidden_states, probs, routing_map):
    """The sum of this rank's experts for each of all ranks' tokens, in float32."""
    valid = int(token_dispatcher_inference.InferenceAllGatherDispatcherBase._valid_tokens())
    assert len(hidden_states) == valid, (len(hidden_states), valid)
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    first = self.ep_group.rank() * self.num_local_experts
    for number in range(self.num_local_experts):
        rows, columns = (routing_map == first + number).nonzero(as_tuple=True)
        inner = hidden_states[rows] @ self._fc1_weight[number].t()
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.relu(inner) ** 2
        out[rows] += probs[rows, columns, None].float() * (inner @ self._fc2_weight[number].t()).float()
    return out, None


def _with_stand_ins(part, classes):
    """A spec, rebuilt with other classes wherever it names one."""
    if isinstance(part, partial):
        return partial(part.func, **{name: _with_stand_ins(value, classes) for name, value in part.keywords.items()})
    if isinstance(part, GroupedMLPSubmodules):  # of Nones, without Transformer Engine
        return dataclasses.replace(part, linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    if isinstance(part, list):
        return [_with_stand_ins(value, classes) for value in part]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        return dataclasses.replace(part, **{name: _with_stand_ins(getattr(part, name), classes) for name in names})
    return next((stand_in for of, stand_in in classes if part is of), part)


def put_stand_ins(put):
    """Replaces megatron's names by ``put(owner, name, value)``, as ``monkeypatch.setattr``."""
    specs = hybrid_layer_specs
    classes = [
        (inference_layers.InferenceLayerNormColumnParallelLinear, NormedColumns),
        (inference_layers.InferenceColumnParallelLinear, ColumnParallelLinear),
        (inference_layers.InferenceRowParallelLinear, RowParallelLinear),
        (specs.TEDotProductAttention, DotProductAttention),
        (specs.TENorm, Norm),
    ]
    put(specs, "hybrid_inference_stack_spec", _with_stand_ins(specs.hybrid_inference_stack_spec, classes))
    put(models_inference_layers, "EXPERTS_DTYPE", "float32")
    put(token_dispatcher_inference, "torch", _Torch())
    put(hybrid_block, "TENorm", Norm)
    put(moe_layer, "HAVE_TE", True)
    put(inference_layers, "InferenceLinear", WholeLinear)
    put(InferenceGroupedMLP, "_vllm_forward", experts_forward)
    put(InferenceTopKRouter, "_compiled_topk_routing", staticmethod(topk_routing_with_score_function))


def build(platform, config=CONFIG, seed=0, **fields):
    """A model of these layers, after `put_stand_ins`."""
    able = dataclasses.replace(platform, layers="Transformer Engine")
    return build_hybrid_model(config, seed=seed, platform=able, transformer_impl="inference_optimized", **fields)
