"""Evicted KV and states load back from host memory: ``python examples/host_tier.py``."""

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform()  # must run before other imports of megatron
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

model = build_hybrid_model("tiny", seed=0)
texts = [f"Text number {number}. " * 40 for number in range(20)]
for host_gb in (0.0, 0.05):
    # The device memory is too small for the KV and the states of 20 texts.
    engine = build_engine(model, prefix=HybridPrefixConfig(cache_gb=0.004, host_gb=host_gb))
    for text in texts:
        engine.generate([text + "Who wrote it?"], SamplingParams(num_tokens_to_generate=4, top_k=1))
    (record,) = engine.generate([texts[0] + "When?"], SamplingParams(num_tokens_to_generate=4, top_k=1))
    host = engine.context.prefix_stats().tiers["host"]
    print(
        f"host_gb={host_gb}: {record.merge().num_cached_tokens} prompt tokens of the first text were not computed again"
    )
    print(f"    {host.stores} KV blocks and states moved to the host, {host.loads} loaded back")
