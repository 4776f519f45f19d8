"""Mamba2 recurrence for decode steps.

Replaces `megatron.core.ssm.ops.mamba_ssm.selective_state_update`.
"""

import torch

from megatron_hybrid_prefix.ops.elementwise import compute_dtype, silu, softplus


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

    A negative state index marks padding: the output rows are zero, and neither state is read or written.

    Args:
        state: (slots, nheads, dim, dstate), floating. Updated in place.
        x: (batch, steps, nheads, dim), floating.
        dt: as x, the same for all of dim.
        A: (nheads, dim, dstate), the same for all of dim and dstate.
        B: (batch, steps, ngroups, dstate).
        C: as B.
        D: (nheads, dim).
        z: as x, or None; the output is multiplied by silu(z).
        dt_bias: (nheads, dim), the same for all of dim.
        dt_softplus: must be True.
        state_batch_indices: (batch,), integer: slot of each row, negative for padding; None means slot = row.
        intermediate_ssm_states: (slots, steps, nheads, dim, dstate), or None: receives the state after every step, in the
            row of the request's *slot*.

    Returns:
        Shape and dtype of x.
    """
    assert dt_softplus and D is not None and dt_bias is not None
    slots = torch.arange(len(x), device=x.device) if state_batch_indices is None else state_batch_indices
    out, wide, repeat, real = torch.zeros_like(x), compute_dtype(x), x.shape[2] // B.shape[2], slots >= 0
    own = slots[real].long()
    new, (B, C) = x[real].to(wide), (part[real].to(wide).repeat_interleave(repeat, 2) for part in (B, C))
    step = softplus(dt[real][..., 0].to(wide) + dt_bias[:, 0].to(wide))
    decay, h = torch.exp(step * A[:, 0, 0].to(wide)), state[own].to(wide)
    for token in range(x.shape[1]):
        written = (B[:, token] * step[:, token, :, None]).unsqueeze(2) * new[:, token].unsqueeze(3)
        h = h * decay[:, token, :, None, None] + written
        y = (h * C[:, token].unsqueeze(2)).sum(-1) + D.to(wide) * new[:, token]
        out[real, token] = (y if z is None else y * silu(z[real, token].to(wide))).to(x.dtype)
        if intermediate_ssm_states is not None:
            intermediate_ssm_states[own, token] = h.to(intermediate_ssm_states.dtype)
    state[own] = h.to(state.dtype)
    return out
