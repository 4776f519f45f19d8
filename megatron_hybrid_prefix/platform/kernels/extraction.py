"""Copying states at chosen boundaries out of a prefill, for prefix caching.

Replaces `megatron.core.ssm.ops.intermediate_extraction.{scatter_intermediate_ssm,scatter_intermediate_conv}`.
"""

import torch
from torch import Tensor


def _slots_to_fill(indices: Tensor, real_count_gpu: Tensor, out: Tensor, index_dtype: torch.dtype) -> int:
    """Make upstream's checks; returns how many leading slots to write."""
    if indices.dtype != index_dtype:
        raise ValueError(f"indices must be {index_dtype}, got {indices.dtype}")
    if real_count_gpu.dtype != torch.int32 or real_count_gpu.numel() != 1:
        raise ValueError("the real count must be one int32")
    if indices.numel() > out.shape[0]:
        raise ValueError(f"{indices.numel()} indices exceed the scratch capacity of {out.shape[0]} slots")
    return min(max(int(real_count_gpu), 0), indices.numel())


@torch.no_grad()
def scatter_intermediate_ssm(states: Tensor, chunk_indices: Tensor, real_count_gpu: Tensor, out: Tensor) -> None:
    """Copy `states[chunk_indices[i]]` to `out[i]` for i < real count; later rows of `out` do not change.

    Args:
        states: (nchunks, *state_shape), floating, contiguous.
        chunk_indices: (max_count,), int64; only the first real-count entries are read.
        real_count_gpu: (1,), int32 (named for upstream; any device).
        out: (>= max_count, *state_shape), contiguous, written in place, cast to its dtype.

    Raises:
        ValueError: dtypes, shapes or contiguity differ from the above.
        IndexError: an index among the first real-count ones is out of range.
    """
    if out.shape[1:] != states.shape[1:]:
        raise ValueError(f"out holds {tuple(out.shape[1:])}, states {tuple(states.shape[1:])}")
    if not (states.is_contiguous() and out.is_contiguous()):
        raise ValueError("states and out must be contiguous")
    count = _slots_to_fill(chunk_indices, real_count_gpu, out, torch.int64)
    for slot, chunk in enumerate(chunk_indices[:count].tolist()):
        if not 0 <= chunk < states.shape[0]:
            raise IndexError(f"chunk {chunk} is not among {states.shape[0]} chunks")
        out[slot].copy_(states[chunk])


@torch.no_grad()
def scatter_intermediate_conv(
    src: Tensor, abs_positions: Tensor, real_count_gpu: Tensor, out: Tensor, d_conv: int
) -> None:
    """Copy the `d_conv` inputs before each position, transposed, to `out[i]` for i < real count.

    A window beyond either end of `src` repeats the row at that end (upstream clamps each index). So for a position below
    d_conv the result is not what the convolution read. Later rows of `out` do not change.

    Args:
        src: (1, seq_len, dim), floating, any strides: inputs of the convolution.
        abs_positions: (max_count,), int32: the window is [position - d_conv, position).
        real_count_gpu: (1,), int32 (named for upstream; any device).
        out: (>= max_count, dim, d_conv), written in place, cast to its dtype.
        d_conv: window length in tokens.

    Raises:
        ValueError: dtypes or shapes differ from the above.
    """
    if src.dim() != 3 or src.shape[0] != 1:
        raise ValueError(f"src must be (1, seq_len, dim), got {tuple(src.shape)}")
    if out.dim() != 3 or out.shape[2] != d_conv:
        raise ValueError(f"out has shape {tuple(out.shape)}, expected (max_count, dim, {d_conv})")
    count = _slots_to_fill(abs_positions, real_count_gpu, out, torch.int32)
    if count == 0:
        return
    window = torch.arange(-d_conv, 0, device=src.device)
    source = (abs_positions[:count].long()[:, None] + window).clamp_(0, src.shape[1] - 1)  # (count, d_conv)
    out[:count].copy_(src[0, source, : out.shape[1]].transpose(1, 2))
