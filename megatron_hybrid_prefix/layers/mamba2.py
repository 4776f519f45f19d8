"""Mamba2 prefill that starts from, and writes to, any slot; and how it gets onto a model built with megatron's mixer.

Only the prefill of dynamic inference differs from megatron's, and only where the context is this package's: training,
decode and other contexts run megatron's own methods.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import mamba_mixer as upstream
from megatron.core.ssm.ops import causal_conv1d_varlen

from megatron_hybrid_prefix.layers.mamba2_scan import scan_by_slots
from megatron_hybrid_prefix.mcore.state.metadata import HybridPrefixMambaMetadata
from megatron_hybrid_prefix.ops.conv_windows import write_conv_windows


class HybridPrefixPrefill:
    """Mixin before a ``MambaMixer``: prefill by slots."""

    def _dynamic_inference_prefill(
        self,
        zxBCdt: torch.Tensor,
        context: Any,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        mamba_layer_idx: int | None = None,
    ) -> torch.Tensor:
        """Prefill of all sequences of the step.

        Args:
            zxBCdt: (tokens, 1, in_proj's width), packed, prefilled tokens first.
            context: The inference context.
            conv_state: (slots, dim, d_conv), this layer's windows, live slots and checkpoints.
            ssm_state: (slots, heads, headdim, d_state), this layer's SSM states.
            mamba_layer_idx: Unused; megatron passes it.

        Returns:
            (tokens, 1, inner width); rows after the prefilled tokens are zero before the norm.
        """
        metadata = context.mamba_metadata
        if not isinstance(metadata, HybridPrefixMambaMetadata):
            return super()._dynamic_inference_prefill(  # type: ignore[misc]
                zxBCdt, context, conv_state, ssm_state, mamba_layer_idx=mamba_layer_idx
            )
        tokens = zxBCdt.shape[0]
        z, xBC, dt = torch.split(
            zxBCdt.squeeze(1),
            [self.d_inner_local_tp, self._conv_width, self.nheads_local_tp],
            dim=-1,
        )
        # Convolution, in the type of its state, as megatron's; it reads the sources before the windows are written.
        inputs = xBC.to(conv_state.dtype).contiguous()
        convolved = causal_conv1d_varlen.causal_conv1d_varlen_fn(
            x=inputs,
            weight=self.cp.get_conv1d_weight().squeeze(1).to(conv_state.dtype),
            bias=self.cp.get_conv1d_bias().to(conv_state.dtype),
            cu_seqlens=metadata.cu_seqlens,
            initial_states=conv_state[:, :, 1:],
            activation=self.activation,
            precomputed_seq_idx=metadata.conv_seq_idx,
            precomputed_seq_start=metadata.conv_seq_start,
        ).to(xBC.dtype)
        write_conv_windows(
            inputs,
            conv_state,
            chunk_bounds=metadata.cu_chunk_seqlens,
            **metadata.slots(),
        )
        x, B, C = torch.split(
            convolved,
            [self.d_inner_local_tp, self.ngroups_local_tp * self.d_state, self.ngroups_local_tp * self.d_state],
            dim=-1,
        )
        D = self.cp.get_D()
        z = z.reshape(tokens, self.nheads_local_tp, self.headdim).contiguous()
        y = scan_by_slots(
            ssm_state,
            metadata,
            x=x.reshape(tokens, self.nheads_local_tp, self.headdim).contiguous(),
            dt=dt.contiguous(),
            A=-torch.exp(self.cp.get_A_log().float()),
            B=B.reshape(tokens, self.ngroups_local_tp, self.d_state).contiguous(),
            C=C.reshape(tokens, self.ngroups_local_tp, self.d_state).contiguous(),
            D=D.float().view(-1, self.headdim) if self.D_has_hdim else D,
            z=None if self.rmsnorm else z,
            dt_bias=self.cp.get_dt_bias().float(),
            chunk_tokens=self.chunk_size,
        )
        y = y.view(tokens, 1, -1)
        return self.norm(y, z.view(tokens, 1, -1)) if self.rmsnorm else y

    @property
    def _conv_width(self) -> int:
        return self.d_inner_local_tp + 2 * self.ngroups_local_tp * self.d_state


class HybridPrefixMambaMixer(HybridPrefixPrefill, upstream.MambaMixer):
    """Megatron's ``MambaMixer`` with prefill by slots; for a ``ModuleSpec``, or put on a built model."""


def use_slot_mixers(model: torch.nn.Module) -> int:
    """Put prefill by slots on every Mamba mixer of a built model, in place; weights and training stay as they are.

    Returns:
        How many mixers changed; 0 where all had it already.
    """
    changed = 0
    for module in model.modules():
        if isinstance(module, upstream.MambaMixer) and not isinstance(module, HybridPrefixPrefill):
            module.__class__ = _with_prefill(type(module))
            changed += 1
    return changed


def restore_mixers(model: torch.nn.Module) -> int:
    """Undo `use_slot_mixers`.

    Returns:
        How many mixers changed.
    """
    changed = 0
    for module in model.modules():
        original = _ORIGINALS.get(type(module))
        if original is not None:
            module.__class__ = original
            changed += 1
    return changed


_ORIGINALS: dict[type, type] = {}
_SUBCLASSES: dict[type, type] = {}


def _with_prefill(kind: type) -> type:
    """The class of a mixer of ``kind`` with prefill by slots."""
    if kind not in _SUBCLASSES:
        derived = type(f"Slot{kind.__name__}", (HybridPrefixPrefill, kind), {"__doc__": kind.__doc__})
        _SUBCLASSES[kind] = derived
        _ORIGINALS[derived] = kind
    return _SUBCLASSES[kind]
