"""Megatron's Mamba mixer and the kernels of its prefill. Only this module uses their private names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

from megatron_hybrid_prefix.upstream.capabilities import form_of, only_in
from megatron_hybrid_prefix.upstream.modules import ROWS_OF_A_STEP


class StepSeam(MambaMixer):
    """Megatron's mixer: `prefill` and `decode` replace its own in a step of a context of this package.

    Attributes:
        slot_layer_number: Number of the layer on this pipeline stage, from 1; set by `use_slot_mixers`.
    """

    slot_layer_number: int

    # Of the running step of a context of this package; megatron tells its kernels nothing of the context.
    _context: Any = None
    _step: Any = None
    _owes_prefill = False

    @only_in("steps of recurrent layers", "by class")
    def _dynamic_inference(self, hidden_states: torch.Tensor, context: Any) -> Any:
        """Notes whose step it is."""
        return self._run(super()._dynamic_inference, hidden_states, context)

    @only_in("steps of recurrent layers", "shared")
    def ssm_dynamic_inference(self, hidden_states: torch.Tensor, context: Any) -> Any:
        """Notes whose step it is."""
        megatrons: Any = super()
        return self._run(megatrons.ssm_dynamic_inference, hidden_states, context)

    def _run(self, step: Callable[..., Any], hidden_states: torch.Tensor, context: Any) -> Any:
        self._context, self._step = context, getattr(context, "prefill_step", None)
        self._owes_prefill = self._step is not None and context.padded_batch_dimensions.prefill_req_count > 0
        try:
            result = step(hidden_states, context)
            if self._owes_prefill:
                raise RuntimeError(f"{type(self).__name__} did not call super() in a prefill: its states are lost")
            return result
        finally:
            self._context = self._step = None

    @only_in("steps of recurrent layers", "by class")
    def _ssm_decode(self, zxBCdt: torch.Tensor, *states: Any, **named: Any) -> torch.Tensor:
        """Decode from states and rings."""
        if self._step is None:
            return super()._ssm_decode(zxBCdt, *states, **named)
        return self._decode_rows(zxBCdt)

    @only_in("steps of recurrent layers", "shared")
    def ssm_decode(self, zxBCdt: torch.Tensor, *states: Any, **named: Any) -> torch.Tensor:
        """Decode from states and rings."""
        megatrons: Any = super()
        return megatrons.ssm_decode(zxBCdt, *states, **named) if self._step is None else self._decode_rows(zxBCdt)

    def _decode_rows(self, zxBCdt: torch.Tensor) -> torch.Tensor:
        """Megatron names the states, and knows of no rings."""
        context = self._context
        states = context.states_of_layer(self.slot_layer_number)
        return self.decode(zxBCdt, states, self.ring_of_step(), context.decode_rows)

    def ring_of_step(self) -> Mapping[str, torch.Tensor]:
        """This layer's rings in the running step, by component name: (rings, *shape)."""
        rings: Mapping[str, torch.Tensor] = self._context.ring_of_layer(self.slot_layer_number)
        return rings

    def checkpoints_of_step(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """What checkpoints have of this layer in the running step, by component name; see `StateMemory.checkpoints`."""
        found: Mapping[str, Sequence[torch.Tensor]] = self._context.checkpoints_of_layer(self.slot_layer_number)
        return found

    def decode(
        self, zxBCdt: torch.Tensor, states: Mapping[str, torch.Tensor], ring: Mapping[str, torch.Tensor], rows: Any
    ) -> torch.Tensor:
        """Decode one token of each row, or several one after another.

        Args:
            zxBCdt: (rows, tokens, in_proj's width).
            states: This layer's, by component name: (slots, *shape).
            ring: This layer's, likewise: (rings, *shape).
            rows: The `RingRows`.

        Returns:
            (rows, tokens, inner width), contiguous.
        """
        raise NotImplementedError

    def decode_rates(self) -> torch.Tensor:
        """The A of a decode, (heads,) float32: in memory that `refresh_decode_parameters` writes."""
        return self._get_decode_A_neg_exp()[:, 0, 0]

    @only_in("steps of recurrent layers", "by class")
    def _dynamic_inference_prefill(
        self,
        zxBCdt: torch.Tensor,
        context: Any,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Goes on to `_ssm_prefill`, as megatron's does: a subclass may change its input."""
        if self._step is None:
            return super()._dynamic_inference_prefill(zxBCdt, context, conv_state, ssm_state, *args, **named)
        metadata = context.mamba_metadata
        where = {"seq_idx": metadata.seq_idx, "cu_seqlens": metadata.cu_seqlens}
        where |= {"batch_indices": metadata.batch_indices_prefill}
        return self._ssm_prefill(zxBCdt, conv_state=conv_state, ssm_state=ssm_state, **where)

    @only_in("steps of recurrent layers", "by class")
    def _ssm_prefill(
        self, zxBCdt: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor, *args: Any, **named: Any
    ) -> torch.Tensor:
        """Prefill from and to any slot."""
        if self._step is None:
            return super()._ssm_prefill(zxBCdt, conv_state, ssm_state, *args, **named)
        self._owes_prefill = False
        return self.prefill(zxBCdt, self._step, conv_state, ssm_state)

    @only_in("steps of recurrent layers", "shared")
    def ssm_prefill(
        self, zxBCdt: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor, context: Any
    ) -> torch.Tensor:
        """Prefill from and to any slot."""
        if self._step is None:
            megatrons: Any = super()
            return megatrons.ssm_prefill(zxBCdt, conv_state, ssm_state, context)
        self._owes_prefill = False
        return self.prefill(zxBCdt, self._step, conv_state, ssm_state)

    def prefill(
        self, zxBCdt: torch.Tensor, step: Any, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> torch.Tensor:
        """Prefill all sequences of a step.

        Args:
            zxBCdt: (tokens, 1, in_proj's width), packed, prefilled tokens first.
            step: The `PrefillStep`.
            conv_state: (slots, dim, d_conv), this layer's windows: live slots and checkpoints.
            ssm_state: (slots, heads, headdim, d_state), this layer's SSM states.

        Returns:
            (tokens, 1, inner width); padding rows are zero before the norm.
        """
        raise NotImplementedError


@torch.inference_mode()  # the memory is an inference tensor if the model was built in that mode
def refresh_decode_parameters(module: MambaMixer) -> None:
    """A mixer has new weights: compute the A of its decode again, in the same memory.

    An older megatron only sets a flag, in ``train()``, and its next eager decode computes A. The replay of a CUDA graph looks at no
    flag.
    """
    if form_of("what follows from weights") == "refreshed":
        module.refresh_cache()
    elif hasattr(module, "_A_neg_exp_cache"):  # Needless from fbbc142b80 (0.20), which has `refresh_cache`.
        module._A_neg_exp_cache.copy_(-torch.exp(module.A_log.float()))


def replays_chunks(config: Any) -> bool:
    """Whether Mamba2 decodes from the inputs of the running chunk. Megatron's own prefill keeps them, and no other.

    The states are then those at the last end of a chunk.
    """
    return bool(config.batch_invariant_mode) and form_of("batch-invariant decode") == "replays a chunk"


# The functions below look names up at each call: a platform may have replaced them.
_rows: Any = import_module(ROWS_OF_A_STEP)


def rows_after(inputs: torch.Tensor, decode_prefill: torch.Tensor) -> torch.Tensor:
    """The prefilled rows of a step that also decodes, moved to the front; rows after them are undefined.

    Args:
        inputs: (rows, ...), decoded rows first.
        decode_prefill: (2,) int32 on the device: number of decoded rows, and of prefilled rows.
    """
    output = torch.empty_like(inputs)
    _rows.tensor_get_slice_after(inputs, output, decode_prefill, check_bounds=False)
    return output


def merge_rows(decoded: torch.Tensor, prefilled: torch.Tensor, decode_prefill: torch.Tensor, rows: int) -> torch.Tensor:
    """Undo `rows_after`: (rows, 1, width), decoded rows first."""
    output = torch.empty([rows, 1, prefilled.shape[-1]], dtype=prefilled.dtype, device=prefilled.device)
    _rows.tensor_merge(decoded, prefilled, decode_prefill, output_tensor=output)
    return output


class StepRows(NamedTuple):
    """The tokens of a step, padding included; decoded tokens come first.

    Attributes:
        tokens: Tokens of the step.
        decodes: Rows that decode.
        decode_tokens: Tokens of each row that decodes: one, and its drafts.
        prefills: Sequences that prefill.
        counts: (2,) int32 on the device: decoded and prefilled tokens without padding. Set if the step has both.
    """

    tokens: int
    decodes: int
    decode_tokens: int
    prefills: int
    counts: torch.Tensor


def rows_of_step(context: Any) -> StepRows:
    """Megatron's layout of the running step."""
    padded, metadata = context.padded_batch_dimensions, context.mamba_metadata
    return StepRows(
        tokens=padded.token_count,
        decodes=padded.decode_req_count,
        decode_tokens=1 + context.num_speculative_tokens,
        prefills=padded.prefill_req_count,
        counts=metadata.device_decode_prefill,
    )
