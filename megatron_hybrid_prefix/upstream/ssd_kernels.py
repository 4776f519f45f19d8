"""Megatron's Triton kernels of a chunked scan, under public names. Importing this module needs a GPU."""

from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd as chunk_scores
from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd as chunk_scan
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd as chunk_cumsum
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_state_fwd as chunk_states

__all__ = ["chunk_cumsum", "chunk_scan", "chunk_scores", "chunk_states"]
