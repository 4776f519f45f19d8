"""A tiny model in float32 on a GPU against the float64 recompute: hits, misses, log-probs of prompts computed in chunks.

Usage: ``tiny_fp32.py TOLERANCE [PRESET]``.
"""

from __future__ import annotations

import os

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from tests.gpu.measure import started
from tests.gpu.models import built
from tests.harness.engine_helpers import NOISES, assert_matches, greedy, kv_budget, random_tokens, run_to_end
from tests.harness.naive_model import UNIT_ROUNDOFF, NaiveHybridModel

LENGTHS = (2, 65, 129, 200)
MAX_REQUESTS, BLOCKS = 16, 5 * 16


def prompts_in_chunks(model, prefix, mode):
    """Finished requests for log-probs of the whole prompt and the two likeliest tokens."""
    fields = {"max_sequence_length": 512, "max_requests": 8, "block_size_tokens": 64}
    fields |= kv_budget(model, 4 * BLOCKS, block_tokens=64, max_requests=8)
    fields |= {"enable_chunked_prefill": True, "max_tokens": 64, "materialize_only_last_token_logits": False}
    engine, finished = build_engine(model, prefix, async_sched_mode=mode, **fields), {}
    for number, length in enumerate(LENGTHS):
        params = greedy(4, skip_prompt_log_probs=False, top_n_logprobs=2)
        engine.add_request(number, random_tokens(length, seed=200 + number), params)
    run_to_end(engine, finished)
    return finished.values()


def assert_prompt_matches(reference, request, tolerance):
    """Checks each position of the prompt: the log-prob of the next token, and the likeliest tokens."""
    tokens = request.prompt_tokens.tolist()
    rows, following = reference.log_probs(tokens)[:-1], torch.tensor(tokens[1:])[:, None]
    roundoff = 2.0**-11 if os.environ.get("TRITON_F32_DEFAULT") == "tf32" else UNIT_ROUNDOFF
    noise = reference.noise(tokens)[:-1].gather(1, following)[:, 0] * (roundoff / UNIT_ROUNDOFF)
    off = (torch.tensor(request.prompt_log_probs).double() - rows.gather(1, following)[:, 0]).abs()
    assert bool((off <= (NOISES * noise).clamp(min=tolerance)).all()), f"prompt of {len(tokens)}: {off.tolist()}"
    found = torch.tensor([sorted(entry.values(), reverse=True) for entry in request.prompt_top_n_logprobs]).double()
    torch.testing.assert_close(found, rows.topk(2).values, rtol=0, atol=NOISES * tolerance)


def main(args):
    tolerance, model = float(args.tolerance), built(args.preset)
    fields = {"max_sequence_length": 1024, "max_requests": MAX_REQUESTS}
    fields |= kv_budget(model, BLOCKS, block_tokens=256, max_requests=MAX_REQUESTS)
    engine = build_engine(model, **fields)
    finished = {}
    with torch.inference_mode():
        cached, prefix = build_engine(model, HybridPrefixConfig(cache_gb=0.02), **fields), random_tokens(512, seed=99)
        for number, own in enumerate((1, 1, 2, 3, 4, 60, 300), start=100):
            cached.add_request(number, prefix + random_tokens(own, seed=number), greedy(8))
            run_to_end(cached, finished)
            cached.context.check_integrity()
        assert [request.num_cached_tokens for request in finished.values()] == [0] + 6 * [512]
        stateless = build_engine(model, HybridPrefixConfig(mamba_gb=0.0), **fields)  # all is computed, KV is shared
        for number, own in enumerate((1, 4, 300, 0), start=300):
            stateless.add_request(number, prefix + random_tokens(own, seed=number), greedy(8))
            run_to_end(stateless, finished, steps=2)
        run_to_end(stateless, finished)
        stats = stateless.context.prefix_stats()
        assert (stats.reused_tokens, stats.lost_tokens_no_state) == (0, 2 * 512 + 256)
        for number, length in enumerate((2, 3, 127, 129, 256, 257, 600)):
            engine.add_request(number, random_tokens(length, seed=number), greedy(8))
            run_to_end(engine, finished, steps=2)
        run_to_end(engine, finished)
        cases = [(prefix, mode) for prefix in (None, HybridPrefixConfig(cache_gb=0.02)) for mode in ("legacy", "async")]
        chunked = [request for case in cases for request in prompts_in_chunks(model, *case)]
    reference = NaiveHybridModel(model.cpu(), model.hybrid_config)
    for request in finished.values():
        request.prompt_tokens = request.prompt_tokens.cpu()
        assert_matches(reference, request, tolerance=tolerance)
    assert len(finished) == 18
    for request in chunked:
        request.prompt_tokens = request.prompt_tokens.cpu()
        assert_prompt_matches(reference, request, tolerance)
        assert_matches(reference, request, tolerance=tolerance)
    assert len(chunked) == len(cases) * len(LENGTHS)


if __name__ == "__main__":
    with started(__doc__, "tolerance", "preset=tiny") as arguments:
        main(arguments)
