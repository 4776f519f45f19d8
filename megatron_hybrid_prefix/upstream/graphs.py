"""What megatron's CUDA graphs capture, and its records of those captured in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.config import CudaGraphSizingDistribution
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord, delete_cuda_graphs
from megatron.core.transformer.enums import InferenceCudaGraphScope

if TYPE_CHECKING:
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

BLOCK = InferenceCudaGraphScope.block.name
"""The scope of graphs of the whole forward, from the embedding to the logits; by default a graph is of one layer."""


def block_problem(config: Any, drafts: int = 0) -> str | None:
    """Why the graphs that a config asks for would be wrong, in a few words; None: they are right, or of layers.

    What this package does in a step is right in either scope. Within a forward its layers read and write memory at fixed
    addresses only: states, and the description of the prefill, which is copied before the forward. Loads from the host are
    waited for before it, too, once and by the stream. And megatron keeps the hidden states for the layers that draft.

    Args:
        config: Megatron's of the model.
        drafts: Tokens that are drafted a step.
    """
    if not captures_whole_forward(config):
        return None
    if config.pipeline_model_parallel_size > 1:
        return "a pipeline stage receives its input in other memory each time"
    if (config.fp8 or config.fp4) and config.transformer_impl != "inference_optimized":
        return "megatron captures fp8 and fp4 by layer"
    # Needless from 0.20: megatron cuts its buffer to the tokens of the step.
    if drafts and config.sequence_parallel:
        return "with sequence_parallel the layers that draft get other tokens' hidden states"
    return None


def use_layers_where_blocks_are_wrong(config: Any) -> str | None:
    """Set the scope of layers where `block_problem` has something, and return that."""
    problem = block_problem(config)
    if problem is not None:
        config.inference_cuda_graph_scope = InferenceCudaGraphScope.layer
    return problem


def captures_whole_forward(config: Any) -> bool:
    """Whether the graphs that a config asks for are of the whole forward."""
    return bool(config.inference_cuda_graph_scope is InferenceCudaGraphScope.block)


def has_graphs(model: Any) -> bool:
    """Whether an engine has captured graphs in a model: they are of that engine's memory."""
    return any(manager.cudagraph_runners for manager in _managers(model))


def _managers(model: Any) -> Iterator[CudaGraphManager]:
    managers = (getattr(module, "cudagraph_manager", None) for module in model.modules())
    return (manager for manager in managers if manager is not None)


def kinds_of_step(engine: DynamicInferenceEngine) -> Sequence[InferenceBatchDimensions]:
    """The kinds of step for which an engine captures graphs."""
    if engine.cuda_graph_impl != "local" or engine.inference_cuda_graph_scope is InferenceCudaGraphScope.none:
        return ()
    kinds: Sequence[InferenceBatchDimensions] = engine.context.cuda_graph_batch_dimensions_list
    return kinds


def sizes_of_prefills(longest: int) -> list[int]:
    """Sizes of steps with prefills, in tokens: from 256 tokens on a step is padded by a third at most. Shorter ones take as long.

    Megatron halves them: a step of 300 tokens would compute 512.
    """
    sizes = [128, *(256 * 2**band * part // 4 for band in range(longest.bit_length()) for part in (4, 5, 6))]
    return [*(size for size in sizes if size < longest), longest]


def finer_kinds(context: DynamicInferenceContext, config: InferenceConfig, tp: int) -> list[InferenceBatchDimensions]:
    """The kinds of step to capture if a config leaves their number to megatron (``num_cuda_graphs=-1``).

    They replace megatron's kinds of step with prefills: more sizes, for fewer numbers of prompts. The kinds that only decode stay.

    Args:
        context: It has megatron's kinds.
        config: Its config.
        tp: Tensor-parallel size; divides each size.
    """
    kinds: list[InferenceBatchDimensions] = context.cuda_graph_batch_dimensions_list
    decodes = [kind for kind in kinds if not kind.prefill_req_count]
    if config.num_cuda_graphs != -1 or len(decodes) == len(kinds):
        return kinds
    if config.cuda_graph_sizing_distribution is not CudaGraphSizingDistribution.EXPONENTIAL:
        return kinds
    requests, drafts = context.max_requests, context.num_speculative_tokens
    longest = context.max_tokens if config.cuda_graph_all_prefills else config.cuda_graph_max_tokens
    longest = min(max(longest, requests * (drafts + 1)), context.max_tokens)
    found = set()
    for size in sizes_of_prefills(longest):
        tokens = size // tp * tp
        for prompts in sorted({1, 2, *(4**n for n in range(1, 8)), requests}):
            if prompts <= min(tokens, requests if tokens <= 512 else 16):
                rows = min((tokens - prompts) // (drafts + 1), requests - prompts)
                found.add(InferenceBatchDimensions(tokens, prompts, rows))
    # Megatron cannot capture a prefill of one token alone.
    valid = [
        kind for kind in found if kind.token_count > 1 and kind.is_valid(requests, context.max_sequence_length, drafts)
    ]
    # The order in which megatron captures: the largest first, whose memory the others share.
    return sorted(valid, key=lambda kind: (kind.token_count, kind.prefill_req_count), reverse=True) + decodes


def replay_none(engine: DynamicInferenceEngine) -> None:
    """Every step launches its kernels from now on, until graphs are captured for a new context."""
    engine.context.cuda_graph_batch_dimensions_list = []


def kinds_to_compile(engine: DynamicInferenceEngine) -> Iterable[InferenceBatchDimensions]:
    """Of `kinds_of_step` those that have kernels of their own: Triton compiles apart for a number that is 1, and for multiples of 16.

    None with megatron's layers for inference: indices come from their kernels, and would be undefined.
    """
    if engine.controller.model_config.transformer_impl == "inference_optimized":
        return ()

    def compiled_for(kind: InferenceBatchDimensions) -> tuple[Any, ...]:
        numbers = kind.token_count, kind.prefill_req_count, kind.decode_req_count
        return tuple((number > 0, number == 1, number % 16 == 0) for number in numbers)

    return {compiled_for(kind): kind for kind in kinds_of_step(engine)}.values()


def launch_eagerly(
    engine: DynamicInferenceEngine, kind: InferenceBatchDimensions, around: AbstractContextManager[Any]
) -> None:
    """Launch the forward of a kind of step, with dummy requests, as kernels and not as graphs.

    Args:
        engine: An engine without requests.
        kind: One of `kinds_of_step`.
        around: The context of the launches.
    """
    controller, context = engine.controller, engine.context
    ids, positions, *_ = controller._dynamic_step_context_init(construct_graph_dimensions=kind)
    context._using_cuda_graph_this_step = False
    with torch.inference_mode(), around:
        controller._dynamic_step_forward_logits(ids, positions)
    context.reset()


def delete_graphs_of(model: Any) -> None:
    """Delete the CUDA graphs of this process, and what they leave on the model."""
    delete_cuda_graphs()
    # Megatron leaves the emptied runners; each holds a reference to its engine's context.
    for manager in _managers(model):
        manager.cudagraph_runners.clear()
        manager.custom_cudagraphs_lookup_table.clear()


def captured_graphs() -> list[Any]:
    """Megatron's records of the graphs that inference captured."""
    return _CudagraphGlobalRecord.cudagraph_inference_record


def set_captured_graphs(records: list[Any]) -> None:
    """Replace the list that `captured_graphs` returns."""
    _CudagraphGlobalRecord.cudagraph_inference_record = records


def forget_graph_pool() -> None:
    """Make the next engine that captures create a new memory pool."""
    CudaGraphManager.global_mempool = None
