"""What ``HybridPrefixConfig(exact="bits")`` needs of a GPU: which models its kernels support."""

from __future__ import annotations

from typing import Any

import torch

_HOPPER = 9
_LARGEST_HEAD = 256


def cuda_problem(model: Any) -> str | None:
    """Why this model's rows would depend on each other on this GPU, in one line; None if they do not.

    Attention needs FlashAttention 4 on Hopper with one split: its tiles then depend on the size of a head only, and lie on
    the keys from position 0. Models in float32 run this package's kernel, whose tiles do too.
    """
    from megatron_hybrid_prefix.upstream.packages import attention_family

    config, major = model.config, torch.cuda.get_device_capability()[0]
    if major != _HOPPER:
        return f"kernels were compared bit by bit on Hopper GPUs only, this GPU has capability {major}"
    if config.params_dtype == torch.float32:
        return None
    family = attention_family()
    if family != "FA4":
        return f"attention in {config.params_dtype} needs FlashAttention 4, this machine has {family or 'none'}"
    size = config.kv_channels
    if size % 16 or size > _LARGEST_HEAD:
        return f"attention heads of {size} channels: FlashAttention 4 supports multiples of 16 up to {_LARGEST_HEAD}"
    return None
