"""What ``exact="bits"`` changes in an engine: the layers of its model, and how preempted requests go on."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hybrid_prefix.layers.invariant import invariant_problem, use_invariant_layers
from megatron_hybrid_prefix.mcore.engine.record import RequestRecord
from megatron_hybrid_prefix.platform import replace_names
from megatron_hybrid_prefix.platform.patches import AUTOTUNERS
from megatron_hybrid_prefix.upstream.blocks import blocks_up_to_the_end
from megatron_hybrid_prefix.upstream.engine import EngineSeam
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest, TextGenerationController


def make_exact(controller: TextGenerationController) -> None:
    """Puts invariant layers on the controller's model, and lets no kernel of an exact step be tuned.

    Raises:
        ValueError: The model, or this machine, cannot compute so.
    """
    model = controller.inference_wrapped_model.model
    problem = invariant_problem(model)
    if problem is not None:
        raise ValueError(f"exact='bits': {problem}")
    use_invariant_layers(model)
    replace_names(AUTOTUNERS)


def may_start(engine: EngineSeam, records: Mapping[int, RequestRecord], request: DynamicInferenceRequest) -> bool:
    """Whether a request may start now, as far as the preempted requests among ``records`` are concerned.

    Each computes its prompt again, and then decodes its answer again: a prefill of the answer would round differently from the decode
    that computed it. A request that replays must not be preempted a second time, or two requests could preempt each other forever.
    So it starts, and others start with it, only if all of them have room up to their ends.
    """
    replaying = {request_id for request_id, record in records.items() if record.replay}
    if not replaying:
        return True
    context = engine.context
    running = {*context.request_ids[: context.total_request_count].tolist(), context.chunked_prefill_request_id}
    running.discard(-1)
    together = running | {request.request_id}
    if not running or together.isdisjoint(replaying):
        return True
    requests = [engine.get_request(request_id) for request_id in together]
    needed = [blocks_up_to_the_end(each, context.block_size_tokens) for each in requests]
    return sum(needed) <= context.room_for(len(needed))
