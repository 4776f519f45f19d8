"""The model of `naive_model` with the recurrence as one masked product. Fast enough for hundreds of prompts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.harness.naive_model import NaiveHybridModel


class QuadraticHybridModel(NaiveHybridModel):
    """`NaiveHybridModel` without a loop over tokens, and without ``zero_ssm_at`` and ``zero_conv_at``.

    A Mamba2 layer is attention with decaying weights (SSD, https://arxiv.org/abs/2405.21060, section 3). With L the
    running sum of the log-decays, the output of token t is the sum over s <= t of (C_t . B_s) exp(L_t - L_s) dt_s x_s.
    Memory grows with the square of the length. There are no chunks and no state.
    """

    def _mamba(self, x, prefix, zero_ssm_at, zero_conv_at):
        assert zero_ssm_at is None and zero_conv_at is None, "there is no state to be replaced"
        c = self.config
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        n, heads, dim, groups = len(x), c.mamba_num_heads, c.mamba_head_dim, c.mamba_num_groups
        inner, shared = heads * dim, groups * c.mamba_state_dim
        z, xbc, dt = (x @ w["in_proj.weight"].T).split([inner, inner + 2 * shared, heads], dim=-1)
        before = F.pad(xbc.T, (c.d_conv - 1, 0))
        xbc = F.silu(F.conv1d(before[None], w["conv1d_weight"], w["conv1d_bias"], groups=inner + 2 * shared)[0].T)
        values, b, c_ = xbc.split([inner, shared, shared], dim=-1)
        values = values.reshape(n, heads, dim)
        dt = F.softplus(dt + w["dt_bias"])
        summed = torch.cumsum(-torch.exp(w["A_log"]) * dt, dim=0).T  # (heads, tokens)
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        decay = (summed[:, :, None] - summed[:, None, :]).masked_fill_(later, float("-inf")).exp_()
        scores = torch.einsum("tgn,sgn->gts", c_.reshape(n, groups, -1), b.reshape(n, groups, -1))
        weights = decay.view(groups, heads // groups, n, n).mul_(scores[:, None]).view(heads, n, n)
        y = torch.einsum("hts,shd->thd", weights, dt[:, :, None] * values) + w["D"][:, None] * values
        y = (y.reshape(n, -1) * F.silu(z)).view(n, groups, -1)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return (y.reshape(n, -1) * w["norm.weight"]) @ w["out_proj.weight"].T
