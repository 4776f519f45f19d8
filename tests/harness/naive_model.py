"""The whole hybrid model in float64, with a loop over tokens in recurrent layers. Short, and independent of all
kernels.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F

UNIT_ROUNDOFF = 2.0**-24  # of float32
PIECE = 32  # tokens whose states and scores stay in a processor's cache
# Log-probs by model and tokens, those asked for last: the same prompts are sent in every scheduling mode, and under mutants.
KNOWN: OrderedDict[Any, torch.Tensor] = OrderedDict()
MOST_KNOWN = 96  # about 1 MB each
# The norm that Transformer Engine fuses into a linear layer, by the end of that layer's name.
FUSED_NORMS = {
    "mixer.in_proj": "norm",
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}


def local_weights(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names that local layers have for them, also those of Transformer Engine's layers."""
    weights = {}
    for name, value in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        if last == "layer_norm_weight":
            linear = next(end for end in FUSED_NORMS if owner.endswith(f".{end}"))
            name = f"{owner.removesuffix(linear)}{FUSED_NORMS[linear]}.weight"
        if last != "_extra_state":
            weights[name] = value
    return weights if "decoder.final_layernorm.weight" not in weights else _of_hybrid(weights)


def _of_hybrid(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a ``GPTModel`` by the names of a ``HybridModel``, whose layers are a mixer, or an MLP or experts."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, value in weights.items():
        name = name.replace("decoder.final_layernorm", "decoder.final_norm")
        if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            name = f"decoder.layers.{2 * int(match[1]) + match[2].startswith(('mlp', 'pre_mlp'))}.{match[2]}"
        if match := re.match(r"(.*\.experts)\.local_experts\.\d+\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[2]}_weight", []).append(value)  # in the order of their numbers
        else:
            found[name] = value
    return found | {name: torch.stack(stack) for name, stack in experts.items()}


class NaiveHybridModel:
    """Reference for a model with tp=1 and pp=1."""

    def __init__(self, model: Any, config: Any) -> None:
        self.config = config
        self.weights = {name: value.detach().double() for name, value in local_weights(model).items()}

    @cached_property
    def digest(self) -> bytes:
        """Of the kind of model, its dimensions and its weights."""
        digest = blake2b(repr((type(self), self.config)).encode())
        for name, value in self.weights.items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().view(-1).numpy())
        return digest.digest()

    def log_probs(self, tokens: list[int], zero_ssm_at: int | None = None, zero_conv_at: int | None = None):
        """Log-probs after every token: (tokens, vocabulary), float64. The arguments are those of `logits`.

        No later token changes them, so those of a longer sequence are taken if they are known.
        """
        asked = tuple(tokens)
        rest = self.digest, self.weights["output_layer.weight"].device, zero_ssm_at, zero_conv_at
        key = next((key for key in KNOWN if key[1] == rest and key[0][: len(asked)] == asked), None)
        if key is None:
            key = asked, rest
            KNOWN[key] = torch.log_softmax(self.logits(tokens, zero_ssm_at, zero_conv_at), dim=-1)
            if len(KNOWN) > MOST_KNOWN:
                KNOWN.popitem(last=False)
        KNOWN.move_to_end(key)
        return KNOWN[key][: len(asked)].clone()

    def logits(self, tokens: list[int], zero_ssm_at: int | None = None, zero_conv_at: int | None = None):
        """Logits after every token: (tokens, vocabulary), float64.

        Before position ``zero_ssm_at`` every recurrent layer's matrix state is zeros, before ``zero_conv_at`` the windows are.
        """
        w, by = self.weights, self.config.residual_multiplier
        self.router_scores = []  # of each layer with experts, (tokens, experts)
        x = w["embedding.word_embeddings.weight"][tokens] * self.config.embedding_multiplier
        for i, symbol in enumerate(self.config.layer_pattern):
            prefix = f"decoder.layers.{i}."
            if symbol == "M":
                normed = self._norm(x, prefix + "norm.weight")
                layer = self._delta_product if prefix + "mixer.conv1d.weight" in w else self._mamba
                x = x + by * layer(normed, prefix + "mixer.", zero_ssm_at, zero_conv_at)
            elif symbol == "G":
                normed = self._norm(x, prefix + "input_layernorm.weight")
                x = x + by * self._delta_net(normed, prefix + "self_attention.", zero_ssm_at, zero_conv_at)
            elif self.config.normalises_output(i):
                layer, part = (self._attention, "self_attention.") if symbol == "*" else (self._mlp, "mlp.")
                x = x + by * self._norm(layer(x, prefix + part), prefix + "output_norm.weight")
            elif symbol == "*":
                normed = self._norm(x, prefix + "input_layernorm.weight")
                x = x + by * self._attention(normed, prefix + "self_attention.")
            else:
                layer = self._experts if symbol == "E" else self._mlp
                x = x + by * layer(self._norm(x, prefix + "pre_mlp_layernorm.weight"), prefix + "mlp.")
        return self._norm(x, "decoder.final_norm.weight") @ w["output_layer.weight"].T / self.config.logits_scaling

    def noise(self, tokens: list[int], seeds: int = 4) -> torch.Tensor:
        """Effect of float32 rounding on each log-prob, for any machine: (tokens, vocabulary), float64.

        A float32 product of n terms equals an exact one whose weights are off by at most gamma_n = n u / (1 - n u) (N.
        Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.5), and in practice by sqrt(n) u.
        So this is the change of each log-prob (root mean square over seeds) when every weight is off by sqrt(n) u times
        a normal number. It is the condition of the log-prob, whichever library computes it.
        """
        exact = self.log_probs(tokens)
        return self._change(lambda model: model.logits(tokens).log_softmax(-1), exact, seeds)

    def router_margins(self, tokens: list[int], seeds: int = 4) -> torch.Tensor:
        """How far each token is from other experts, over what rounding does to it, see `noise`: (tokens,), float64.

        The smallest of all layers: the score of the last expert that is chosen above that of the next one. Where it is small,
        rounding chooses, and log-probs after this token may be quite others. Infinite without experts.
        """
        if "E" not in self.config.layer_pattern or self.config.moe_router_topk == self.config.num_moe_experts:
            return torch.full((len(tokens),), torch.inf, dtype=torch.float64)
        exact = self._margins(tokens)
        return (exact / self._change(lambda model: model._margins(tokens), exact, seeds)).amin(0)

    def _margins(self, tokens: list[int]) -> torch.Tensor:
        """Of the router of each layer: (layers, tokens), float64."""
        self.logits(tokens)
        best = torch.stack(self.router_scores).topk(self.config.moe_router_topk + 1, dim=-1).values
        return best[..., -2] - best[..., -1]

    def _change(self, of: Callable[[NaiveHybridModel], torch.Tensor], exact: torch.Tensor, seeds: int) -> torch.Tensor:
        """What the errors of weights do to a value of the model, see `noise`."""
        off, total = object.__new__(type(self)), 0.0
        off.config = self.config
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            off.weights = {}
            for name, value in self.weights.items():
                terms = value.shape[-1] if value.dim() > 1 else 1
                by = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                off.weights[name] = value * (1 + terms**0.5 * UNIT_ROUNDOFF * by)
            total = total + (of(off) - exact).square()
        return (total / seeds).sqrt()

    def carried(self, state: torch.Tensor, at: int) -> torch.Tensor:
        """Matrix states as the token at this position finds them: (heads, *shape of a component in a slot)."""
        return state

    def _norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon) * self.weights[name]

    def _mlp(self, x, prefix):
        return self._feed_forward(x, *(self.weights[f"{prefix}linear_fc{number}.weight"] for number in (1, 2)))

    def _feed_forward(self, x, first, second):
        h = x @ first.T
        if self.config.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return (F.silu(gate) * up) @ second.T
        return F.relu(h).square() @ second.T

    def _experts(self, x, prefix):
        scores = x @ self.weights[prefix + "router.weight"].T
        if self.config.moe_router_score == "sigmoid":
            chosen_by = scores.sigmoid() + self.weights[prefix + "router.expert_bias"]
            best = chosen_by.topk(self.config.moe_router_topk, dim=-1).indices
            values = scores.sigmoid().gather(1, best)
            values = values / values.sum(-1, keepdim=True) * self.config.moe_router_scaling
        else:
            chosen_by = scores
            values, best = scores.topk(self.config.moe_router_topk, dim=-1)
            values = values.softmax(-1)
        self.router_scores.append(chosen_by)
        weights = torch.zeros(len(x), self.config.num_moe_experts, dtype=torch.float64, device=x.device)
        weights.scatter_(1, best, values)
        stacks = zip(*(self.weights[f"{prefix}experts.linear_fc{number}_weight"] for number in (1, 2)), strict=True)
        latent = self.config.moe_latent_size
        narrow = x @ self.weights[prefix + "fc1_latent_proj.weight"].T if latent else x
        outputs = [self._feed_forward(narrow, first, second) for first, second in stacks]
        routed = torch.einsum("te,eth->th", weights, torch.stack(outputs))
        if latent:
            routed = routed @ self.weights[prefix + "fc2_latent_proj.weight"].T
        if not self.config.moe_shared_expert_intermediate_size:
            return routed
        shared = self._mlp(x, prefix + "shared_experts.")
        if self.config.moe_shared_expert_gate:
            shared = shared * torch.sigmoid(x @ self.weights[prefix + "shared_experts.gate_weight"].T)
        return routed + shared

    def _attention(self, x, prefix):
        c, w, n = self.config, self.weights, len(x)
        scale = c.kv_channels**-0.5 if c.attention_multiplier is None else c.attention_multiplier
        per_group = c.num_attention_heads // c.num_query_groups
        heads = [per_group, per_group * c.attention_output_gate, 1, 1]
        qkv = (x @ w[prefix + "linear_qkv.weight"].T).view(n, c.num_query_groups, sum(heads), c.kv_channels)
        q, gate, k, v = qkv.split(heads, dim=2)
        if c.qk_norm and c.attention_post_norm:
            q, k = (
                self._norm(part.flatten(1), f"{prefix}{name}_layernorm.norm.weight").view_as(part)
                for name, part in (("q", q), ("k", k))
            )
        elif c.qk_norm:
            q, k = self._norm(q, prefix + "q_layernorm.weight"), self._norm(k, prefix + "k_layernorm.weight")
        if c.rotary_base is not None:
            q, k = self._turned(q), self._turned(k)
        k, v = k[:, :, 0], v[:, :, 0]
        out = []
        for at in range(0, n, PIECE):
            end = min(at + PIECE, n)
            scores = torch.einsum("tgqd,sgd->gqts", q[at:end], k[:end]) * scale
            scores.masked_fill_(
                torch.ones(end - at, end, dtype=torch.bool, device=x.device).triu(at + 1), float("-inf")
            )
            out.append(torch.einsum("gqts,sgd->tgqd", scores.softmax(-1), v[:end]))
        out = torch.cat(out)
        if c.attention_output_gate:
            out = out * gate.sigmoid()
        return out.reshape(n, -1) @ w[prefix + "linear_proj.weight"].T

    def _turned(self, x):
        """Rotary embedding of (tokens, ..., channels): channel i and i + half of the turned part are a pair."""
        c = self.config
        half = int(x.shape[-1] * c.rotary_fraction) // 2
        numbers = torch.arange(half, dtype=x.dtype)
        frequencies = c.rotary_base ** -(numbers / half)
        if (
            c.yarn_factor is not None
        ):  # pairs before the first turn as fast as without; those from the last on are slower
            turns = (c.yarn_original_length / (2 * math.pi * beta) for beta in (c.yarn_beta_fast, c.yarn_beta_slow))
            first, last = (half * math.log(each) / math.log(c.rotary_base) for each in turns)
            if c.yarn_truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(0, first), min(last, 2 * half - 1)
            ramp = ((numbers - first) / (last - first or 1e-3)).clamp(0, 1)
            frequencies = frequencies * (1 - ramp + ramp / c.yarn_factor)
        angles = torch.arange(len(x), dtype=x.dtype)[:, None] * frequencies
        by = torch.polar(torch.full_like(angles, c.yarn_attention_factor), angles)
        by = by.reshape(len(x), *[1] * (x.dim() - 2), half)
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * by
        return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)

    def _mamba(self, x, prefix, zero_ssm_at, zero_conv_at):
        c = self.config
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        heads, dim, groups, state_dim = c.mamba_num_heads, c.mamba_head_dim, c.mamba_num_groups, c.mamba_state_dim
        inner, shared = heads * dim, groups * state_dim
        z, xbc, dt = (x @ w["in_proj.weight"].T).split([inner, inner + 2 * shared, heads], dim=-1)
        dt = F.softplus(dt + w["dt_bias"])
        decay = torch.exp(-torch.exp(w["A_log"]) * dt)
        x_t, b_t, c_t = self._convolution(xbc, w, zero_conv_at).split([inner, shared, shared], dim=-1)
        x_t = x_t.unflatten(-1, (heads, dim))
        b_t, c_t = (v.unflatten(-1, (groups, state_dim)).repeat_interleave(heads // groups, 1) for v in (b_t, c_t))
        x_dt, decay = dt[..., None] * x_t, decay[..., None, None]
        state, rows = torch.zeros(heads, dim, state_dim, dtype=x.dtype, device=x.device), []
        memory = state.new_empty(PIECE, *state.shape)
        for at in range(0, len(x), PIECE):
            some, state = slice(at, at + PIECE), state.clone()
            states = torch.mul(x_dt[some, ..., None], b_t[some, :, None, :], out=memory[: len(x) - at])
            for t, (kept, new) in enumerate(zip(decay[some].unbind(), states.unbind(), strict=True), start=at):
                state = new if t == zero_ssm_at else new.addcmul_(kept, self.carried(state, t))
            rows.append(torch.einsum("thds,ths->thd", states, c_t[some]))
        rows = torch.cat(rows) + w["D"][:, None] * x_t
        y = (rows.flatten(1) * F.silu(z)).view(len(x), groups, -1)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return (y.reshape(len(x), -1) * w["norm.weight"]) @ w["out_proj.weight"].T

    def _delta_net(self, x, prefix, zero_state_at, zero_conv_at):
        c = self.config
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        key_heads, heads, key_dim, value_dim = (
            *(c.gdn_num_key_heads, c.gdn_num_value_heads),
            *(c.gdn_key_head_dim, c.gdn_value_head_dim),
        )
        qk, inner = key_heads * key_dim, heads * value_dim
        qkv, z, b, a = (x @ w["in_proj.weight"].T).split([2 * qk + inner, inner, heads, heads], dim=-1)
        decay = torch.exp(-torch.exp(w["A_log"]) * F.softplus(a + w["dt_bias"]))
        rate = c.gdn_beta_scale * torch.sigmoid(b)
        convolved = self._convolution(qkv, {"conv1d_weight": w["conv1d.weight"], "conv1d_bias": 0}, zero_conv_at)
        q, k, v = convolved.split([qk, qk, inner], dim=-1)
        q, k = (part.unflatten(-1, (key_heads, key_dim)) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q, k = (part.repeat_interleave(heads // key_heads, 1) for part in (q, k))
        v = v.unflatten(-1, (heads, value_dim))
        y = self._delta_rule(q, k, v, decay, rate, zero_state_at)
        epsilon = c.gated_norm_epsilon or c.layernorm_epsilon
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon) * w["out_norm.weight"]
        return (y * F.silu(z.view_as(y))).flatten(1) @ w["out_proj.weight"].T

    def _delta_rule(self, q, k, v, decay, rate, zero_state_at):
        """One token after another: S <- a S (I - b k k^T) + b v k^T = a S + (v - a S k) b k^T, here with S of (V, K)."""
        heads, key_dim, value_dim = *k.shape[1:], v.shape[-1]
        state, rows = torch.zeros(heads, value_dim, key_dim, dtype=v.dtype, device=v.device), []
        written, decay = rate[..., None, None] * k[:, :, None], decay[..., None, None]
        for at in range(0, len(v), PIECE):
            some, states = slice(at, at + PIECE), state.new_empty(len(v[at : at + PIECE]), *state.shape)
            pieces = zip(
                *(part[some].unbind() for part in (decay, k[..., None], v[..., None], written)), states, strict=True
            )
            for t, (kept, key, value, row, new) in enumerate(pieces, start=at):
                state = self.carried(state.mT, t).mT
                old = torch.zeros_like(state) if t == zero_state_at else torch.mul(state, kept, out=new)
                state = torch.baddbmm(old, torch.baddbmm(value, old, key, alpha=-1), row, out=new)
            rows.append((states @ q[some][..., None])[..., 0])
        return torch.cat(rows) * key_dim**-0.5

    def _delta_product(self, x, prefix, zero_state_at, zero_conv_at):
        """A token is one for each of its pairs, of which the first decays, and the last has the output."""
        c = self.config
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        heads, groups, key_dim, n = c.mamba_num_heads, c.mamba_num_groups, c.mamba_state_dim, c.gdp_num_householder
        inner, keys = heads * c.mamba_head_dim, groups * key_dim
        sizes = [inner, n * inner + (n + 1) * keys, n * heads, heads]
        z, vkq, b, a = (x @ w["in_proj.weight"].T).split(sizes, dim=-1)
        rate = torch.sigmoid(b).view(-1, heads)
        decay = torch.ones_like(rate).view(-1, n, heads)
        decay[:, 0] = torch.exp(-torch.exp(w["A_log"]) * F.softplus(a + w["dt_bias"]))
        convolved = self._convolution(vkq, {"conv1d_weight": w["conv1d.weight"], "conv1d_bias": 0}, zero_conv_at)
        v, k, q = convolved.split([n * inner, n * keys, keys], dim=-1)
        q, k = q.view(-1, groups, key_dim).repeat_interleave(n, 0), k.reshape(-1, groups, key_dim)
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q, k = (part.repeat_interleave(heads // groups, 1) for part in (q, k))
        at = None if zero_state_at is None else n * zero_state_at
        y = self._delta_rule(q, k, v.reshape(len(k), heads, -1), decay.flatten(0, 1), rate, at)[n - 1 :: n]
        y = (y.flatten(1) * F.silu(z)).view(len(x), groups, -1)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return (y.flatten(1) * w["norm.weight"]) @ w["out_proj.weight"].T

    def _convolution(self, xbc, w, zero_at):
        """Convolution over the last ``d_conv`` tokens. From position ``zero_at`` on, earlier tokens count as zero."""
        width = self.config.d_conv
        windows = F.pad(xbc, (0, 0, width - 1, 0)).unfold(0, width, 1)  # (tokens, channels, width)
        if zero_at is not None:
            position = torch.arange(len(xbc), device=xbc.device)
            source = position[:, None] + torch.arange(width, device=xbc.device) - (width - 1)
            forgotten = (position[:, None] >= zero_at) & (source < zero_at)
            windows = windows.masked_fill(forgotten[:, None], 0)
        return F.silu((windows * w["conv1d_weight"].squeeze(1)).sum(-1) + w["conv1d_bias"])
