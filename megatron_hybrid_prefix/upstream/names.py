"""Public names of megatron outside its documented API. Other modules import them from here."""

from megatron_hybrid_prefix.upstream.version import naming_versions

with naming_versions():
    from megatron.core.inference.config import KVCacheManagementMode
    from megatron.core.inference.contexts.dynamic_context import (
        BlockOverflowError,
        ContextOverflowError,
        DynamicInferenceContext,
        MaxSequenceLengthOverflowError,
        RequestOverflowError,
        TokenOverflowError,
    )
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState, EngineSuspendedError
    from megatron.core.inference.inference_client import InferenceClient
    from megatron.core.inference.inference_request import (
        DynamicInferenceRequest,
        DynamicInferenceRequestRecord,
        Status,
    )
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.sampling.base import Sampling
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
    from megatron.core.inference.unified_memory import UnifiedMemoryUnsupportedError
