"""RMS norms whose weight is float32 whatever their input is, and those that are computed with the sum before them.

Megatron ends a layer with the sum of its output and the residual, and the next one begins with the norm of that. In a step of inference
one kernel makes both, and leaves the norm on the tensor of the sum; the next layer's norm returns it if its input is that very tensor.
Both are computed apart as ever with gradients, in a CUDA graph of one layer, with a bias or another dtype, and where a layer
or norm is hooked or of another class than was built: what those do to a sum in place would be missed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm
from megatron_hybrid_prefix.ops.residual_norm import can_fuse, norm_of_sum

_NORMED = "_normed_by"  # of a tensor that is a sum: the norm, and its result
_SUMS = "mlp_bda", "self_attn_bda", "mamba_bda"
_FIRST_NORMS = "norm", "input_layernorm", "pre_mlp_layernorm"


class Float32RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` in one kernel on a GPU, without gradients. PyTorch has one for equal types only, and runs eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and not torch.is_grad_enabled() and x.dtype != self.weight.dtype and self.eps is not None:
            return gated_rms_norm(x, self.weight, None, self.eps, x.shape[-1], True)
        return super().forward(x)


class NormOfHeads(torch.nn.Module):
    """RMS norm of all query (or key) heads of a token together. Megatron sums the ranks' gradients of such weights: each has all."""

    def __init__(self, heads: str, *, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(getattr(config, heads) * hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., heads of this rank, channels), likewise out."""
        from megatron.core import parallel_state, tensor_parallel

        rows = x.flatten(-2)
        # All ranks compute what one alone would. To send sums of squares only would be less, but adds up in another order.
        whole = self.norm(tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(rows))
        own: torch.Tensor = whole.split(rows.shape[-1], -1)[parallel_state.get_tensor_model_parallel_rank()]
        return own.contiguous().view(x.shape)


def norm_outputs(model: Any, config: HybridModelConfig) -> None:
    """Put norms behind the layers of a built ``HybridModel`` that normalise their output, and not before them."""
    for layer in model.decoder.layers:
        if config.normalises_output(number := layer.layer_number - 1):
            is_mlp = config.layers[number] == "-"
            norm, add = ("pre_mlp_layernorm", "mlp_bda") if is_mlp else ("input_layernorm", "self_attn_bda")
            layer.output_norm = getattr(layer, norm)
            setattr(layer, add, partial(_get_add_of_norm, layer.output_norm, getattr(layer, add)))
            setattr(layer, norm, torch.nn.Identity())
            layer.recompute_input_layernorm = layer.recompute_pre_mlp_layernorm = False


def _get_add_of_norm(norm: torch.nn.Module, get_add: Callable[..., Any], training: bool, fused: bool) -> Any:
    add = get_add(training, fused)

    def add_norm(output: Any, residual: torch.Tensor, dropout: float) -> Any:
        x, bias = output
        return add((norm(x if bias is None else x + bias), None), residual, dropout)

    return add_norm


class NormOfSum(Float32RMSNorm):
    """A norm whose result may have been left by `SumAndNorm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, normed = vars(x).pop(_NORMED, (None, None))
        out: torch.Tensor = normed if norm is self else super().forward(x)
        return out


class SumAndNorm:
    """Takes the place of ``get_add``, megatron's ``get_bias_dropout_add``, in the first of ``layers``; the next begins with ``norm``."""

    def __init__(self, get_add: Callable[..., Any], multiplier: float, norm: Any, *layers: torch.nn.Module) -> None:
        self._get_add, self._multiplier, self._norm = get_add, multiplier, norm
        self._built = [(weakref.ref(module), type(module)) for module in (*layers, norm)]  # models are freed at once

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add: Callable[..., torch.Tensor] = self._get_add(training, fused)
        if training or not torch.is_inference_mode_enabled() or _has_any_global_hook():
            return add
        if torch.cuda.is_current_stream_capturing() and hasattr(self._built[0][0](), "cudagraph_manager"):
            return add
        return partial(self._add, add) if all(_is_as_built(ref(), kind) for ref, kind in self._built) else add

    def _add(
        self, add: Callable[..., torch.Tensor], output: Any, residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        (x, bias), norm = output, self._norm
        fits = bias is None and norm.eps is not None and x.dtype == residual.dtype and residual.is_contiguous()
        if not fits or not can_fuse(x, norm.weight):
            return add(output, residual, dropout)
        setattr(x, _NORMED, (norm, norm_of_sum(x, residual, norm.weight, norm.eps, self._multiplier)))
        summed: torch.Tensor = x  # megatron adds in place, too
        return summed


def _is_as_built(module: Any, kind: type) -> bool:
    own = vars(module) if type(module) is kind else {"forward": None}
    return not ("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"])


def fuse_sums_and_norms(model: Any, multiplier: float) -> None:
    """Put `SumAndNorm` and `NormOfSum` into a built ``HybridModel``, with the multiplier of its layers' outputs."""
    stack = model.decoder
    for layer, after in zip(stack.layers, [*stack.layers[1:], getattr(stack, "final_norm", None)], strict=True):
        norms = after, *(getattr(after, name, None) for name in _FIRST_NORMS)
        norm = next((norm for norm in norms if type(norm) in (torch.nn.RMSNorm, Float32RMSNorm)), None)
        name = next((name for name in _SUMS if isinstance(getattr(layer, name, None), FunctionType)), None)
        if norm is not None and name is not None:
            norm.__class__ = NormOfSum
            setattr(layer, name, SumAndNorm(getattr(layer, name), multiplier, norm, layer, after))
