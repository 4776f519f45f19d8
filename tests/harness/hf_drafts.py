"""Nemotron 3's heads that draft, from the names and shapes of a folder. transformers leaves them out (``mtp.``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F


def draft_logits(
    weights: Mapping[str, torch.Tensor], data: Mapping[str, Any], hidden: torch.Tensor, tokens: list[int], head=0
):
    """What one head says, in float64: (rows, hidden size) and (rows, vocabulary).

    Args:
        weights: Of a folder, by Hugging Face's names.
        data: Its ``config.json``.
        hidden: (rows, hidden size), what the output layer reads, or what the head said for the token before.
        tokens: Of each row, the token after.
        head: Which head; its layers come after those of the heads before it.

    Of a row the layers see those before it and nothing else: that is how megatron drafts.
    """
    w = {name: value.double() for name, value in weights.items()}
    pattern = data["mtp_hybrid_override_pattern"]
    first = head * len(pattern)
    of = f"mtp.layers.{first}."
    new = w["model.embeddings.weight"][tokens]
    both = torch.cat([_norm(new, w[of + "enorm.weight"]), _norm(hidden.double(), w[of + "hnorm.weight"])], dim=-1)
    x = F.linear(both, w[of + "eh_proj.weight"])
    for number, symbol in enumerate(pattern, start=first):
        of = f"mtp.layers.{number}."
        mixer = {name.removeprefix(f"{of}mixer."): value for name, value in w.items() if name.startswith(f"{of}mixer.")}
        normed = _norm(x, w[of + "norm.weight"])
        x = x + {"*": _attention, "E": _experts}[symbol](normed, mixer, data)
    x = _norm(x, w[of + "final_layernorm.weight"])
    return x, F.linear(x, w["lm_head.weight"])


def _norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _mlp(x, up, down):
    return F.linear(F.relu(F.linear(x, up)).square(), down)


def _attention(x, w, data):
    q, k, v = (
        F.linear(x, w[f"{part}_proj.weight"]).unflatten(-1, (-1, data["head_dim"])).transpose(0, 1) for part in "qkv"
    )
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(0, 1).flatten(1), w["o_proj.weight"])


def _experts(x, w, data):
    scores = F.linear(x, w["gate.weight"]).sigmoid()
    chosen = (scores + w["gate.e_score_correction_bias"]).topk(data["num_experts_per_tok"], dim=-1).indices
    narrow, rows = F.linear(x, w["fc1_latent_proj.weight"]), []
    for row, experts, given in zip(narrow, chosen, scores, strict=True):
        share = given[experts] / given[experts].sum() * data["routed_scaling_factor"]
        said = [
            _mlp(row, w[f"experts.{e}.up_proj.weight"], w[f"experts.{e}.down_proj.weight"]) for e in experts.tolist()
        ]
        rows.append((torch.stack(said) * share[:, None]).sum(0))
    routed = F.linear(torch.stack(rows), w["fc2_latent_proj.weight"])
    return routed + _mlp(x, w["shared_experts.up_proj.weight"], w["shared_experts.down_proj.weight"])
