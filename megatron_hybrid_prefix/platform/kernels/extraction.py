"""Copying states at chosen boundaries out of a prefill, for prefix caching.

Replaces `megatron.core.ssm.ops.intermediate_extraction.{scatter_intermediate_ssm,scatter_intermediate_conv}`.
"""

import torch
from torch import Tensor


@torch.no_grad()
def scatter_intermediate_ssm(states: Tensor, chunk_indices: Tensor, real_count_gpu: Tensor, out: Tensor) -> None:
    """Copy `states[chunk_indices[i]]` to `out[i]` for i < real count; later rows of `out` do not change.

    Args:
        states: (nchunks, *state_shape), floating, contiguous.
        chunk_indices: (max_count,), int64; only the first real-count entries are read.
        real_count_gpu: (1,), int32 (named for upstream; any device).
        out: (>= max_count, *state_shape), contiguous, written in place, cast to its dtype.
    """
    rows = chunk_indices[: int(real_count_gpu)]
    out[: len(rows)] = states[rows].to(out.dtype)


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
    """
    positions = abs_positions[: int(real_count_gpu)].long()
    window = torch.arange(-d_conv, 0, device=src.device)
    source = (positions[:, None] + window).clamp_(0, src.shape[1] - 1)  # (count, d_conv)
    out[: len(positions)] = src[0, source, : out.shape[1]].transpose(1, 2).to(out.dtype)
