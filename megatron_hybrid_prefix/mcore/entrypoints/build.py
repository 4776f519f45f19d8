"""`build_engine`: megatron's dynamic engine around a model, with or without this package's prefix cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.arguments import hybrid_prefix_config_from_args
from megatron_hybrid_prefix.mcore.entrypoints.install import CONTEXT_IN_CUDA_GRAPHS, installed
from megatron_hybrid_prefix.mcore.ranks.agreement import of_all_stages
from megatron_hybrid_prefix.platform import patched_machine, replace_names
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.sampling import drafts_problem
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer, Tokenizer
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.version import check_version

if TYPE_CHECKING:
    import argparse

    from megatron_hybrid_prefix.upstream.config import InferenceConfig
    from megatron_hybrid_prefix.upstream.names import (
        DynamicInferenceContext,
        DynamicInferenceEngine,
        TextGenerationController,
    )

# Without a GPU, upstream's defaults (20 GB of KV, 16,384 tokens per step) need too much host memory.
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
        prefix: Settings of the prefix cache; None: off. (Fields ``enable_prefix_caching=True`` and
            ``prefix_caching_mamba_gb=...`` switch on megatron's own cache, with megatron's own classes.)
        tokenizer: By default the bytes of the text.
        **inference_config_fields: Fields of megatron's ``InferenceConfig``. What is left open is chosen as of `fastest_fields`.

    Returns:
        The engine: ``add_request``, ``step_modern``, ``has_unfinished_requests`` work as upstream.

    Raises:
        ValueError: A field is unknown, or the configured memory is too small.
        PlatformError: megatron-core is missing or unsupported, or the model was made for other parallel sizes than those that run.
        UpstreamDriftError: The installed megatron-core differs in a name that this package relies on.
    """
    is_ours = not inference_config_fields.get("enable_prefix_caching")
    inference_config = _checked_config(model, prefix, inference_config_fields, fastest=is_ours)
    if not is_ours:
        return _upstream_engine(model, inference_config, tokenizer)
    from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
    from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
    from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
    from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine

    if prefix is None:
        context = SlotContext(model.config, inference_config)
    else:
        context = HybridPrefixContext(model.config, inference_config, prefix)
    if model.config.cuda_graph_impl == "local":
        replace_names(CONTEXT_IN_CUDA_GRAPHS)
    return HybridPrefixEngine(_controller(HybridPrefixController, model, context, tokenizer), context)


def build_upstream_engine(
    model: Any, *, tokenizer: Tokenizer | None = None, **inference_config_fields: Any
) -> DynamicInferenceEngine:
    """`build_engine` without ``prefix`` and with megatron's own classes: the baseline of tests and benchmarks.

    Raises:
        ValueError: As `build_engine`; or the model has layers that megatron's engine cannot run.
    """
    return _upstream_engine(model, _checked_config(model, None, inference_config_fields), tokenizer)


def build_engine_from_args(
    model: Any, args: argparse.Namespace, *, tokenizer: Tokenizer | None = None
) -> DynamicInferenceEngine:
    """`build_engine` with the inference settings of ``megatron.training`` arguments, and with the cache if they enable it.

    Args:
        model: This rank's shard, in ``eval`` mode, not wrapped for training.
        args: Arguments parsed and validated by ``megatron.training``, with `add_hybrid_prefix_args`.
        tokenizer: By default the bytes of the text.

    Raises:
        ValueError: As `hybrid_prefix_config_from_args` and `build_engine`.
    """
    from megatron.training.argument_utils import inference_cfg_from_args

    prefix = hybrid_prefix_config_from_args(args)
    capture = getattr(args, "cuda_graph_impl", "none") == "local"
    with installed():  # megatron's own description of the states refuses some models
        upstream = inference_cfg_from_args(args).to_inference_config(model, enable_cuda_graphs=capture)
    values = {
        each.name: value for each in dataclasses.fields(upstream) if (value := getattr(upstream, each.name)) is not None
    }
    values["enable_prefix_caching"] = False
    return build_engine(model, prefix, tokenizer=tokenizer, **values)


def _upstream_engine(model: Any, config: InferenceConfig, tokenizer: Tokenizer | None) -> DynamicInferenceEngine:
    from megatron_hybrid_prefix.mcore.state.layout import needs_this_package, states_of_config
    from megatron_hybrid_prefix.upstream.names import (
        DynamicInferenceContext,
        DynamicInferenceEngine,
        TextGenerationController,
    )

    if needs_this_package(config.mamba_inference_state_config):
        kinds = [layout.kind for layout in states_of_config(config.mamba_inference_state_config).slots.kinds]
        raise ValueError(f"megatron's own engine cannot run a model with layers of kind {', '.join(kinds)}")
    config.keeps_megatrons = True  # whatever is installed
    context = DynamicInferenceContext(model_config=model.config, inference_config=config)
    return DynamicInferenceEngine(_controller(TextGenerationController, model, context, tokenizer), context)


def _controller(
    kind: type[TextGenerationController], model: Any, context: DynamicInferenceContext, tokenizer: Tokenizer | None
) -> TextGenerationController:
    from megatron_hybrid_prefix.upstream.config import get_attr_wrapped_model
    from megatron_hybrid_prefix.upstream.names import GPTInferenceWrapper

    wrapped = GPTInferenceWrapper(model, context)
    wrapped.prep_model_for_inference()
    tokenizer = tokenizer or ByteTokenizer(get_attr_wrapped_model(model, "vocab_size"))
    return kind(inference_wrapped_model=wrapped, tokenizer=tokenizer)


def _checked_config(
    model: Any, prefix: HybridPrefixConfig | None, fields: dict[str, Any], *, fastest: bool = False
) -> InferenceConfig:
    check_version()  # before megatron is imported
    from megatron_hybrid_prefix.mcore.engine import controller, engine  # noqa: F401  for the check
    from megatron_hybrid_prefix.mcore.entrypoints.defaults import fastest_fields
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, with_state_dtype
    from megatron_hybrid_prefix.upstream.config import (
        InferenceConfig,
        PrefixCachingEvictionPolicy,
        get_attr_wrapped_model,
    )
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceContext

    check_overrides()
    machine = patched_machine()
    if machine is not None:
        machine.check_cuda_graphs(model.config.cuda_graph_impl)
    check_sizes(model.config, "the model's config", fields.get("pg_collection"))
    unknown = set(fields) - set(InferenceConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown InferenceConfig field(s): {', '.join(sorted(unknown))}")
    if prefix is not None and fields.get("enable_prefix_caching"):
        raise ValueError("prefix=... and enable_prefix_caching=True (megatron's own cache) exclude each other")
    described = mamba_state_config(model)
    if prefix is not None and described is None:
        variant = model.config.experimental_attention_variant
        named = "" if variant is None else f"experimental_attention_variant={variant!r}: "
        raise ValueError(f"{named}the model has no recurrent layers: use megatron's cache, enable_prefix_caching=True")
    values: dict[str, Any] = {
        "max_sequence_length": get_attr_wrapped_model(model, "max_sequence_length"),
        "mamba_inference_state_config": described,
    }
    if prefix is None:
        values["prefix_caching_eviction_policy"] = PrefixCachingEvictionPolicy.LRU
    if next(model.parameters()).device.type == "cpu":
        values |= HOST_DEFAULTS
    values |= (fastest_fields(model, fields) if fastest else {}) | fields
    state = values["mamba_inference_state_config"]
    if state is not None:
        values["mamba_inference_state_config"] = with_state_dtype(state, None if prefix is None else prefix.states_are)
    if values.get("max_tokens") is not None:
        # Upstream pads a step to a multiple of its size unit, and asserts that the result is at most max_tokens.
        tp = model.config.tensor_model_parallel_size
        values["max_tokens"] = DynamicInferenceContext.round_up_tokens(values["max_tokens"], tp)
    config = InferenceConfig(**values)
    problems = of_all_stages(_block_problem(model, config) or _budget_problem(model, config, prefix))
    if any(problems):
        raise ValueError(next(filter(None, problems)))
    return config


def _block_problem(model: Any, config: InferenceConfig) -> str | None:
    """Why no engine has such blocks or drafts, in one line; upstream asserts on it."""
    block_tokens, drafts = config.block_size_tokens, config.num_speculative_tokens
    if block_tokens < 1:
        return f"block_size_tokens={block_tokens}: must be at least 1"
    if drafts < 0:
        return f"num_speculative_tokens={drafts}: must not be negative"
    if drafts >= block_tokens:
        return f"num_speculative_tokens={drafts} must be below block_size_tokens={block_tokens}"
    problem = drafts_problem(drafts, model.config)
    return None if problem is None else f"num_speculative_tokens={drafts}: {problem}"


def _budget_problem(model: Any, config: InferenceConfig, prefix: HybridPrefixConfig | None) -> str | None:
    """The settings that do not fit, in one line; checked here before upstream asserts on it, now or in a later step."""
    from megatron_hybrid_prefix.mcore.state.budget import megatrons_bytes
    from megatron_hybrid_prefix.mcore.state.layout import states_of_config

    tp = model.config.tensor_model_parallel_size
    max_tokens = config.max_tokens or 16384
    if config.max_requests is None:
        return None
    if config.max_requests < 1 or config.max_requests % tp:
        return f"max_requests={config.max_requests} must be a multiple of the tensor-parallel size {tp}"
    if max_tokens < config.max_requests:
        return f"max_tokens={max_tokens} must be at least max_requests={config.max_requests}"
    state = config.mamba_inference_state_config
    if state is None or (config.mamba_memory_ratio if prefix is None else prefix.cache_gb) is not None:
        return None
    state_bytes = states_of_config(state).slots.slot_bytes
    need_bytes = config.max_requests * megatrons_bytes(state_bytes, config.num_speculative_tokens)
    have_bytes = (config.buffer_size_gb + (config.paused_buffer_size_gb or 0)) * 2**30
    if need_bytes >= have_bytes:
        return (
            f"buffer_size_gb={config.buffer_size_gb} is too small: the recurrent states of max_requests="
            f"{config.max_requests} need {need_bytes / 2**20:.2f} MiB of {have_bytes / 2**20:.2f} MiB; "
            "raise buffer_size_gb or lower max_requests"
        )
    return None
