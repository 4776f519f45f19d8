"""`build_engine`: megatron's dynamic engine around a model, with or without this package's prefix cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.patches import CONTEXT_IN_CUDA_GRAPHS
from megatron_hybrid_prefix.platform import replace_names, running_platform
from megatron_hybrid_prefix.tokenizer import ByteTokenizer, Tokenizer
from megatron_hybrid_prefix.upstream.contract import check_contract

if TYPE_CHECKING:
    from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

# Without a GPU upstream's defaults (20 GB of KV, 16,384 tokens a step) would exhaust an ordinary machine.
HOST_DEFAULTS: dict[str, Any] = {"buffer_size_gb": 0.25, "max_requests": 16, "max_tokens": 4096}


def build_engine(
    model: Any,
    prefix: HybridPrefixConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    **inference_config_fields: Any,
) -> DynamicInferenceEngine:
    """Build megatron's dynamic engine for a hybrid (or pure attention) model.

    Args:
        model: A model of ``build_hybrid_model``, or any ``HybridModel`` / ``GPTModel`` in this process.
        prefix: Settings of the prefix cache; None leaves it off. (Megatron's own cache is switched on with its own
            fields, ``enable_prefix_caching=True`` and ``prefix_caching_mamba_gb=...``: the classes are then megatron's.)
        tokenizer: By default bytes.
        **inference_config_fields: Fields of megatron's ``InferenceConfig``.

    Returns:
        The engine: ``add_request``, ``step_modern``, ``has_unfinished_requests`` work as upstream's.

    Raises:
        ValueError: A field is unknown, or the memory asked for cannot hold what was asked for.
        PlatformError: There is no megatron-core, or an unsupported one.
        UpstreamDriftError: The megatron-core that is here differs in a name that this package relies on.
    """
    inference_config = _checked_config(model, prefix, inference_config_fields)
    if inference_config.enable_prefix_caching:
        return _upstream_engine(model, inference_config, tokenizer)
    from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
    from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
    from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine

    context = HybridPrefixContext(model.config, inference_config, prefix)
    if model.config.cuda_graph_impl == "local":
        replace_names(CONTEXT_IN_CUDA_GRAPHS)
    return HybridPrefixEngine(_controller(HybridPrefixController, model, context, tokenizer), context)


def build_upstream_engine(
    model: Any, *, tokenizer: Tokenizer | None = None, **inference_config_fields: Any
) -> DynamicInferenceEngine:
    """As `build_engine` without ``prefix``, but of megatron's own classes: what this package is compared with.

    Raises:
        ValueError: As `build_engine`.
    """
    return _upstream_engine(model, _checked_config(model, None, inference_config_fields), tokenizer)


def _upstream_engine(model: Any, config: InferenceConfig, tokenizer: Tokenizer | None) -> DynamicInferenceEngine:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    context = DynamicInferenceContext(model_config=model.config, inference_config=config)
    return DynamicInferenceEngine(_controller(TextGenerationController, model, context, tokenizer), context)


def _controller(
    kind: type[TextGenerationController], model: Any, context: DynamicInferenceContext, tokenizer: Tokenizer | None
) -> TextGenerationController:
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.utils import get_attr_wrapped_model

    wrapped = GPTInferenceWrapper(model, context)
    wrapped.prep_model_for_inference()
    tokenizer = tokenizer or ByteTokenizer(get_attr_wrapped_model(model, "vocab_size"))
    return kind(inference_wrapped_model=wrapped, tokenizer=tokenizer)


def _checked_config(model: Any, prefix: HybridPrefixConfig | None, fields: dict[str, Any]) -> InferenceConfig:
    check_contract()
    platform = running_platform()
    if platform is not None:
        platform.check_cuda_graphs(model.config.cuda_graph_impl)
    return _inference_config(model, prefix, fields)


def _inference_config(model: Any, prefix: HybridPrefixConfig | None, fields: dict[str, Any]) -> InferenceConfig:
    from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.utils import get_attr_wrapped_model

    unknown = set(fields) - set(InferenceConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown InferenceConfig field(s): {', '.join(sorted(unknown))}")
    if prefix is not None and fields.get("enable_prefix_caching"):
        raise ValueError("prefix=... and enable_prefix_caching=True (megatron's own cache) exclude each other")
    state_dtype = None if prefix is None or prefix.state_dtype is None else getattr(torch, prefix.state_dtype)
    values: dict[str, Any] = {
        "max_sequence_length": get_attr_wrapped_model(model, "max_sequence_length"),
        "mamba_inference_state_config": mamba_state_config(model, ssm_dtype=state_dtype),
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
    }
    on_host = next(model.parameters()).device.type == "cpu"
    if on_host:
        values |= HOST_DEFAULTS
    values |= fields
    if values.get("max_tokens") is not None:
        # Upstream pads a step to such a multiple, and asserts where that is more than max_tokens.
        tp = model.config.tensor_model_parallel_size
        values["max_tokens"] = DynamicInferenceContext.round_up_tokens(values["max_tokens"], tp)
    config = InferenceConfig(**values)
    problems = _of_all_stages(_budget_problem(model, config))
    for problem in problems:
        if problem is not None:
            raise ValueError(problem)
    return config


def _of_all_stages(value: Any) -> list[Any]:
    """What each pipeline stage says; every rank has to ask."""
    from megatron.core import parallel_state

    stages: list[Any] = [value] * parallel_state.get_pipeline_model_parallel_world_size()
    if len(stages) > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_gather_object(stages, value, group=group)
    return stages


def mamba_state_config(
    model: Any, conv_dtype: torch.dtype | None = None, ssm_dtype: torch.dtype | None = None
) -> MambaInferenceStateConfig | None:
    """Shapes of one recurrent state, also on a pipeline stage without Mamba layers (None: no stage has any).

    Upstream derives them from the stage's own layers and treats a stage without Mamba as a plain transformer, which
    then skips other tokens than its neighbours.
    """
    from megatron.core.inference.config import MambaInferenceStateConfig
    from megatron.core.utils import get_attr_wrapped_model

    own = MambaInferenceStateConfig.from_model(model, conv_dtype, ssm_dtype)
    shapes = (
        None
        if own is None
        else (
            own.conv_states_shape,
            own.ssm_states_shape,
            own.mamba_chunk_size,
            own.conv_states_dtype,
            own.ssm_states_dtype,
        )
    )
    stages = _of_all_stages(shapes)
    if own is not None:
        return own
    known = next((stage for stage in stages if stage is not None), None)
    if known is None:
        return None
    return MambaInferenceStateConfig(
        layer_type_list=get_attr_wrapped_model(model, "decoder").layer_type_list,
        conv_states_shape=known[0],
        ssm_states_shape=known[1],
        mamba_chunk_size=known[2],
        conv_states_dtype=known[3],
        ssm_states_dtype=known[4],
    )


def state_bytes(config: MambaInferenceStateConfig) -> int:
    """Bytes of one recurrent state over this rank's layers."""
    per_layer = (
        math.prod(config.conv_states_shape) * config.conv_states_dtype.itemsize
        + math.prod(config.ssm_states_shape) * config.ssm_states_dtype.itemsize
    )
    return per_layer * sum(symbol == "M" for symbol in config.layer_type_list)


def _budget_problem(model: Any, config: InferenceConfig) -> str | None:
    """What does not fit, in one line, before upstream asserts on it, or on a later step."""
    tp = model.config.tensor_model_parallel_size
    max_tokens = config.max_tokens or 16384
    if config.max_requests is None:
        return None
    if config.max_requests < 1 or config.max_requests % tp:
        return f"max_requests={config.max_requests} must be a multiple of the tensor-parallel size {tp}"
    if max_tokens < config.max_requests:
        return f"max_tokens={max_tokens} must be at least max_requests={config.max_requests}"
    state = config.mamba_inference_state_config
    if state is None or config.mamba_memory_ratio is not None:
        return None
    # Live states, and with speculative decoding one more for each position that may be accepted.
    states_per_request = 1 if config.num_speculative_tokens == 0 else 2 + config.num_speculative_tokens
    need_bytes = config.max_requests * states_per_request * state_bytes(state)
    have_bytes = (config.buffer_size_gb + (config.paused_buffer_size_gb or 0)) * 2**30
    if need_bytes >= have_bytes:
        return (
            f"buffer_size_gb={config.buffer_size_gb} is too small: the recurrent states of max_requests="
            f"{config.max_requests} need {need_bytes / 2**20:.2f} MiB of {have_bytes / 2**20:.2f} MiB; "
            "raise buffer_size_gb or lower max_requests"
        )
    return None
