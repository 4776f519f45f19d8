"""Megatron's Triton kernels of a chunked scan, under public names. Importing this module needs Triton; running them, a GPU.

`AUTOTUNED` has the kernels inside them by name. Triton times the configurations of each at its first call, and keeps the fastest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_hybrid_prefix.upstream.modules import SSD_KERNELS

_bmm: Any = import_module(f"{SSD_KERNELS}.ssd_bmm")
_scan: Any = import_module(f"{SSD_KERNELS}.ssd_chunk_scan")
_state: Any = import_module(f"{SSD_KERNELS}.ssd_chunk_state")

chunk_scores = _bmm._bmm_chunk_fwd
chunk_scan = _scan._chunk_scan_fwd
chunk_cumsum = _state._chunk_cumsum_fwd
AUTOTUNED = {
    "chunk_cumsum": _state._chunk_cumsum_fwd_kernel,
    "chunk_scores": _bmm._bmm_chunk_fwd_kernel,
    "chunk_scan": _scan._chunk_scan_fwd_kernel,
}
