"""A tiny model in float32 on a GPU against the float64 recompute: hits, misses, log-probs of prompts computed in chunks.

Usage: ``tiny_fp32.py TOLERANCE [PRESET]``.
"""

from __future__ import annotations

import os

import torch

from tests.gpu.measure import started
from tests.gpu.models import built
from tests.harness.engine_helpers import NOISES, assert_matches, random_tokens
from tests.harness.lifecycle_helpers import MODES, EngineHarness
from tests.harness.naive_model import UNIT_ROUNDOFF, NaiveHybridModel

LENGTHS = (2, 65, 129, 200)


def prompts_in_chunks(model, mode, **cache):
    """Finished requests for log-probs of the whole prompt and the two likeliest tokens."""
    chunks = {"enable_chunked_prefill": True, "max_tokens": 64, "materialize_only_last_token_logits": False}
    served = EngineHarness(model, max_sequence_length=512, max_requests=8, async_sched_mode=mode, **cache, **chunks)
    for number, length in enumerate(LENGTHS):
        params = {"skip_prompt_log_probs": False, "top_n_logprobs": 2}
        served.add(random_tokens(length, seed=200 + number), 4, params=params)
    served.run()
    return list(served.finished.values())


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
    fields = {"max_requests": 16, "block_size_tokens": 256, "retention_interval_tokens": None}
    with torch.inference_mode():
        cached, prefix = EngineHarness(model, cache_gb=0.02, **fields), random_tokens(512, seed=99)
        for number, own in enumerate((1, 1, 2, 3, 4, 60, 300), start=100):
            cached.send(prefix + random_tokens(own, seed=number), count=8)
        assert [request.num_cached_tokens for request in cached.finished.values()] == [0] + 6 * [512]
        stateless = EngineHarness(model, slots=0, **fields)  # all is computed, KV is shared
        for number, own in enumerate((1, 4, 300, 0), start=300):
            stateless.add(prefix + random_tokens(own, seed=number), 8)
            stateless.step(2)
        stateless.run()
        stats = stateless.context.prefix_stats()
        assert (stats.reused_tokens, stats.lost_tokens_no_state) == (0, 2 * 512 + 256)
        off = EngineHarness(model, slots=None, **fields)
        for number, length in enumerate((2, 3, 127, 129, 256, 257, 600)):
            off.add(random_tokens(length, seed=number), 8)
            off.step(2)
        off.run()
        caches = [{"slots": None}, {"cache_gb": 0.02}]
        chunked = [each for cache in caches for mode in MODES for each in prompts_in_chunks(model, mode, **cache)]
    finished = [request for served in (cached, stateless, off) for request in served.finished.values()]
    reference = NaiveHybridModel(model.cpu(), model.hybrid_config)
    for request in finished:
        request.prompt_tokens = request.prompt_tokens.cpu()
        assert_matches(reference, request, tolerance=tolerance)
    assert len(finished) == 18
    for request in chunked:
        request.prompt_tokens = request.prompt_tokens.cpu()
        assert_prompt_matches(reference, request, tolerance)
        assert_matches(reference, request, tolerance=tolerance)
    assert len(chunked) == 4 * len(LENGTHS)


if __name__ == "__main__":
    with started(__doc__, "tolerance", "preset=tiny") as arguments:
        main(arguments)
