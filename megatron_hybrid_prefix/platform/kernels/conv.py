"""Depthwise causal convolutions over packed sequences, and their states.

Replaces
- megatron's `causal_conv1d_varlen_fn` (prefill), `causal_conv1d_update` (decode),
- `causal_conv1d_varlen_carry_states` (final state of a prefill), where megatron has it,
- `causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states` (the same, without the state before it), where it has not.

Prefill and decode add the taps in the same order, so a token gets the same bits from either.
"""

from collections.abc import Sequence

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu

from .rows import rows_and_slots


def _add_taps(taps: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns bias + sum_j taps[j] * weight[:, j], shape (..., dim), adding from the oldest tap to the newest.

    Products and sums are separate operations on purpose: a fused operation may round vector and tail lanes differently.
    """
    accumulator = bias.expand_as(taps[0])
    for j, tap in enumerate(taps):
        accumulator = accumulator + tap * weight[:, j]
    return accumulator


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

    With the precomputed maps, every row is computed by the maps. Upstream maps padding rows to request 0 at row 0, so their
    values are meaningless, as upstream. Without maps, rows after `cu_seqlens[-1]` are zero (upstream reads out of bounds).

    Args:
        x: (total_tokens, dim), floating, contiguous.
        weight: (dim, d_conv), floating, contiguous; the last column meets the current token.
        bias: (dim,), floating.
        cu_seqlens: (requests + 1,), integer, ascending.
        initial_states: (requests, dim, d_conv - 1): the inputs before each sequence, or None for zeros.
        activation: must be "silu".
        precomputed_seq_idx: (total_tokens,), integer: row of `initial_states` for each token.
        precomputed_seq_start: (total_tokens,), integer: row where each token's sequence starts.

    Returns:
        (total_tokens, dim) in x's dtype.

    Raises:
        ValueError: another activation, an index map without a start map, or a tensor that is not contiguous.
    """
    if activation != "silu":
        raise ValueError(f"only silu is supported, got {activation}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous")
    if precomputed_seq_idx is not None and precomputed_seq_start is None:
        raise ValueError("precomputed_seq_idx needs precomputed_seq_start")
    total_tokens, dim = x.shape
    d_conv = weight.shape[1]
    dtype = compute_dtype(x)

    if precomputed_seq_idx is not None and precomputed_seq_start is not None:
        request, start = precomputed_seq_idx[:total_tokens].long(), precomputed_seq_start[:total_tokens].long()
    else:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        request = torch.repeat_interleave(torch.arange(lengths.shape[0], device=x.device), lengths)
        start = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    mapped_tokens = request.shape[0]
    token = torch.arange(mapped_tokens, device=x.device)

    shifted_x = torch.zeros(d_conv - 1 + mapped_tokens, dim, dtype=dtype, device=x.device)
    shifted_x[d_conv - 1 :] = x[:mapped_tokens]
    taps = []
    for j in range(d_conv):
        source = token - (d_conv - 1) + j
        tap = shifted_x[j : j + mapped_tokens]
        outside = torch.nonzero(source < start).squeeze(1)  # rows whose tap lies before their sequence; few
        if outside.numel():
            tap = tap.clone()
            tap[outside] = 0.0
            if initial_states is not None:
                column = d_conv - 1 - (start - source)[outside]
                inside_state = column >= 0
                rows, column = outside[inside_state], column[inside_state]
                tap[rows] = initial_states[request[rows], :, column].to(dtype)
        taps.append(tap)

    out = torch.zeros_like(x)
    out[:mapped_tokens] = silu(_add_taps(taps, weight.to(dtype), bias.to(dtype))).to(x.dtype)
    return out


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

    A negative state index marks padding: the output rows are zero, and neither state is read or written. Despite its name,
    `silu_activation` is compared with the string "silu", as upstream: True means no activation.

    Args:
        x: (batch, dim) or (batch, steps, dim), floating.
        conv_state: (slots, dim, state_len), state_len >= d_conv - 1: latest inputs, newest last. Updated in place.
        weight: (dim, d_conv), d_conv 2, 3 or 4.
        bias: (dim,) or None.
        silu_activation: "silu" to apply SiLU.
        conv_state_indices: (batch,), integer: slot of each row, negative for padding; None means slot = row.
        intermediate_conv_states: (slots, steps, dim, state_len) or None: receives the state after every step, in the
            row of the request's *slot*.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: d_conv is not 2, 3 or 4, or the state holds less than d_conv - 1 inputs.
    """
    d_conv, state_len = weight.shape[-1], conv_state.shape[-1]
    if d_conv not in (2, 3, 4):
        raise ValueError(f"d_conv must be 2, 3 or 4, got {d_conv}")
    if state_len < d_conv - 1:
        raise ValueError(f"a state of {state_len} inputs is too short for d_conv {d_conv}")
    steps_x = x.unsqueeze(1) if x.dim() == 2 else x
    steps, dim = steps_x.shape[1:]
    dtype = compute_dtype(x)
    rows, slots = rows_and_slots(conv_state_indices, x)
    weight = weight.to(dtype)
    bias = torch.zeros(dim, dtype=dtype, device=x.device) if bias is None else bias.to(dtype)

    out = torch.zeros_like(steps_x)
    new = steps_x[rows]  # (rows, steps, dim)
    inputs = torch.cat([conv_state[slots], new.transpose(1, 2).to(conv_state.dtype)], dim=-1)
    earlier = inputs.transpose(1, 2).to(dtype)  # (rows, state_len + steps, dim)
    first = state_len - d_conv + 1
    taps = [*(earlier[:, first + j : first + j + steps] for j in range(d_conv - 1)), new.to(dtype)]
    y = _add_taps(taps, weight, bias)
    if silu_activation == "silu":
        y = silu(y)
    out[rows] = y.to(out.dtype)
    conv_state[slots] = inputs[..., steps:]
    if intermediate_conv_states is not None:
        after = inputs.unfold(-1, state_len, 1)[:, :, 1:].transpose(1, 2)  # (rows, steps, dim, state_len)
        intermediate_conv_states[slots, :steps] = after.to(intermediate_conv_states.dtype)
    return out.squeeze(1) if x.dim() == 2 else out


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
