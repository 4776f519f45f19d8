"""Megatron's layers whose products, sums and attention depend on the rows of a step; their hooks under neutral names."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer


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
    """Megatron's layer: `attend` and `gate` replace parts of a step."""

    def flash_decode_and_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        seqlens_k: torch.Tensor,
        block_table: torch.Tensor,
        is_decode_only: bool,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See upstream. Attention over pages whose rows do not depend on each other."""
        found = None
        if softmax_offset is None:
            starts = torch.arange(len(seqlens_k) + 1) if is_decode_only else cu_seqlens_q
            found = self.attend(q.squeeze(1), k, v, starts, seqlens_k, block_table)
        if found is not None:
            return found.unsqueeze(1)
        return super().flash_decode_and_prefill(
            q,
            k,
            v,
            max_seqlen_q,
            max_seqlen_k,
            cu_seqlens_q,
            cu_seqlens_k,
            seqlens_k,
            block_table,
            is_decode_only,
            softmax_offset,
        )

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """A sigmoid that rounds alike everywhere."""
        found = self.gate(x, gate)
        return super()._apply_output_gate(x, gate) if found is None else found

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor | None:
        """Causal attention of a step's queries over the paged cache; None: megatron's.

        Args:
            q: (tokens, heads, head_dim).
            k: (blocks, block_tokens, kv_heads, head_dim).
            v: As k.
            starts: (requests + 1,) integer, first row of each request.
            lengths: (requests,) integer, valid tokens of each request; its queries are the last of them.
            block_table: (requests, most blocks), integer.
        """
        raise NotImplementedError

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
        """``x`` times the sigmoid of its gate; None: megatron's."""
        raise NotImplementedError
