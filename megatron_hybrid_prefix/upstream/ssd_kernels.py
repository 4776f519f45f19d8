"""Megatron's Triton kernels of a chunked scan, under public names. Importing this module needs Triton; running them, a GPU.

`AUTOTUNED` has the kernels inside them by name. Triton times the configurations of each at its first call, and keeps the fastest.
"""

from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd as chunk_scores
from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd as chunk_scan
from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd as chunk_cumsum
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd_kernel, _chunk_state_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_state_fwd as chunk_states

AUTOTUNED = {
    "chunk_cumsum": _chunk_cumsum_fwd_kernel,
    "chunk_states": _chunk_state_fwd_kernel,
    "chunk_scores": _bmm_chunk_fwd_kernel,
    "chunk_scan": _chunk_scan_fwd_kernel,
}
