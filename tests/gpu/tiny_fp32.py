"""``tiny`` in float32 on a GPU against the float64 recompute, hits and misses. Usage: ``tiny_fp32.py TOLERANCE``."""

from __future__ import annotations

import sys

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.engine_helpers import assert_matches, greedy, random_tokens, run_to_end
from tests.naive_model import NaiveHybridModel


def main(tolerance):
    print(ensure_platform().describe())
    model = build_hybrid_model("tiny", seed=0)
    fields = {"max_sequence_length": 1024, "buffer_size_gb": 1, "max_requests": 16}
    engine = build_engine(model, **fields)
    cached = build_engine(model, HybridPrefixConfig(mamba_gb=0.01), **fields)
    finished = {}
    with torch.inference_mode():
        prefix = random_tokens(512, seed=99)
        for number, own in enumerate((1, 1, 2, 3, 4, 60, 300), start=100):
            cached.add_request(number, prefix + random_tokens(own, seed=number), greedy(8))
            run_to_end(cached, finished)
            cached.context.check_integrity()
        assert [request.num_cached_tokens for request in finished.values()] == [0] + 6 * [512]
        for number, length in enumerate((2, 3, 127, 129, 256, 257, 600)):
            engine.add_request(number, random_tokens(length, seed=number), greedy(8))
            run_to_end(engine, finished, steps=2)
        run_to_end(engine, finished)
    reference = NaiveHybridModel(model.cpu(), get_preset("tiny"))
    for request in finished.values():
        request.prompt_tokens = request.prompt_tokens.cpu()
        assert_matches(reference, request, tolerance=tolerance)
    assert len(finished) == 14
    shut_down()


if __name__ == "__main__":
    main(float(sys.argv[1]))
