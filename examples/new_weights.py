"""New weights in a running engine, as in reinforcement learning: ``python examples/new_weights.py``.

KV and states of the old weights are wrong for the new ones. `engine.invalidate()` empties the cache. (Behind megatron's
coordinator, a new generation epoch does the same.)
"""

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform()  # must run before other imports of megatron
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402

PROMPT = "A long text. " * 50


def generate(engine, what):
    (record,) = engine.generate([PROMPT], SamplingParams(num_tokens_to_generate=8, top_k=1))
    request = record.merge()
    print(f"{what}: {request.num_cached_tokens} prompt tokens were not computed")
    return [int(token) for token in request.generated_tokens]


model = build_hybrid_model("tiny", seed=0)
engine = build_engine(model, prefix=HybridPrefixConfig(cache_gb=0.3))
generate(engine, "old weights, first time")
generate(engine, "old weights, again     ")

trained = build_hybrid_model("tiny", seed=1)  # stands for the trainer's model
with torch.no_grad():
    for parameter, new in zip(model.parameters(), trained.parameters(), strict=True):
        parameter.copy_(new)
engine.invalidate()  # on every rank, between the same two steps

tokens = generate(engine, "new weights, first time")
generate(engine, "new weights, again     ")
expected = generate(build_engine(trained, buffer_size_gb=0.25), "without a cache        ")
print("same answer with and without the cache:", tokens == expected)
