"""A prefix cache hit on two tensor-parallel ranks: ``torchrun --nproc-per-node 2 examples/tensor_parallel.py``.

Every rank adds the same requests. Each rank keeps its shard of the KV and of the states.
"""

import os

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down

platform = ensure_platform(tp=int(os.environ["WORLD_SIZE"]))
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

model = build_hybrid_model("tiny", seed=0)  # the same weights for every layout
engine = build_engine(model, prefix=HybridPrefixConfig(cache_gb=0.3))
if platform.rank == 0:
    print(platform.describe())
for question in ("Who wrote it?", "When?"):
    (record,) = engine.generate(["A long text. " * 50 + question], SamplingParams(num_tokens_to_generate=8, top_k=1))
    if platform.rank == 0:
        print(record.merge().num_cached_tokens, "prompt tokens were not computed")
shut_down()
