"""Mamba2: prefill and decode from and to any slot, for megatron's ``MambaMixer``.

Only dynamic inference differs from megatron's, and only with this package's context. Training and other contexts run
megatron's methods.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_hybrid_prefix.layers.base import LayerKind, dtype_name, register_layer_kind
from megatron_hybrid_prefix.layers.components import mamba2_components
from megatron_hybrid_prefix.layers.step import Parts, PrefillStep
from megatron_hybrid_prefix.ops.mamba_decode import convolve_tokens, flush_states, flush_windows, update_states
from megatron_hybrid_prefix.ops.mamba_scan import continue_scan, scan_by_slots
from megatron_hybrid_prefix.ops.rings import OpenRows, RingRows
from megatron_hybrid_prefix.pool.layout import StateComponent
from megatron_hybrid_prefix.upstream.mixer import MambaMixer, StepSeam, refresh_decode_parameters


class HybridPrefixMambaMixer(StepSeam):
    """Megatron's ``MambaMixer`` with inference by slots, put before a mixer's class or named in a ``ModuleSpec``."""

    def decode(self, zxBCdt: torch.Tensor, states: Parts, ring: Parts, rows: RingRows) -> torch.Tensor:
        z, xBC, dt = self._parts(zxBCdt)
        weight, bias = self.cp.get_conv1d_weight().squeeze(1), self.cp.get_conv1d_bias()
        convolved = convolve_tokens(xBC, states["conv"], weight, bias, recent=ring["conv_recent"], rows=rows)
        if isinstance(rows, OpenRows):
            D = self.cp.get_D()
            xBC, new_dt, gate = (each.flatten(0, 1) for each in (convolved, dt, z))
            y = continue_scan(
                xBC,
                states["ssm"],
                rows.chunks[self.chunk_size],
                dt=new_dt,
                z=None if self.rmsnorm else gate.unflatten(1, (-1, self.headdim)),
                A=self.decode_rates(),
                D=D.float().view(-1, self.headdim) if self.D_has_hdim else D,
                dt_bias=self.cp.get_dt_bias(),
                inputs=ring["ssm_inputs"],
                ring=ring["ssm_dt"],
            )
            y = y.view(z.shape)
        else:
            y = update_states(
                convolved,
                dt,
                states["ssm"],
                rows,
                inputs=ring["ssm_inputs"],
                steps=ring["ssm_steps"],
                A=self.decode_rates(),
                D=self.cp.get_D(),
                dt_bias=self.cp.get_dt_bias(),
                z=None if self.rmsnorm else z,
            )
        return self.norm(y, z) if self.rmsnorm else y

    def _parts(self, zxBCdt: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., in_proj's width) to the gate, the convolution's inputs, and dt: all (..., width of the part)."""
        convolved = self.d_inner_local_tp + 2 * self.ngroups_local_tp * self.d_state
        return torch.split(zxBCdt, [self.d_inner_local_tp, convolved, self.nheads_local_tp], dim=-1)

    def prefill(
        self, zxBCdt: torch.Tensor, step: PrefillStep, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> torch.Tensor:
        states = {"conv": conv_state, "ssm": ssm_state}
        kept = step.begin(states, self.checkpoints_of_step()) if step.encodes else states
        tokens, groups = zxBCdt.shape[0], self.ngroups_local_tp * self.d_state
        z, xBC, dt = self._parts(zxBCdt.squeeze(1))
        weight, bias = self.cp.get_conv1d_weight().squeeze(1), self.cp.get_conv1d_bias()
        convolved, slots = step.convolve(self.chunk_size, xBC, weight, bias, states, kept, "conv")
        x, B, C = torch.split(convolved, [self.d_inner_local_tp, groups, groups], dim=-1)
        D, by_head = self.cp.get_D(), (-1, self.headdim)
        y = scan_by_slots(
            ssm_state,
            step.chunks[self.chunk_size].bounds,
            kept=kept["ssm"],
            **slots,
            x=x.unflatten(1, by_head),
            dt=dt,
            A=-torch.exp(self.cp.get_A_log().float()),
            B=B.unflatten(1, (-1, self.d_state)),
            C=C.unflatten(1, (-1, self.d_state)),
            D=D.float().view(by_head) if self.D_has_hdim else D,
            z=None if self.rmsnorm else z.unflatten(1, by_head),
            dt_bias=self.cp.get_dt_bias(),
            chunk_tokens=self.chunk_size,
            wrong=step.wrong,
        )
        if step.encodes:
            step.keep(kept)
        if step.is_open:
            ring = self.ring_of_step()
            left = (ring["ssm_inputs"], convolved[:, : -C.shape[1]]), (ring["ssm_dt"], dt)
            step.leave_open(self.chunk_size, ssm_state, *left)
        y = y.view(tokens, 1, -1)
        return self.norm(y, z.unsqueeze(1)) if self.rmsnorm else y


class Mamba2(LayerKind):
    """State of a layer: ``conv``, the last inputs of its convolution, and ``ssm``, one matrix per head."""

    name = "mamba2"
    slot_class = HybridPrefixMambaMixer
    drafts = True
    cuda_graphs = True

    def is_layer(self, module: torch.nn.Module) -> bool:
        return isinstance(module, MambaMixer)

    def problem_of(self, module: torch.nn.Module) -> str | None:
        mixer: MambaMixer = module
        if mixer.activation not in ("silu", "swish"):
            return f"activation={mixer.activation!r} of this {type(module).__name__} is not SiLU"
        return super().problem_of(module)

    def components(
        self, module: torch.nn.Module, *, state_dtype: torch.dtype | None, window_dtype: torch.dtype | None
    ) -> tuple[StateComponent, ...]:
        """Both default to the dtype of the parameters, as in megatron."""
        mixer: MambaMixer = module
        conv_shape, ssm_shape = mixer.mamba_state_shapes_per_request()
        own: torch.dtype = mixer.config.params_dtype
        return mamba2_components(conv_shape, dtype_name(window_dtype or own), ssm_shape, dtype_name(state_dtype or own))

    def chunk_tokens(self, module: torch.nn.Module) -> int:
        mixer: MambaMixer = module
        return int(mixer.chunk_size)

    def flush(self, states: Parts, ring: Parts, rows: Mapping[str, RingRows]) -> None:
        flush_windows(states["conv"], ring["conv_recent"], rows["conv"])
        if "ssm_dt" in ring:  # the state is there
            super().flush({"ssm": states["ssm"]}, {}, rows)
        else:
            flush_states(states["ssm"], ring["ssm_inputs"], ring["ssm_steps"], rows["ssm"])

    def invalidate(self, module: torch.nn.Module) -> None:
        refresh_decode_parameters(module)


KIND = Mamba2()
register_layer_kind(KIND)
