"""A prefix cache hit in ten lines, on a GPU or the CPU: ``python examples/ten_lines.py``."""

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform()  # must run before other imports of megatron
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

engine = build_engine(build_hybrid_model("tiny", seed=0), prefix=HybridPrefixConfig(cache_gb=0.3))
for question in ("Who wrote it?", "When?"):
    (record,) = engine.generate(["A long text. " * 50 + question], SamplingParams(num_tokens_to_generate=8, top_k=1))
    print(record.merge().num_cached_tokens, "prompt tokens were not computed")
