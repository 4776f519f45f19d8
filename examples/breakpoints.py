"""The second request already reuses a system prompt, because a breakpoint marks its end.

``python examples/breakpoints.py``
"""

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform()  # must run before other imports of megatron
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

SYSTEM = "You answer questions about one long text. " * 25  # 1,050 tokens: a token is a byte
QUESTIONS = ("Who wrote it?", "When was it written?", "What is it about?")

model = build_hybrid_model("tiny", seed=0)
for with_breakpoint in (False, True):
    # No interval checkpoints, so that only the breakpoint makes the difference.
    engine = build_engine(model, prefix=HybridPrefixConfig(cache_gb=0.3, retention_interval_tokens=0))
    reused = []
    for question in QUESTIONS:
        sampling = SamplingParams(num_tokens_to_generate=8, top_k=1)
        if with_breakpoint:
            sampling.add_attributes({"cache_breakpoints": [len(SYSTEM)]})
        (record,) = engine.generate([SYSTEM + question + " Answer in one sentence. " * 20], sampling)
        reused.append(record.merge().num_cached_tokens)
    print("with a breakpoint:   " if with_breakpoint else "without a breakpoint:", *reused, "prompt tokens reused")
