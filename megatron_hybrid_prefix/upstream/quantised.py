"""The tensors that a quantised weight consists of."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.quantization.mxfp8_tensor import MXFP8Tensor


def is_quantised(value: object) -> bool:
    """Whether an attribute of a module is a weight that megatron has quantised and taken out of its parameters."""
    return isinstance(value, MXFP8Tensor)


def parts_of(value: Any) -> list[torch.Tensor]:
    """Data and scales of a quantised weight; the shard of a distributed tensor; the tensor itself, if it has memory of its own.

    Args:
        value: A weight for which `is_quantised`, or a tensor of a subclass. PyTorch's name their parts in ``__tensor_flatten__``,
            Transformer Engine's have them as private attributes.
    """
    if is_quantised(value):
        return [value.data, value.scale]
    if hasattr(value, "__tensor_flatten__"):
        parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    else:
        own = vars(value).items()
        parts = [part for name, part in own if name.startswith("_") and isinstance(part, torch.Tensor)]
    return [*parts, value] if not parts or value.data_ptr() else parts
