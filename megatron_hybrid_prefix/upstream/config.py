"""Settings of megatron's inference. Imports no engine, so it can be imported before a platform runs."""

from megatron.core.inference.config import (
    AsyncScheduleMode,
    InferenceConfig,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingEvictionPolicy,
)
from megatron.core.utils import get_attr_wrapped_model

__all__ = [
    "AsyncScheduleMode",
    "InferenceConfig",
    "KVCacheManagementMode",
    "MambaInferenceStateConfig",
    "PrefixCachingEvictionPolicy",
    "get_attr_wrapped_model",
]
