"""What `contract_scan` must be told of our sources: how variables with megatron's objects are called, and what needs no row."""

from __future__ import annotations

_INFERENCE = "megatron.core.inference"
_CONTEXTS = f"{_INFERENCE}.contexts"
_CONTEXT = f"{_CONTEXTS}.dynamic_context:DynamicInferenceContext"
_ENGINES = f"{_INFERENCE}.engines.dynamic_engine"
_ENGINE = f"{_ENGINES}:DynamicInferenceEngine"
_REQUEST = f"{_INFERENCE}.inference_request:DynamicInferenceRequest"
_SAMPLING = f"{_INFERENCE}.sampling_params:SamplingParams"
_ALLOCATOR = f"{_CONTEXTS}.kv_block_allocator:KVBlockAllocator"
_METADATA = f"{_CONTEXTS}.attention_context.mamba_metadata:MambaMetadata"
_BATCH = f"{_INFERENCE}.batch_dimensions_utils:InferenceBatchDimensions"
_CONTROLLERS = f"{_INFERENCE}.text_generation_controllers.text_generation_controller"

# How variables and attributes with megatron's objects are called in our sources, where nothing else tells their class.
RECEIVERS = {
    "context": _CONTEXT,
    "_context": _CONTEXT,
    "inference_context": _CONTEXT,
    "engine": _ENGINE,
    "_engine": _ENGINE,
    "controller": f"{_CONTROLLERS}:TextGenerationController",
    "_async_sched_logits": f"{_CONTROLLERS}:AsyncScheduleLogitsState",
    "asked": _SAMPLING,
    "params": _SAMPLING,
    "sampling_params": _SAMPLING,
    "req": _REQUEST,
    "request": _REQUEST,
    "head": _REQUEST,
    "old": _REQUEST,
    "new": _REQUEST,
    "part": _REQUEST,
    "merged": _REQUEST,
    "record": f"{_INFERENCE}.inference_request:DynamicInferenceRequestRecord",
    "entry": f"{_ENGINES}:RequestEntry",
    "kv_block_allocator": _ALLOCATOR,
    "allocator": _ALLOCATOR,
    "blocks": _ALLOCATOR,
    "gpu_view": f"{_CONTEXTS}.gpu_view:ContextGPUView",
    "mamba_metadata": _METADATA,
    "metadata": _METADATA,
    "inference_config": f"{_INFERENCE}.config:InferenceConfig",
    "inference_wrapped_model": f"{_INFERENCE}.model_inference_wrappers.gpt.gpt_inference_wrapper:GPTInferenceWrapper",
    "cp": "megatron.core.ssm.mamba_context_parallel:MambaContextParallel",
    "communicator": f"{_INFERENCE}.engines.async_zmq_communicator:AsyncZMQCommunicator",
    "batch_dimensions": _BATCH,
    "padded_batch_dimensions": _BATCH,
    "_client": f"{_INFERENCE}.inference_client:InferenceClient",
}
# Dictionaries of megatron, and the class or module whose code fills them. A method stands for what it returns.
DICTIONARIES = {
    "active_attn_metadata": f"{_CONTEXTS}.dynamic_context",
    "state_data": f"{_CONTEXTS}.attention_context.mha_metadata:MHAMetadata",
    "d": _METADATA,
    "pending": _METADATA,
    "active_request_metadata": _REQUEST,
    "wanted": _REQUEST,
    "step": _ENGINES,
    "step_modern": _ENGINES,
}
# Private names of others than megatron, and whose they are.
NOT_MEGATRONS = {
    "_exit": "os: a process that must end at once",
    "_replace": "NamedTuple",
    "_option_string_actions": "argparse has no other way to ask for a parser's flags",
    "_torchdynamo_orig_callable": "torch: what a compiled function was made of",
}
# Modules of megatron whose names are its way to build, shard and save models; a missing one is an ImportError.
DOCUMENTED = (
    "megatron.core.activations",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.validation",
    "megatron.core.fusions.fused_bias_dropout",
    "megatron.core.models.",
    "megatron.core.parallel_state",
    "megatron.core.process_groups_config",
    "megatron.core.ssm.mamba_layer",
    "megatron.core.ssm.mlp_layer",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.enums",
    "megatron.core.transformer.mlp",
    "megatron.core.transformer.module",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.spec_utils",
    "megatron.core.transformer.torch_norm",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.transformer_layer",
    "megatron.training.",
)


def is_documented(module: str) -> bool:
    """Whether the module's public names need no row."""
    return any(module == name or (name.endswith(".") and f"{module}.".startswith(name)) for name in DOCUMENTED)


def is_private(name: str) -> bool:
    """Whether a name is private; names of Python, such as ``__init__``, are not."""
    return name.startswith("_") and not name.endswith("__")
