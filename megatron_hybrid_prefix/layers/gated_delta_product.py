"""Gated Delta Product: dynamic inference by slots, on layers built as the ``GatedDeltaProductMixer`` of megatron's main."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from megatron_hybrid_prefix.layers.base import dtype_name, register_layer_kind
from megatron_hybrid_prefix.layers.components import GDP_CONV, GDP_STATE, gated_delta_product_components
from megatron_hybrid_prefix.layers.gated_delta_net import GatedDeltaNetKind
from megatron_hybrid_prefix.layers.slot_layer import SlotLayer
from megatron_hybrid_prefix.layers.step import Parts, PrefillStep, Quantum
from megatron_hybrid_prefix.ops.delta_gates import gates
from megatron_hybrid_prefix.ops.delta_product import Inputs, Rings, flush_pairs, scan_pairs, update_pairs
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, check_heads
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, flush_windows
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.upstream.delta_product import GatedDeltaProductMixer


class GatedDeltaProductBySlots(SlotLayer, GatedDeltaProductMixer):
    """Megatron's layer, with dynamic inference by slots."""

    def slot_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Output gate, values, keys, query, betas and decay of each token, packed."""
        return self.in_proj(hidden_states)[0]

    def slot_outputs(self, outputs: torch.Tensor | None) -> Any:
        return self.out_proj(outputs)

    def slot_decode_rows(self, inputs: torch.Tensor, states: Parts, ring: Parts, rows: RingRows) -> torch.Tensor:
        z, vkq, beta, alpha = self._parts(inputs)
        window, weight, bias = states[GDP_CONV], self.conv1d.weight.squeeze(1), self.conv1d.bias
        convolved = convolve_tokens(vkq, window, weight, bias, recent=ring["gdp_recent"], rows=rows)
        by_head = self._by_head(convolved, *gates(alpha, beta, self.A_log, self.dt_bias))
        return self._gated(update_pairs(by_head, states[GDP_STATE].flatten(1, 2), rows, _rings(ring)), z)

    def slot_prefill(self, inputs: torch.Tensor, states: Parts, kept: Parts, step: PrefillStep) -> torch.Tensor:
        quantum = KIND.chunk_tokens(self)
        z, vkq, beta, alpha = self._parts(inputs)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        convolved, slots = step.convolve(quantum, vkq, weight, bias, states, kept, GDP_CONV)
        by_head = self._by_head(convolved, *gates(alpha, beta, self.A_log, self.dt_bias, step.wrong))
        bounds = step.chunks[quantum].bounds * (self.num_householder // quantum.denominator)
        state, kept_state = (each[GDP_STATE].flatten(1, 2) for each in (states, kept))
        return self._gated(scan_pairs(by_head, state, chunk_bounds=bounds, kept=kept_state, **slots), z)

    def _parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., width) to output gate; values, keys and query together; betas and decay: all (..., width of the part)."""
        heads, channels = self.nheads_local_tp, self.conv1d.weight.shape[0]
        return torch.split(inputs, [self.d_inner_local_tp, channels, self.num_householder * heads, heads], dim=-1)

    def _by_head(self, vkq: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> Inputs:
        """What the operations get. In ``vkq`` and ``beta``, megatron has a pair's values of all heads, then those of the next pair."""
        n, keys = self.num_householder, self.ngroups_local_tp * self.d_state
        v, k, q = vkq.split([n * self.d_inner_local_tp, n * keys, keys], dim=-1)
        q, k = q.unflatten(-1, (-1, self.d_state)), k.unflatten(-1, (n, -1, self.d_state))
        return q, k, v.unflatten(-1, (n, -1, self.headdim)), log_decay, beta.unflatten(-1, (n, -1))

    def _gated(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """(..., value heads, V) to (..., inner width): normed, as megatron's, with the gate."""
        return self.norm(y.flatten(-2), z) if self.rmsnorm else y.flatten(-2)


def _rings(ring: Parts) -> Rings:
    return ring["gdp_keys"], ring["gdp_written"], ring["gdp_decays"]


class GatedDeltaProductKind(GatedDeltaNetKind):
    """State of a layer: ``gdp_conv``, the last inputs of its convolution, and ``gdp_state``, a matrix a head."""

    name = "gated_delta_product"
    layer_class = GatedDeltaProductMixer
    slot_class = GatedDeltaProductBySlots

    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """As of a Gated DeltaNet. ValueError: it is on a GPU, and the kernels do not support heads of its sizes."""
        layer: Any = module
        if layer.A_log.is_cuda:
            check_heads(layer.config.params_dtype, layer.d_state, layer.headdim)
        return gated_delta_product_components(
            pairs=layer.num_householder,
            groups=layer.ngroups_local_tp,
            heads=layer.nheads_local_tp,
            key_dim=layer.d_state,
            value_dim=layer.headdim,
            taps=layer.d_conv,
            window_dtype=dtype_name(window_dtype or layer.config.params_dtype),
            state_dtype=None if state_dtype is None else dtype_name(state_dtype),
        )

    def chunk_tokens(self, module: torch.nn.Module) -> Quantum:
        """64 pairs."""
        layer: Any = module
        return Fraction(CHUNK, layer.num_householder)

    def flush(self, states: Parts, ring: Parts, rows: Mapping[str, RingRows]) -> None:
        flush_windows(states[GDP_CONV], ring["gdp_recent"], rows[GDP_CONV])
        flush_pairs(states[GDP_STATE].flatten(1, 2), _rings(ring), rows[GDP_STATE])


KIND = GatedDeltaProductKind()
register_layer_kind(KIND)
