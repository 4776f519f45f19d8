"""`run_batch`: step an engine until a batch of requests is done, and report the cost of each request.

Works on every rank: tensor- and pipeline-parallel ranks step in lockstep if each gets the same requests.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.support.arithmetic import ceil_div

if TYPE_CHECKING:
    from megatron_hybrid_prefix.upstream.names import (
        DynamicInferenceContext,
        DynamicInferenceEngine,
        DynamicInferenceRequest,
        DynamicInferenceRequestRecord,
        SamplingParams,
    )

# An engine that schedules nothing for this many steps in a row never will.
_MAX_IDLE_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Result and cost of one request.

    Attributes:
        prompt_tokens: Length of the prompt.
        status: "completed", "failed" (it cannot fit) or "stopped" (`should_stop` said so).
        computed_tokens: Prompt tokens that went through the model.
        reused_tokens: Prompt tokens that were skipped because the cache held them.
        reuse: What it reused, and why not more, as fields of `Reuse`; None with other caches.
        recomputed_tokens: Tokens (prompt and answer so far) computed again after the engine preempted the request.
        generated: Token ids of the answer.
        log_probs: Natural-log probability of each generated token; empty unless requested.
        top_n_log_probs: For each generated token: text and log-probability of the most likely tokens; empty unless requested.
        routing_indices: (tokens - 1, layers, experts of a token) int16: which experts each but the last went through; None unless recorded.
        text: The answer, decoded.
        time_to_first_token_s: Seconds from `add_request` to the end of the step that gave the first token.
        tokens_per_second: Generated tokens after the first, divided by their seconds; None for fewer than two tokens.
        error: Why the request failed.
    """

    prompt_tokens: int
    status: str
    computed_tokens: int = 0
    reused_tokens: int = 0
    reuse: dict[str, Any] | None = None
    recomputed_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_n_log_probs: list[dict[str, float]] = field(default_factory=list)
    routing_indices: Any = None
    text: str = ""
    time_to_first_token_s: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None


@dataclass(slots=True)
class _Batch:
    """The requests of one `run_batch`, by id. ``added_s`` has the order in which they were added."""

    prefills: dict[int, Counter[str]]
    added_s: dict[int, float] = field(default_factory=dict)
    first_token_s: dict[int, float] = field(default_factory=dict)
    results: dict[int, RequestResult] = field(default_factory=dict)


@torch.inference_mode()
def run_batch(
    engine: DynamicInferenceEngine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    on_step: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RequestResult]:
    """Add every prompt at once and step the engine until all are done.

    Runs in inference mode, like megatron's scripts: tensors that megatron makes in inference mode (such as during CUDA graph
    capture) can only be written in inference mode.

    Args:
        engine: An engine of `build_engine` that has no requests.
        prompts: Token ids of each prompt.
        sampling: Sampling parameters for all prompts, or one per prompt. Copied, because the engine writes to them.
        on_step: Called after each step with the number of finished requests.
        should_stop: Called before each step; must return the same on all ranks. On True the unfinished requests are returned
            as "stopped" with their tokens so far, and the engine is reset (which empties its cache).

    Returns:
        One result per prompt, in order. A request that the engine refuses has status "failed".

    Raises:
        RuntimeError: The engine cannot schedule the waiting requests.
    """
    params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
    with count_prefill(engine.context) as prefills:
        batch = _Batch(prefills)
        for prompt, own in zip(prompts, params, strict=True):
            request_id = int(next(engine.request_counter))
            batch.added_s[request_id] = time.perf_counter()
            try:
                check_fits(engine, len(prompt), own.num_tokens_to_generate)
            except ValueError as error:
                # Upstream refuses most of these, but returns nothing for a prompt of exactly max_sequence_length tokens.
                batch.results[request_id] = RequestResult(prompt_tokens=len(prompt), status="failed", error=str(error))
            else:
                engine.add_request(request_id, prompt, copy.copy(own))
        idle_steps = 0
        # A refused request is never "unfinished"; the next step returns it.
        while engine.has_unfinished_requests() or engine.failed_request_ids:
            if should_stop():
                for request_id in batch.added_s.keys() - batch.results.keys():
                    batch.results[request_id] = _result(engine.requests[request_id].record, batch, stopped=True)
                engine.reset()
                break
            step = engine.step_modern()
            _collect(engine, batch, step["finished_request_records"])
            idle_steps = 0 if step["active_request_ids"] or step["finished_request_records"] else idle_steps + 1
            if idle_steps > _MAX_IDLE_STEPS:
                raise RuntimeError(f"the engine cannot schedule {len(engine.waiting_request_ids)} waiting request(s)")
            on_step(len(batch.results))
    return [batch.results[request_id] for request_id in batch.added_s]


@contextmanager
def count_prefill(context: DynamicInferenceContext) -> Iterator[dict[int, Counter[str]]]:
    """Count prefilled and skipped tokens per request while the block runs, under the names of `RequestResult`.

    Upstream's ``num_cached_tokens`` counts tokens with matching KV, skipped or not, and its counters are per engine. So this
    wraps ``context.add_request``, which admits one chunk of one request, on the instance: tokens that it adds to the context's
    prefill counter are computed, the rest of the chunk is skipped.
    """
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    first: dict[int, DynamicInferenceRequest] = {}  # each request before any preemption
    add_request = context.add_request
    shadowed = vars(context).get("add_request")

    def counting(req: DynamicInferenceRequest, prefill_chunk_length: int | None = None) -> None:
        chunk_tokens = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
        before = context.lifetime_prefill_token_count
        add_request(req, prefill_chunk_length)
        computed_tokens = context.lifetime_prefill_token_count - before
        count = counts[req.request_id]
        if first.setdefault(req.request_id, req) is req:
            count["computed_tokens"] += computed_tokens
            count["reused_tokens"] += chunk_tokens - computed_tokens
        else:
            count["recomputed_tokens"] += computed_tokens

    context.add_request = counting
    try:
        yield counts
    finally:
        if shadowed is None:
            del context.add_request
        else:
            context.add_request = shadowed


def check_fits(engine: DynamicInferenceEngine, prompt_tokens: int, num_tokens_to_generate: int | None) -> None:
    """Raise an error if the engine would refuse a request of these lengths.

    Raises:
        ValueError: It is longer than a sequence or step may be, or needs more KV blocks than there are.
    """
    from megatron_hybrid_prefix.upstream.blocks import block_counts

    context = engine.context
    limit = context.max_sequence_length
    if prompt_tokens + (num_tokens_to_generate != 0) > limit:
        raise ValueError(f"{prompt_tokens} prompt tokens leave no room to generate in max_sequence_length={limit}")
    if prompt_tokens > context.max_tokens and not engine.enable_chunked_prefill:
        raise ValueError(
            f"{prompt_tokens} prompt tokens are more than max_tokens={context.max_tokens}: raise it, "
            "or enable chunked prefill"
        )
    total_tokens = limit if num_tokens_to_generate is None else min(prompt_tokens + num_tokens_to_generate, limit)
    need_blocks = ceil_div(total_tokens, context.block_size_tokens)
    have_blocks, knob = block_counts(context.kv_block_allocator).active, "buffer_size_gb or lower max_requests"
    if hasattr(context, "prefix_cache"):
        have_blocks = context.prefix_cache.blocks.room_for(1)
        knob = "buffer_size_gb" if context.prefix_config.cache_gb is None else "cache_gb"
    if need_blocks > have_blocks:
        raise ValueError(
            f"{prompt_tokens} prompt tokens and {total_tokens - prompt_tokens} to generate need {need_blocks} KV blocks "
            f"of {context.block_size_tokens} tokens, there are {have_blocks}: raise {knob}"
        )


def release_engine(engine: DynamicInferenceEngine) -> None:
    """Delete the CUDA graphs that an engine left on its model, so that another engine can capture."""
    if engine.cuda_graph_impl == "local":
        from megatron_hybrid_prefix.upstream.graphs import delete_graphs_of

        delete_graphs_of(engine.controller.inference_wrapped_model.model)


def _collect(engine: DynamicInferenceEngine, batch: _Batch, finished: Sequence[DynamicInferenceRequestRecord]) -> None:
    """Record first tokens and results of the last step."""
    records = {record.request_id: record for record in finished}
    for request_id in batch.added_s.keys() - batch.first_token_s.keys() - batch.results.keys():
        record = records.get(request_id) or engine.requests[request_id].record
        if any(part.generated_tokens for part in record.requests):
            batch.first_token_s[request_id] = _now_s()
    for request_id, record in records.items():
        batch.results[request_id] = _result(record, batch)


def _result(record: DynamicInferenceRequestRecord, batch: _Batch, stopped: bool = False) -> RequestResult:
    request = record.merge()
    generated = [int(token) for token in request.generated_tokens]
    first_s = batch.first_token_s.get(record.request_id)
    decode_s = 0.0 if first_s is None else _now_s() - first_s
    status = "stopped" if stopped else "failed" if request.failed() else "completed"
    return RequestResult(
        prompt_tokens=len(request.prompt_tokens),
        status=status,
        generated=generated,
        # Upstream cuts a stop word off the tokens, but not off the log-probs of earlier steps.
        log_probs=[float(value) for value in request.generated_log_probs or ()][: len(generated)],
        top_n_log_probs=list(request.generated_top_n_logprobs or ())[: len(generated)],
        routing_indices=request.routing_indices,
        text=request.generated_text or "",
        time_to_first_token_s=None if first_s is None else first_s - batch.added_s[record.request_id],
        tokens_per_second=(len(generated) - 1) / decode_s if len(generated) > 1 and decode_s > 0 else None,
        error=_error_of(request) if status == "failed" else None,
        reuse=getattr(request.sampling_params, "cache_reuse", None),
        **batch.prefills[record.request_id],
    )


def _error_of(request: Any) -> str:
    causes = (event.payload for event in request.events if isinstance(event.payload, Exception))
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or "the engine refused it"


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
