"""Windows of a causal convolution at given positions of packed sequences.

The state of the convolution after a token is its last ``d_conv`` inputs. Where fewer than that were computed in this
step, the window reaches back into the one that the sequence started from. (megatron-core pads with zeros there.)
"""

from __future__ import annotations

import torch


def conv_windows(
    inputs: torch.Tensor, initial: torch.Tensor, sequences: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The last ``d_conv`` inputs before each end.

    Args:
        inputs: (tokens, dim), the convolution's inputs, sequences packed one after the other.
        initial: (sequences, dim, d_conv), the window before each sequence's first token, newest last.
        sequences: (windows,) int64, the row of ``initial`` for each window.
        starts: (windows,) int64, the row of ``inputs`` where its sequence starts.
        ends: (windows,) int64, the row of ``inputs`` after the window's newest input; ``ends >= starts``.

    Returns:
        (windows, dim, d_conv) in the type of ``initial``.
    """
    if not inputs.shape[0]:
        return initial[sequences]  # all spans are empty, and there is no row to point at
    d_conv = initial.shape[2]
    rows = ends[:, None] + torch.arange(-d_conv, 0, device=ends.device)  # (windows, d_conv)
    before = rows < starts[:, None]
    computed = inputs[rows.clamp(0, inputs.shape[0] - 1)].transpose(1, 2)  # (windows, dim, d_conv)
    columns = (rows - starts[:, None] + d_conv).clamp(0, d_conv - 1)
    earlier = initial[sequences].gather(2, columns[:, None, :].expand(-1, initial.shape[1], -1))
    return torch.where(before[:, None, :], earlier, computed.to(initial.dtype))
