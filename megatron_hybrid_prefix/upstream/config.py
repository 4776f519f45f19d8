"""Settings of megatron's inference. Imports no engine, so it can be imported before a platform runs."""

from megatron_hybrid_prefix.upstream.version import naming_versions

with naming_versions():
    from megatron.core.inference.config import (
        AsyncScheduleMode,
        InferenceConfig,
        KVCacheManagementMode,
        MambaInferenceStateConfig,
        PrefixCachingCoordinatorPolicy,
        PrefixCachingEvictionPolicy,
    )
    from megatron.core.utils import get_attr_wrapped_model, get_pg_size
