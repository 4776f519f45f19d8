"""Depthwise causal convolutions over packed sequences, and their states.

Replaces
- megatron's `causal_conv1d_varlen_fn` (prefill), `causal_conv1d_update` (decode),
- `causal_conv1d_varlen_carry_states` (final state of a prefill), where megatron has it,
- `causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states` (the same, without the state before it), where it has not.
"""

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.convolution import convolve_reference


@torch.no_grad()
def causal_conv1d_varlen_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    activation: str = "silu",
    precomputed_seq_idx: torch.Tensor | None = None,
    precomputed_seq_start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU over packed sequences, each preceded by its own initial window.

    Every row is computed by the maps. Upstream maps padding rows to request 0 at row 0, so their values are meaningless.

    Args:
        x: (total_tokens, dim), floating.
        weight: (dim, d_conv), x's dtype; the last column meets the current token.
        bias: (dim,), floating.
        cu_seqlens: (requests + 1,), integer, ascending.
        initial_states: (requests, dim, d_conv - 1), x's dtype: the inputs before each sequence.
        activation: must be "silu".
        precomputed_seq_idx: (total_tokens,), integer: row of `initial_states` for each token; None: from `cu_seqlens`.
        precomputed_seq_start: (total_tokens,), integer: row where each token's sequence starts; likewise.

    Returns:
        (total_tokens, dim) in x's dtype.
    """
    assert activation == "silu" and initial_states is not None
    if precomputed_seq_idx is None or precomputed_seq_start is None:
        rows = torch.arange(len(x), device=x.device)
        precomputed_seq_idx = torch.bucketize(rows, cu_seqlens[1:].long(), right=True).clamp(max=len(cu_seqlens) - 2)
        precomputed_seq_start = cu_seqlens[precomputed_seq_idx]
    windows, maps = F.pad(initial_states, (1, 0)), (precomputed_seq_idx[: len(x)], precomputed_seq_start[: len(x)])
    return convolve_reference(x, windows, weight, bias, *maps)


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool | str,
    conv_state_indices: torch.Tensor | None,
    intermediate_conv_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advances the convolution by one or several tokens per request; updates `conv_state` in place.

    A negative state index marks padding: the output rows are zero, and neither state is read or written.

    Args:
        x: (batch, dim) or (batch, steps, dim), floating.
        conv_state: (slots, dim, d_conv): latest inputs, newest last. Updated in place.
        weight: (dim, d_conv).
        bias: (dim,) or None.
        silu_activation: must be "silu".
        conv_state_indices: (batch,), integer: slot of each row, negative for padding; None means slot = row.
        intermediate_conv_states: (slots, steps, dim, d_conv) or None: receives the state after every step, in the
            row of the request's *slot*.

    Returns:
        Shape and dtype of x.
    """
    assert silu_activation == "silu"
    slots = torch.arange(len(x), device=x.device) if conv_state_indices is None else conv_state_indices
    tokens = x.unsqueeze(1) if x.dim() == 2 else x
    out, real, kept, steps = torch.zeros_like(tokens), slots >= 0, conv_state.dtype, tokens.shape[1]
    own, new = slots[real].long(), tokens[real]
    maps = (of_row.repeat_interleave(steps) for of_row in (own, steps * torch.arange(len(own), device=x.device)))
    flat = convolve_reference(new.flatten(0, 1), conv_state, weight.to(kept), bias, *maps)
    out[real] = flat.unflatten(0, (len(own), steps))
    windows = torch.cat([conv_state[own], new.transpose(1, 2).to(kept)], -1).unfold(2, conv_state.shape[2], 1)
    if intermediate_conv_states is not None:
        intermediate_conv_states[own] = windows[:, :, 1:].transpose(1, 2).to(intermediate_conv_states.dtype)
    conv_state[own] = windows[:, :, steps]
    return out.view(x.shape)


@torch.no_grad()
def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """Returns the last `state_len` inputs of each packed sequence, newest last, zero-padded at the front.

    The zeros are wrong for a span that continues an earlier one: the state should keep the newest inputs of the earlier
    state. This is upstream's defect with spans shorter than d_conv (the short rest after a hit). It is kept here on purpose:
    this function measures the unmodified upstream mixer.

    Args:
        x: (total_tokens, dim).
        cu_seqlens: (batch + 1,), integer, ascending.
        state_len: inputs to keep.

    Returns:
        (batch, dim, state_len) in x's dtype, a transposed view of a contiguous (batch, state_len, dim).
    """
    requests = cu_seqlens.shape[0] - 1
    return causal_conv1d_varlen_carry_states(x, cu_seqlens, x.new_zeros(requests, x.shape[1], state_len))


@torch.no_grad()
def causal_conv1d_varlen_carry_states(
    x: torch.Tensor, cu_seqlens: torch.Tensor, previous_states: torch.Tensor
) -> torch.Tensor:
    """Returns the last inputs of each packed sequence, newest last; those before a short sequence come from its earlier state.

    Args:
        x: (total_tokens, dim).
        cu_seqlens: (requests + 1,), integer, ascending.
        previous_states: (requests, dim, state_len).

    Returns:
        (requests, dim, state_len) in the dtype of ``previous_states``, a transposed view of a contiguous (requests, state_len, dim).
    """
    state_len = previous_states.shape[-1]
    length = (cu_seqlens[1:] - cu_seqlens[:-1]).long()[:, None]
    column = torch.arange(state_len, device=x.device) + length  # of the earlier state and the sequence in a row
    earlier = previous_states.transpose(1, 2)
    states = earlier.gather(1, column.clamp(max=state_len - 1)[:, :, None].expand_as(earlier))
    if x.shape[0]:
        source = (cu_seqlens[:-1].long()[:, None] + column - state_len).clamp(0, x.shape[0] - 1)
        # A boolean index would synchronise with a GPU.
        states = torch.where((column >= state_len)[:, :, None], x[source].to(states.dtype), states)
    return states.transpose(1, 2)
