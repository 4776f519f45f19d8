"""Helpers that run an engine and compute the right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.support.arithmetic import ceil_div


def greedy(count: int, **fields: Any) -> Any:
    """Greedy sampling of ``count`` tokens with log-probs of the generated tokens."""
    from megatron.core.inference.sampling_params import SamplingParams

    return SamplingParams(
        **{
            "num_tokens_to_generate": count,
            "top_k": 1,
            "termination_id": -1,
            "return_log_probs": True,
            "skip_prompt_log_probs": True,
        }
        | fields
    )


def random_tokens(count: int, seed: int, vocabulary: int = 512) -> list[int]:
    """``count`` token ids."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def unequal(model: Any, right: Any) -> list[str]:
    """Global names of parameters that differ, and of those that one of the models lacks."""
    found, wanted = (dict(parameters_by_global_name(each)) for each in (model, right))
    differ = [name for name in found.keys() & wanted if not torch.equal(found[name], wanted[name])]
    return [*differ, *found.keys() ^ wanted]


def state_bytes(model: Any) -> int:
    """Bytes of one recurrent state."""
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config

    return mamba_state_config(model).states.slots.slot_bytes


def kv_budget(
    model: Any,
    blocks: int,
    *,
    block_tokens: int,
    max_requests: int,
    paused_blocks: int = 0,
    speculative_tokens: int = 0,
) -> dict[str, float]:
    """Budgets for this many KV blocks, without the dummy block. ``paused_blocks`` of them are for paused requests."""
    config = model.hybrid_config
    values = 2 * config.count("*") * config.num_query_groups * config.kv_channels
    block_bytes = block_tokens * values * getattr(torch, config.dtype).itemsize
    active, paused = (blocks + 1.5) * block_bytes, (paused_blocks + 0.5) * block_bytes
    # Megatron takes the live states, and one for each token that may be accepted, out of both in proportion.
    states = max_requests * (2 + speculative_tokens if speculative_tokens else 1)
    scale = 1 + states * state_bytes(model) / (active + paused)
    return {"buffer_size_gb": active * scale / 2**30, "paused_buffer_size_gb": paused * scale / 2**30}


def cache_gb_for(
    model: Any,
    blocks: int,
    *,
    block_tokens: int,
    max_requests: int,
    states: int = 0,
    speculative_tokens: int = 0,
    is_open: bool = False,
) -> float:
    """``cache_gb`` for this many KV blocks beside this many states and the rings of all requests; ``is_open``: with ``exact="bits"``."""
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config
    from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
    from megatron_hybrid_prefix.pool.shared_memory import BlockShape, slot_bytes

    config = model.hybrid_config
    heads = max(1, config.num_query_groups // model.config.tensor_model_parallel_size)
    shape = (block_tokens, heads, config.kv_channels)
    block = BlockShape(before=(2, config.count("*")), after=shape, dtype=getattr(torch, config.dtype))
    states_of = mamba_state_config(model).states
    size, dtype = slot_bytes(states_of.slots), model.config.params_dtype
    rings = states_of.rings(dtype, block_tokens=block_tokens, drafts=speculative_tokens, is_open=is_open)
    page = PageLayout.of(block_bytes=block.bytes, state_bytes=size, alignment_bytes=ALIGNMENT_BYTES)
    own = own_bytes(size, rings, own_slots=1, requests=max_requests)
    total = blocks + 1 + ceil_div(states, page.page_states) * page.page_blocks
    return (own + total * page.block_bytes) / 2**30


def run_to_end(engine: Any, finished: dict[int, Any], steps: int | None = None) -> None:
    """Steps until nothing is left, or ``steps`` times. Finished requests go into ``finished``, by id."""
    while engine.has_unfinished_requests() and steps != 0:
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            finished[request.request_id] = request
        steps = None if steps is None else steps - 1


def described(finished: dict[int, Any]) -> list[dict[str, Any]]:
    """Finished requests in the order of their ids, as values that JSON can hold."""
    return [
        {
            "tokens": list(map(int, request.generated_tokens)),
            "log_probs": list(request.generated_log_probs or ()),
            "cached_tokens": request.num_cached_tokens,
            "routes": None if request.routing_indices is None else request.routing_indices.tolist(),
            "failed": request.failed(),
            "prompt_log_probs": request.prompt_log_probs,
            "prompt_top_n_logprobs": request.prompt_top_n_logprobs,
            "generated_top_n_logprobs": request.generated_top_n_logprobs,
        }
        for _, request in sorted(finished.items())
    ]


def assert_same(answers: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> float:
    """Checks that answers of `described` have the tokens of others, and their log-probs within `LOG_PROB_NOISE`.

    Returns the largest difference of log-probs.
    """
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
    gaps = [0.0]
    for answer, reference in zip(answers, right, strict=True):
        assert len(answer["log_probs"]) == len(answer["tokens"])
        gaps += [abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True)]
    assert all(gap <= LOG_PROB_NOISE for gap in gaps), f"log-probs are off by {max(gaps):.1e}"
    return max(gaps)


def assert_damaged(answers: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> None:
    """Checks that answers from reused, wrong states are wrong, and others right. Else equal answers would say nothing of states."""
    for answer, reference in zip(answers, right, strict=True):
        off = max(abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True))
        assert off > 1e-3 if answer["cached_tokens"] else off <= LOG_PROB_NOISE


# Log-probs of two float32 runs of a preset: `NOISES` times the largest noise of any position (`NaiveHybridModel.noise`),
# as tests/models/test_models.py checks. A wrong state is at least five times as far off.
LOG_PROB_NOISE = 2e-4
# Rounding stays within so many times the noise, a root of a mean square: 3 at most were seen in 1,500 positions.
NOISES = 4


def assert_matches(reference: Any, request: Any, tolerance: float = 1e-5, *, sampled: bool = False) -> None:
    """Checks that each generated token is the reference's greedy choice, unless it was sampled, with the reference's log-prob.

    If the two best tokens are within 1e-4 of each other, or twice the tolerance, only the log-prob is compared, because rounding may flip the
    choice. A badly conditioned log-prob may differ by more than ``tolerance``: by up to `NOISES` times its noise, which
    is computed only then, and never by more than `LOG_PROB_NOISE`. What comes after a token whose experts rounding may choose
    (`NaiveHybridModel.router_margins`) is not compared, if it differs.
    """
    prompt, generated = [int(t) for t in request.prompt_tokens], list(request.generated_tokens)
    assert len(request.generated_log_probs) == len(generated)
    found = _first_mismatch(reference, prompt, generated, request.generated_log_probs, tolerance, sampled)
    if found is not None:
        position, message = found
        margins = reference.router_margins((prompt + generated)[: len(prompt) + position])
        assert (margins <= NOISES).any(), f"{message}, {position} tokens after a prompt of {len(prompt)}"


def _first_mismatch(
    reference: Any, prompt: list[int], generated: list[int], log_probs: list[float], tolerance: float, sampled: bool
) -> tuple[int, str] | None:
    """The first generated token that `assert_matches` does not accept, and why."""
    rows = reference.log_probs(prompt + generated)[len(prompt) - 1 : -1]
    noise = None
    for position, (row, token, log_prob) in enumerate(zip(rows, generated, log_probs, strict=True)):
        best, second = row.topk(2).values
        if not sampled and best - second > max(1e-4, 2 * tolerance) and token != int(row.argmax()):
            return position, f"token {token} in place of {int(row.argmax())}"
        difference = abs(float(row[token]) - log_prob)
        allowed = tolerance
        if tolerance < difference <= LOG_PROB_NOISE:
            noise = reference.noise(prompt + generated)[len(prompt) - 1 : -1] if noise is None else noise
            allowed = max(tolerance, NOISES * float(noise[position, token]))
        if difference > allowed:
            return position, f"a log-prob is off by {difference:.2e} > {allowed:.2e}"
    return None
