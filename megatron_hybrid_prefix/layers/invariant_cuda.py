"""What ``HybridPrefixConfig(exact="bits")`` needs of a GPU: which models its kernels support, and autotuners that are pinned."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid_prefix.errors import UpstreamDriftError

_HOPPER = 9
_LARGEST_HEAD = 256
# Those that were compared bit by bit on an H200. For `hybrid-4b` Triton finds 64 x 64 fastest for the scan, and 64 x 128 for the scores.
_PINNED = {
    "chunk_cumsum": {"BLOCK_SIZE_H": 8},
    "chunk_scores": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32},
    "chunk_scan": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32},
}
_tuned: dict[str, Any] = {}  # by kernel, the configurations that it had


def cuda_problem(model: Any) -> str | None:
    """Why this model's rows would depend on each other on this GPU, in one line; None if they do not.

    Attention needs FlashAttention 4 on Hopper with one split: its tiles then depend on the size of a head only, and lie on
    the keys from position 0. Models in float32 run this package's kernel, one program a query.
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


def pin_kernels() -> None:
    """Give each autotuned kernel of Mamba2's scan one configuration, in this process. Repeating it does nothing.

    Triton times configurations in each process, and the fastest may differ from run to run and from rank to rank, and its bits.

    Raises:
        UpstreamDriftError: A kernel has no such configuration.
    """
    from megatron_hybrid_prefix.upstream.ssd_kernels import AUTOTUNED

    found = {}
    for name, wanted in _PINNED.items():
        configs = _tuned.get(name, AUTOTUNED[name].configs)
        found[name] = [config for config in configs if config.kwargs == wanted][:1]
        if not found[name]:
            raise UpstreamDriftError(f"megatron's kernel of {name} has no configuration {wanted}: exact='bits' pins it")
    for name, config in found.items():
        _tuned.setdefault(name, AUTOTUNED[name].configs)
        AUTOTUNED[name].configs = config


def unpin_kernels() -> None:
    """Undo `pin_kernels`."""
    from megatron_hybrid_prefix.upstream.ssd_kernels import AUTOTUNED

    for name in list(_tuned):
        AUTOTUNED[name].configs = _tuned.pop(name)
