"""Mamba2: prefill from and to any slot, for megatron's ``MambaMixer``.

Only the prefill of dynamic inference differs from megatron's, and only with this package's context. Training, decode and
other contexts run megatron's methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.layers.base import LayerKind, dtype_name, register_layer_kind
from megatron_hybrid_prefix.layers.components import mamba2_components
from megatron_hybrid_prefix.layers.mamba2_scan import scan_by_slots
from megatron_hybrid_prefix.layers.step import PrefillStep
from megatron_hybrid_prefix.ops.conv_windows import write_conv_windows
from megatron_hybrid_prefix.ops.convolution import convolve_from_slots
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.upstream.mixer import MambaMixer, PrefillSeam, refresh_decode_parameters


class HybridPrefixPrefill(PrefillSeam):
    """Mixin before a ``MambaMixer``: prefill by slots."""

    if TYPE_CHECKING:  # attributes of megatron's mixer
        D_has_hdim: bool
        chunk_size: int
        cp: Any
        d_inner_local_tp: int
        d_state: int
        headdim: int
        ngroups_local_tp: int
        nheads_local_tp: int
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        rmsnorm: bool

    def prefill(
        self, zxBCdt: torch.Tensor, step: PrefillStep, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> torch.Tensor:
        """See PrefillSeam."""
        tokens = zxBCdt.shape[0]
        chunks, slots = step.chunks[self.chunk_size], step.slots(self.chunk_size)
        z, xBC, dt = torch.split(
            zxBCdt.squeeze(1),
            [self.d_inner_local_tp, self._conv_width, self.nheads_local_tp],
            dim=-1,
        )
        convolved = convolve_from_slots(  # reads the sources before windows are written
            xBC,
            conv_state,
            self.cp.get_conv1d_weight().squeeze(1).to(conv_state.dtype),
            self.cp.get_conv1d_bias(),
            sources=step.token_sources,
            starts=step.token_starts,
        )
        write_conv_windows(xBC, conv_state, chunk_bounds=chunks.bounds, **slots)
        x, B, C = torch.split(
            convolved,
            [self.d_inner_local_tp, self.ngroups_local_tp * self.d_state, self.ngroups_local_tp * self.d_state],
            dim=-1,
        )
        D = self.cp.get_D()
        by_head = (-1, self.headdim)
        y = scan_by_slots(
            ssm_state,
            chunks,
            slots,
            x=x.unflatten(1, by_head),
            dt=dt,
            A=-torch.exp(self.cp.get_A_log().float()),
            B=B.unflatten(1, (-1, self.d_state)),
            C=C.unflatten(1, (-1, self.d_state)),
            D=D.float().view(-1, self.headdim) if self.D_has_hdim else D,
            z=None if self.rmsnorm else z.unflatten(1, by_head),
            dt_bias=self.cp.get_dt_bias().float(),
            chunk_tokens=self.chunk_size,
        )
        y = y.view(tokens, 1, -1)
        return self.norm(y, z.unsqueeze(1)) if self.rmsnorm else y

    @property
    def _conv_width(self) -> int:
        return self.d_inner_local_tp + 2 * self.ngroups_local_tp * self.d_state


class HybridPrefixMambaMixer(HybridPrefixPrefill, MambaMixer):
    """Megatron's ``MambaMixer`` with prefill by slots, for a ``ModuleSpec``."""


class Mamba2(LayerKind):
    """State of a layer: ``conv``, the last inputs of its convolution, and ``ssm``, one matrix per head."""

    name = "mamba2"
    slot_class = HybridPrefixPrefill
    drafts = True
    cuda_graphs = True

    def is_layer(self, module: torch.nn.Module) -> bool:
        """See LayerKind."""
        return isinstance(module, MambaMixer)

    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """See LayerKind. Both default to the dtype of the parameters, as in megatron."""
        mixer: MambaMixer = module
        conv_shape, ssm_shape = mixer.mamba_state_shapes_per_request()
        own: torch.dtype = mixer.config.params_dtype
        return mamba2_components(conv_shape, dtype_name(window_dtype or own), ssm_shape, dtype_name(state_dtype or own))

    def chunk_tokens(self, module: torch.nn.Module) -> int:
        """See LayerKind."""
        mixer: MambaMixer = module
        return int(mixer.chunk_size)

    def invalidate(self, module: torch.nn.Module) -> None:
        """See LayerKind."""
        refresh_decode_parameters(module)


KIND = Mamba2()
register_layer_kind(KIND)
