"""Mamba2 recurrence for decode steps.

Replaces `megatron.core.ssm.ops.mamba_ssm.selective_state_update`.
"""

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus

from .rows import rows_and_slots


def _with_steps_and_heads(tensor: torch.Tensor, has_heads: bool, is_single_step: bool) -> torch.Tensor:
    """Views x, dt, z, B or C as (batch, steps, heads or groups, features)."""
    if is_single_step:
        tensor = tensor.unsqueeze(1)
    return tensor if has_heads else tensor.unsqueeze(2)


def _untie(tensor: torch.Tensor, last_dims: int) -> torch.Tensor:
    """Narrow trailing dimensions of a stride-0 expand to 1: the same values, without copies."""
    if all(tensor.stride(d) == 0 for d in range(-last_dims, 0)):
        for dim in range(-last_dims, 0):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _by_head(tensor: torch.Tensor, heads_per_group: int) -> torch.Tensor:
    """(rows, steps, ngroups, dstate) as (rows, steps, nheads, dstate); a view if there is one group."""
    return tensor.unsqueeze(3).expand(-1, -1, -1, heads_per_group, -1).flatten(2, 3)


@torch.no_grad()
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    intermediate_ssm_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance the recurrence by one or several tokens per request; updates `state` in place.

    The state is float32 (float64 for float64 `x`) within a call, and is rounded to its dtype only when stored. A negative state
    index marks padding: the output rows are zero, and neither state is read or written. If `intermediate_ssm_states` is None,
    upstream passes `x` as a dummy pointer and writes states into its first element, because its test "pointer is None" is
    never true. This function does not write to `x`.

    Args:
        state: (slots, dim, dstate) or (slots, nheads, dim, dstate), floating. Updated in place.
        x: (batch, dim), (batch, steps, dim), (batch, nheads, dim) or (batch, steps, nheads, dim), floating; has heads
            if `state` has them.
        dt: as x; may be a stride-0 expand over dim.
        A: (dim, dstate) or (nheads, dim, dstate); may be a stride-0 expand over dim and dstate.
        B: (batch, dstate), (batch, steps, dstate), (batch, ngroups, dstate) or (batch, steps, ngroups, dstate).
        C: as B.
        D: (dim,) or (nheads, dim), or None.
        z: as x, or None; the output is multiplied by silu(z).
        dt_bias: (dim,) or (nheads, dim), or None.
        dt_softplus: whether to apply softplus to dt (after the bias).
        state_batch_indices: (batch,), integer: slot of each row, negative for padding; None means slot = row.
        intermediate_ssm_states: (slots, steps, nheads, dim, dstate), without heads (slots, steps, dim, dstate), or
            None: receives the state after every step, in the row of the request's *slot*.

    Returns:
        Shape and dtype of x.
    """
    has_heads = state.dim() > 3
    is_single_step = x.dim() == (3 if has_heads else 2)
    dtype = compute_dtype(x)
    x_steps, dt, B, C = (_with_steps_and_heads(t, has_heads, is_single_step) for t in (x, dt, B, C))
    z = None if z is None else _with_steps_and_heads(z, has_heads, is_single_step)
    if not has_heads:
        state = state.unsqueeze(1)
        if intermediate_ssm_states is not None and intermediate_ssm_states.dim() == 4:
            intermediate_ssm_states = intermediate_ssm_states.unsqueeze(2)
    A = _untie(A if A.dim() == 3 else A.unsqueeze(0), 2).to(dtype)  # (nheads, dim, dstate), or ones
    dt = _untie(dt, 1)  # (batch, steps, nheads, dim or 1)
    D = None if D is None else D.to(dtype)
    dt_bias = None if dt_bias is None else _untie(dt_bias, 1).to(dtype)

    steps, nheads = x_steps.shape[1:3]
    heads_per_group = nheads // B.shape[-2]
    rows, slots = rows_and_slots(state_batch_indices, x_steps)

    out = torch.zeros_like(x_steps)
    x_steps, dt, B, C = (tensor[rows].to(dtype) for tensor in (x_steps, dt, B, C))
    B, C = _by_head(B, heads_per_group), _by_head(C, heads_per_group)  # (rows, steps, nheads, dstate)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = softplus(dt)
    decay = torch.exp(A * dt[..., None])
    added = (B[..., None, :] * dt[..., None]) * x_steps[..., None]  # (rows, steps, nheads, dim, dstate)
    h = state[slots].to(dtype)  # (rows, nheads, dim, dstate)
    after = []
    for step in range(steps):
        h = h * decay[:, step] + added[:, step]
        after.append(h)
    state[slots] = h.to(state.dtype)
    states = torch.stack(after, dim=1) if steps > 1 else h.unsqueeze(1)
    if intermediate_ssm_states is not None:
        intermediate_ssm_states[slots, :steps] = states.to(intermediate_ssm_states.dtype)
    y = (states * C[..., None, :]).sum(-1)  # (rows, steps, nheads, dim)
    if D is not None:
        y = y + x_steps * D
    if z is not None:
        y = y * silu(z[rows].to(dtype))
    out[rows] = y.to(out.dtype)

    if not has_heads:
        out = out.squeeze(2)
    return out.squeeze(1) if is_single_step else out
