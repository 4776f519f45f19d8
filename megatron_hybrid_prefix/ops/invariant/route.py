"""The experts of a token and their weights, which depend on no other token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid_prefix.ops.elementwise import sigmoid


def largest(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores of each token, in descending order; equal ones in the order of their numbers.

    A stable sort has one result. What ``topk`` makes of equal scores is up to its algorithm. The arguments have megatron's names.

    Args:
        scores: (tokens, experts).
        topk: Experts of a token.
        num_groups: Groups of experts, of equal size.
        group_topk: Groups of a token: those with the largest sums of their ``topk / group_topk`` largest scores. None: any.

    Returns:
        (tokens, topk): the scores, and the experts' numbers.
    """
    if group_topk:
        of_groups = scores.view(len(scores), num_groups or 1, -1)
        sums = _first(of_groups, topk // group_topk)[0].sum(-1)
        within = torch.zeros_like(sums, dtype=torch.bool).scatter(1, _first(sums, group_topk)[1], True)
        scores = of_groups.masked_fill(~within.unsqueeze(-1), float("-inf")).view_as(scores)
    return _first(scores, topk)


def _first(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = scores.sort(dim=-1, descending=True, stable=True)
    return found.values[..., :count], found.indices[..., :count]


def route(
    logits: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor],
    *,
    score_function: str,
    use_pre_softmax: bool = False,
    expert_bias: torch.Tensor | None = None,
    scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As megatron's ``topk_routing_with_score_function``, with the names of its arguments.

    Args:
        logits: (tokens, experts).
        choose: The experts of each token, (tokens, top-k), by scores like the logits in float32.
        score_function: "softmax" (of the chosen scores) or "sigmoid" (over the sum of the chosen ones).
        use_pre_softmax: With softmax: of all scores.
        expert_bias: (experts,) is added to sigmoids for the choice.
        scaling_factor: What weights are multiplied by.

    Returns:
        (tokens, experts): the weights in the dtype of the logits, zeros elsewhere; and whether an expert is chosen.
    """
    scores = logits.float()
    if score_function == "sigmoid":
        scores = torch.sigmoid(scores) if scores.is_cuda else sigmoid(scores)
    elif use_pre_softmax:
        scores = torch.softmax(scores, dim=-1)
    chosen = choose(scores if expert_bias is None else scores + expert_bias)
    weights = scores.gather(1, chosen)
    if score_function == "sigmoid":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if chosen.shape[1] > 1 else weights
    elif not use_pre_softmax:
        weights = torch.softmax(weights, dim=-1)
    weights = (weights * (scaling_factor or 1.0)).to(logits.dtype)
    return (
        torch.zeros_like(logits).scatter(1, chosen, weights),
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True),
    )
