"""Megatron's layers whose products, sums and attention depend on the rows of a step; their private hooks under neutral names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.torch_norm import L2Norm


def wider_outputs(layer: ColumnParallelLinear) -> torch.dtype | None:
    """The dtype of a layer's outputs where it is not that of its inputs (``logit_dtype`` of a model of 0.20)."""
    wanted: torch.dtype | None = getattr(layer, "output_dtype", None)
    return None if wanted == layer.config.params_dtype else wanted


def gather_vocabulary(model: HybridModel, logits: torch.Tensor) -> torch.Tensor:
    """Logits of the whole vocabulary from those of each tensor-parallel rank; differentiable."""
    gathered: torch.Tensor = gather_from_tensor_model_parallel_region(logits, group=model.pg_collection.tp)
    return gathered


class ProductSeam(ColumnParallelLinear):
    """Megatron's layer: `product` replaces its matrix product."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A product whose rows do not depend on each other."""
        bias = args[0] if args else kwargs.get("bias")
        found = self.product(input, weight)
        if found is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return found if bias is None else found + bias

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """``x @ weight.T``; None: megatron's."""
        raise NotImplementedError


class SelfAttentionSeam(SelfAttention):
    """Megatron's layer: `gate` replaces the gate of its output."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """A sigmoid that rounds alike everywhere."""
        found = self.gate(x, gate)
        return super()._apply_output_gate(x, gate) if found is None else found

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
        """``x`` times the sigmoid of its gate; None: megatron's."""
        raise NotImplementedError


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, a gradient that comes to them runs none of their hooks."""
    hooks = [x._backward_hooks for x in tensors]
    for x in tensors:
        x._backward_hooks = None
    try:
        yield
    finally:
        for x, own in zip(tensors, hooks, strict=True):
            x._backward_hooks = own
