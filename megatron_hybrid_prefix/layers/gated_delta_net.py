"""Gated DeltaNet: prefill and decode by slots, on layers built as megatron's ``GatedDeltaNet``.

Megatron trains this layer and raises in inference. All of dynamic inference is here; training is megatron's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.layers.base import LayerKind, dtype_name, register_layer_kind
from megatron_hybrid_prefix.layers.components import GDN_CONV, GDN_STATE, gated_delta_net_components
from megatron_hybrid_prefix.layers.slot_layer import SlotLayer
from megatron_hybrid_prefix.layers.step import Parts, PrefillStep, Quantum
from megatron_hybrid_prefix.ops.delta_gates import gates
from megatron_hybrid_prefix.ops.delta_rule import (
    continue_delta_rule,
    flush_delta_rule,
    scan_delta_rule,
    update_delta_rule,
)
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, check_heads
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, flush_windows
from megatron_hybrid_prefix.ops.rings import OpenRows, RingRows
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.upstream.delta_net import GatedDeltaNet
from megatron_hybrid_prefix.upstream.overrides import is_known

TAPS = range(2, 5)
"""Taps of the convolution that the kernels support."""


class GatedDeltaNetBySlots(SlotLayer, GatedDeltaNet):
    """Megatron's layer, with dynamic inference by slots."""

    beta_scale = 1.0  # see `upstream.delta_net.scale_beta`

    def slot_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Query, key, value, output gate, beta and decay of each token, packed."""
        return self.in_proj(hidden_states)[0]

    def slot_outputs(self, outputs: torch.Tensor | None) -> Any:
        return self.out_proj(outputs)

    def slot_decode_rows(self, inputs: torch.Tensor, states: Parts, ring: Parts, rows: RingRows) -> torch.Tensor:
        qkv, *gates = self._parts(inputs)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        convolved = convolve_tokens(qkv, states[GDN_CONV], weight, bias, recent=ring["gdn_recent"], rows=rows)
        q, k, v, z, log_decay, beta = self._by_head(convolved, *gates)
        if isinstance(rows, OpenRows):
            q, k, v, log_decay, beta = (each.flatten(0, 1) for each in (q, k, v, log_decay, beta))
            state, chunks, unit = states[GDN_STATE], rows.chunks[CHUNK], self.use_qk_l2norm
            y = continue_delta_rule(q, k, v, log_decay, beta, state, chunks, rings=_open(ring), normalise=unit)
            return self._gated(y.view(z.shape), z)
        y = update_delta_rule(
            q,
            k,
            v,
            log_decay,
            beta,
            states[GDN_STATE],
            rows,
            keys=ring["gdn_keys"],
            written=ring["gdn_written"],
            decays=ring["gdn_decays"],
            normalise=self.use_qk_l2norm,
        )
        return self._gated(y, z)

    def slot_prefill(self, inputs: torch.Tensor, states: Parts, kept: Parts, step: PrefillStep) -> torch.Tensor:
        qkv, z, beta, alpha = self._parts(inputs)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        convolved, slots = step.convolve(CHUNK, qkv, weight, bias, states, kept, GDN_CONV)
        q, k, v, z, log_decay, beta = self._by_head(convolved, z, beta, alpha, step.wrong)
        y = scan_delta_rule(
            q,
            k,
            v,
            log_decay,
            beta,
            states[GDN_STATE],
            normalise=self.use_qk_l2norm,
            chunk_bounds=step.chunks[CHUNK].bounds,
            kept=kept[GDN_STATE],
            **slots,
        )
        if step.is_open:
            step.leave_open(CHUNK, states[GDN_STATE], *zip(_open(states), (k, v, log_decay, beta), strict=True))
        return self._gated(y, z)

    def _parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., width) to query, key and value together, output gate, beta and decay: all (..., width of the part)."""
        qkv = 2 * self.qk_dim_local_tp + self.v_dim_local_tp
        heads = self.num_v_heads_local_tp
        return torch.split(inputs, [qkv, self.v_dim_local_tp, heads, heads], dim=-1)

    def _by_head(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        wrong: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Query, key (..., key heads, K); value, output gate (..., value heads, V); log-decay, beta (..., value heads).

        The log-decay is float32, as in Hugging Face's models. Megatron's training rounds ``exp(A_log)`` to the type of the
        parameters. Beta has the type of its input in both.
        """
        q, k, v = qkv.split([self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp], dim=-1)
        q, k = (part.unflatten(-1, (-1, self.key_head_dim)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, self.value_head_dim)) for part in (v, z))
        return q, k, v, z, *gates(alpha, beta, self.A_log, self.dt_bias, wrong, self.beta_scale)

    def _gated(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Norm of each head, times its gate: (..., value heads, V) to (..., inner width)."""
        norm = self.out_norm
        is_plain = isinstance(norm, torch.nn.RMSNorm) and not self.config.layernorm_zero_centered_gamma
        if is_plain and is_known(norm, "forward") and norm.weight is not None and norm.eps is not None:
            return gated_rms_norm(y.flatten(-2), norm.weight, z.flatten(-2), norm.eps, self.value_head_dim, True)
        normed: torch.Tensor = norm(y.reshape(-1, self.value_head_dim)).view(y.shape)
        gate: torch.Tensor = self.act_fn(z.float())
        return (normed * gate).to(y.dtype).flatten(-2)


def _open(ring: Parts) -> list[torch.Tensor]:
    """The rings of an open chunk, in the order of `continue_delta_rule`."""
    return [ring[name] for name in ("gdn_keys", "gdn_values", "gdn_decays", "gdn_beta")]


class GatedDeltaNetKind(LayerKind):
    """State of a layer: ``gdn_conv``, the last inputs of its convolution, and ``gdn_state``, a matrix a value head."""

    name = "gated_delta_net"
    layer_class: type = GatedDeltaNet
    slot_class = GatedDeltaNetBySlots
    drafts = True
    cuda_graphs = True
    whole_chunks = True

    def is_layer(self, module: torch.nn.Module) -> bool:
        return isinstance(module, self.layer_class)

    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """The window is of the parameters' type by default, the matrices of float32.

        Raises:
            ValueError: The layer cannot be run: its activation is not SiLU, its convolution has another number of taps
                than 2 to 4, or it is on a GPU and the kernels do not support heads of its sizes.
        """
        layer: GatedDeltaNet = module
        if layer.act_fn is not F.silu:
            name = getattr(layer.act_fn, "__name__", str(layer.act_fn))
            raise ValueError(f"Gated DeltaNet layers with activation {name!r}: use SiLU (activation='swiglu')")
        if layer.conv_kernel_dim not in TAPS:
            raise ValueError(
                f"Gated DeltaNet layers with a convolution of {layer.conv_kernel_dim} taps: "
                f"use {TAPS.start} to {TAPS.stop - 1} (linear_conv_kernel_dim)"
            )
        if layer.A_log.is_cuda:
            check_heads(layer.config.params_dtype, layer.key_head_dim, layer.value_head_dim)
        return gated_delta_net_components(
            channels=2 * layer.qk_dim_local_tp + layer.v_dim_local_tp,
            taps=layer.conv_kernel_dim,
            heads=layer.num_v_heads_local_tp,
            key_dim=layer.key_head_dim,
            value_dim=layer.value_head_dim,
            window_dtype=dtype_name(window_dtype or layer.config.params_dtype),
            state_dtype=None if state_dtype is None else dtype_name(state_dtype),
        )

    def chunk_tokens(self, module: torch.nn.Module) -> Quantum:
        return CHUNK

    def flush(self, states: Parts, ring: Parts, rows: Mapping[str, RingRows]) -> None:
        flush_windows(states[GDN_CONV], ring["gdn_recent"], rows[GDN_CONV])
        state = states[GDN_STATE]
        if "gdn_values" in ring:  # it is there
            super().flush({GDN_STATE: state}, {}, rows)
        else:
            flush_delta_rule(state, ring["gdn_keys"], ring["gdn_written"], ring["gdn_decays"], rows[GDN_STATE])

    def invalidate(self, module: torch.nn.Module) -> None:
        """Nothing is derived from weights."""


KIND = GatedDeltaNetKind()
register_layer_kind(KIND)
