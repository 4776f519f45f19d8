"""Forced answers: replaces the sampled tokens, so that the conversations of all engines have the same history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError


@contextmanager
def forced_answers(engine: Any, answers: Sequence[Sequence[int]]) -> Iterator[None]:
    """A context in which the requests added to ``engine`` answer with ``answers``, in this order.

    Every step does all of its work. Then the sampled tokens are overwritten where the next forward and the bookkeeping
    read them. That is the same place in legacy and in asynchronous scheduling, and the CPU does not wait for the GPU.
    Tensor- and pipeline-parallel ranks do the same on each rank.

    Raises:
        InputError: The engine uses speculative decoding.
    """
    controller, context = engine.controller, engine.context
    if controller.num_speculative_tokens:
        raise InputError("forced answers are not supported with speculative tokens")
    from megatron_hybrid_prefix.upstream.controller import after_sampling

    add = engine.add_request
    shadowed_add = vars(engine).get("add_request")
    waiting = iter(answers)
    answer_of: dict[int, Sequence[int]] = {}

    def adding(request_id: int, *args: Any, **kwargs: Any) -> Any:
        answer_of[request_id] = next(waiting)
        return add(request_id, *args, **kwargs)

    def force(sampled: Any) -> None:
        import torch

        ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()  # rows of logits
        wanted = torch.tensor(list(map(next_token, ids)), dtype=sampled.dtype, pin_memory=sampled.is_cuda)
        sampled[: len(ids)].copy_(wanted, non_blocking=True)

    def next_token(request_id: int) -> int:
        # The record has all earlier tokens, also across preemptions. The token after an unfinished chunk is not used.
        parts = engine.requests[request_id].record.requests
        at = sum(len(part.generated_tokens) for part in parts)
        answer = answer_of[request_id]
        return answer[at] if at < len(answer) else 0

    engine.add_request = adding
    undo = after_sampling(controller, force)
    try:
        yield
    finally:
        undo()
        if shadowed_add is None:
            del engine.add_request
        else:
            engine.add_request = shadowed_add
