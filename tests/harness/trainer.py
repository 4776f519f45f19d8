"""A trainer's forward over finished requests, beside the log-probs that an engine with ``exact="bits"`` gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix import invariant_forward
from tests.harness.bits import bits, exact_harness
from tests.harness.engine_helpers import random_tokens

Answer = tuple[list[int], list[int], list[float]]  # prompt, answer, log-probs of the answer


def answers(model: Any, lengths: Sequence[int], count: int, **fields: Any) -> list[Answer]:
    """Of prompts of these lengths, decoded together; the engine is suspended."""
    harness = exact_harness(model, **fields)
    for length in lengths:
        harness.add(random_tokens(length, seed=length), count)
    harness.run()
    harness.engine.suspend()
    return [(request.prompt_tokens.tolist(), *bits(request)[:2]) for request in harness.finished.values()]


def padded(model: Any, found: Sequence[Answer]) -> torch.Tensor:
    """Prompts and answers: (requests, longest), the rest is padding."""
    longest = max(len(prompt) + len(answer) for prompt, answer, _ in found)
    rows = [prompt + answer + [7] * (longest - len(prompt) - len(answer)) for prompt, answer, _ in found]
    return torch.tensor(rows, device=next(model.parameters()).device)


def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of megatron's plain forward."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits: torch.Tensor = model(tokens, positions, None)
    return logits


def differ(found: Sequence[Answer], log_probs: torch.Tensor) -> int:
    """How many of the answers' log-probs are others; ``log_probs``: of the tokens of `padded` from the second on."""
    return sum(
        int((own[len(prompt) - 1 :][: len(wanted)].cpu() != torch.tensor(wanted)).sum())
        for (prompt, _, wanted), own in zip(found, log_probs.detach(), strict=True)
    )


def gradients(model: Any, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of some weighted sum of log-probs, by parameter."""
    model.zero_grad()
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0)).to(log_probs.device)
    (log_probs * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@torch.inference_mode(False)
def trained(model: Any, found: Sequence[Answer], block_tokens: int) -> dict[str, Any]:
    """Log-probs of answers that a trainer gets otherwise, without gradients, with them, and (a control) by megatron's forward alone; and
    how the gradients lie to those of the latter: 1 - cosine."""
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
