"""A trainer's forward over finished requests, beside the log-probs that an engine with ``exact="bits"`` gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix import invariant_forward
from tests.harness.bits import bits, exact_harness
from tests.harness.engine_helpers import random_tokens

Scored = tuple[list[int], list[float]]  # tokens, and log-probs of the last of them


def answers(model: Any, lengths: Sequence[int], count: int, **fields: Any) -> list[Scored]:
    """Prompts of these lengths and their answers, decoded together; the engine is suspended."""
    harness = exact_harness(model, **fields)
    for length in lengths:
        harness.add(random_tokens(length, seed=length), count, params={"skip_prompt_log_probs": False})
    harness.run()
    harness.engine.suspend()
    found = [(request.prompt_tokens.tolist(), *bits(request)) for request in harness.finished.values()]
    return [(prompt + answer, [*(of_prompt or ()), *own]) for prompt, answer, own, of_prompt in found]


def padded(model: Any, found: Sequence[Scored]) -> torch.Tensor:
    """The tokens, right-padded: (requests, longest)."""
    longest = max(len(tokens) for tokens, _ in found)
    rows = [tokens + [7] * (longest - len(tokens)) for tokens, _ in found]
    return torch.tensor(rows, device=next(model.parameters()).device)


def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of megatron's plain forward."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits: torch.Tensor = model(tokens, positions, None)
    return logits


def differ(found: Sequence[Scored], log_probs: torch.Tensor) -> int:
    """How many log-probs are others; ``log_probs``: of the tokens of `padded` from the second on."""
    pairs = (
        (own[: len(tokens) - 1][-len(wanted) :], wanted) for (tokens, wanted), own in zip(found, log_probs, strict=True)
    )
    return sum(int((own.detach().cpu() != torch.tensor(wanted)).sum()) for own, wanted in pairs)


def gradients(model: Any, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of some weighted sum of log-probs, by parameter."""
    model.zero_grad()
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0)).to(log_probs.device)
    (log_probs * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@torch.inference_mode(False)
def trained(model: Any, found: Sequence[Scored], block_tokens: int) -> dict[str, Any]:
    """How many log-probs a trainer gets otherwise, without gradients, with them, and (a control) by megatron's forward; 1 - cosine of gradients."""
    tokens = padded(model, found)
    with invariant_forward(model, block_size_tokens=block_tokens) as log_probs:
        with torch.no_grad():
            without = log_probs(forward(model, tokens), tokens)
        model.requires_grad_()
        ours = log_probs(forward(model, tokens), tokens)
    theirs = log_probs(forward(model, tokens), tokens)  # outside: of megatron's logits
    own, other = (torch.cat([grad.double().flatten() for grad in gradients(model, x).values()]) for x in (ours, theirs))
    model.requires_grad_(False).zero_grad()
    return {
        "without gradients": differ(found, without),
        "with gradients": differ(found, ours),
        "by default": differ(found, theirs),
        "between the gradients": 1 - float(torch.nn.functional.cosine_similarity(own, other, dim=0)),
    }


def of_requests(model: Any, lengths: Sequence[int], count: int, block_tokens: int) -> dict[str, Any]:
    """`trained` for `answers`."""
    return trained(model, answers(model, lengths, count, block_size_tokens=block_tokens), block_tokens)
