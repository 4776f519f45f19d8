"""Mamba2 recurrence for decode steps.

Replaces `megatron.core.ssm.ops.mamba_ssm.selective_state_update`.
"""

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus

from .rows import rows_and_slots


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
        state: (slots, nheads, dim, dstate), floating. Updated in place. (Upstream also takes states without heads.)
        x: (batch, steps, nheads, dim), floating.
        dt: as x; may be a stride-0 expand over dim.
        A: (nheads, dim, dstate); may be a stride-0 expand over dim and dstate.
        B: (batch, steps, ngroups, dstate).
        C: as B.
        D: (nheads, dim), or None.
        z: as x, or None; the output is multiplied by silu(z).
        dt_bias: (nheads, dim), or None.
        dt_softplus: whether to apply softplus to dt (after the bias).
        state_batch_indices: (batch,), integer: slot of each row, negative for padding; None means slot = row.
        intermediate_ssm_states: (slots, steps, nheads, dim, dstate), or None: receives the state after every step, in the
            row of the request's *slot*.

    Returns:
        Shape and dtype of x.
    """
    dtype = compute_dtype(x)
    A = _untie(A, 2).to(dtype)  # (nheads, dim, dstate), or ones
    dt = _untie(dt, 1)  # (batch, steps, nheads, dim or 1)
    D = None if D is None else D.to(dtype)
    dt_bias = None if dt_bias is None else _untie(dt_bias, 1).to(dtype)

    steps, nheads = x.shape[1:3]
    heads_per_group = nheads // B.shape[-2]
    rows, slots = rows_and_slots(state_batch_indices, x)

    out = torch.zeros_like(x)
    x, dt, B, C = (tensor[rows].to(dtype) for tensor in (x, dt, B, C))
    B, C = _by_head(B, heads_per_group), _by_head(C, heads_per_group)  # (rows, steps, nheads, dstate)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = softplus(dt)
    decay = torch.exp(A * dt[..., None])
    added = (B[..., None, :] * dt[..., None]) * x[..., None]  # (rows, steps, nheads, dim, dstate)
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
        y = y + x * D
    if z is not None:
        y = y * silu(z[rows].to(dtype))
    out[rows] = y.to(out.dtype)
    return out
