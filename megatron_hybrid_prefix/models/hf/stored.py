"""`StoredWeight`: a weight in a file, and of one in fp8 the scales, by ``quantization_config``. No torch, no megatron.

Folders in fp8 come from transformers (``fp8``), NVIDIA's Model Optimizer (``modelopt``) and llm-compressor
(``compressed-tensors``). A weight is float8_e4m3 times a scale per block; its scales are a tensor of the weight's name and
``_scale_inv`` or ``_scale``. The dtype in the file says whether a weight is in fp8: lists of modules
(``modules_to_not_convert``, ``ignore``, ``exclude_modules``) are not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.support.arithmetic import ceil_div

DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2), "F8_E4M3": ("float8_e4m3fn", 1)}
DTYPES |= {"F8_E8M0": ("float8_e8m0fnu", 1)}  # powers of two, of scales (``scale_fmt: ue8m0``)
"""By the name in a file: PyTorch's, and bytes of a value."""
type Block = tuple[int | None, int | None]
"""Rows and columns of a matrix that share a scale; None: all of them."""

_TENSOR: Block = (None, None)
_METHODS = "fp8", "modelopt", "compressed-tensors"
_ONLY = "only 8-bit floats with scales are read, no integers and no 4 bits; take the bfloat16 model or an fp8 one"
# Scales of activations, keys and values, which are computed in the model's dtype here.
_LEFT_OUT = (".input_scale", "activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight in a file.

    Attributes:
        name: Its name.
        file: The file.
        dtype: "float32", "bfloat16", "float16" or "float8_e4m3fn".
        shape: Its shape.
        offset_bytes: Where its values begin in the file.
        scale: Of a weight in fp8, its scales, in whatever file: a value is that in the file times its block's scale.
        block: Of a weight in fp8, the rows and columns of a matrix that share a scale; those at its end may be fewer.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    scale: StoredWeight | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the file."""
        return dict(DTYPES.values())[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes in the files, with its scales."""
        return math.prod(self.shape) * self.value_bytes + (self.scale.stored_bytes if self.scale else 0)


def blocks_of(given: Given) -> tuple[Block, ...]:
    """The blocks that scales of a folder may be for, by its ``config.json``; none: its weights are not quantised.

    Raises:
        ValueError: The weights are quantised in another way than fp8.
    """
    if given.get("quantization_config") is None:
        return ()
    config = given.inner("quantization_config")
    method = config.get("quant_method")
    if method not in _METHODS:
        raise config.error(f"quant_method is {shown(method)}, none of {', '.join(_METHODS)}: {_ONLY}")
    if method == "modelopt" and (algorithm := config.get("quant_algo")) != "FP8":
        raise config.error(f"quant_algo is {shown(algorithm)}, not FP8: {_ONLY}")
    if method != "compressed-tensors":
        return (_TENSOR if config.get("weight_block_size") is None else _block(config, "weight_block_size"),)
    if config.get("transform_config"):
        raise config.error("transform_config: megatron's layers do not rotate activations")
    groups = config.inner("config_groups")
    return tuple(_block_of_group(groups.inner(name)) for name in groups.data) or (
        _TENSOR,
    )  # none: of keys and values only


def _block_of_group(group: Given) -> Block:
    """Of weights that are quantised alike."""
    weights = group.inner("weights")
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind != ("float", 8):
        raise weights.error(f"type and num_bits are {shown(kind)}: {_ONLY}")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error(f"strategy is {shown(strategy)}, none of tensor, channel, block")
    return {"tensor": _TENSOR, "channel": (1, None)}.get(strategy) or _block(weights, "block_structure")


def _block(given: Given, name: str) -> Block:
    value: Any = given.get(name)
    if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise given.error(f"{name} is {shown(value)}, no numbers of rows and columns")
    return value[0], value[1]


def with_scales(weights: Mapping[str, StoredWeight], blocks: tuple[Block, ...]) -> dict[str, StoredWeight]:
    """The weights of a folder, those in fp8 with their scales, which are no weights of their own.

    Args:
        weights: All tensors of the files by name.
        blocks: As of `blocks_of`.

    Raises:
        ValueError: A weight in fp8 has no scale, or its scales have another shape than all ``blocks`` require.
    """
    left_out = _LEFT_OUT if blocks else ()
    found = {name: weight for name, weight in weights.items() if not name.endswith(left_out)}
    for name, weight in weights.items():
        if weight.dtype != "float8_e4m3fn":
            continue
        if not blocks:
            raise ValueError(f"{weight.file}: {name} has dtype F8_E4M3, and config.json has no quantization_config")
        scale = found.pop(f"{name}_scale_inv", None) or found.pop(f"{name}_scale", None)
        if scale is None:
            raise ValueError(f"{weight.file}: {name} has dtype F8_E4M3, and no file has its {name}_scale_inv or _scale")
        found[name] = replace(weight, scale=scale, block=_block_of(weight, scale, blocks))
    return found


def _block_of(weight: StoredWeight, scale: StoredWeight, blocks: tuple[Block, ...]) -> tuple[int, int]:
    """The block of these scales. Trailing dimensions of 1 may be missing."""
    expected = []
    for block in blocks if len(weight.shape) > 1 else ():
        rows, columns = (size or whole for size, whole in zip(block, weight.shape[-2:], strict=True))
        grid = (ceil_div(weight.shape[-2], rows), ceil_div(weight.shape[-1], columns))
        expected.append((*weight.shape[:-2], *grid))
        if (*scale.shape, 1, 1, 1)[: len(weight.shape)] == expected[-1] and len(scale.shape) <= len(weight.shape):
            return rows, columns
    raise ValueError(
        f"{scale.name} in {scale.file} has shape {scale.shape}; for {weight.name} of shape {weight.shape} "
        f"quantization_config requires {' or '.join(map(str, expected)) or 'a matrix'}"
    )
