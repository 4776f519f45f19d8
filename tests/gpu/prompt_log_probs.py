"""Log-probs of prompts, kept with the cache, and of prompts computed whole. Usage: ``prompt_log_probs.py [PRESET]``.

Endings of one context, one after another and at once: tokens computed, and calls that make the CPU wait for the GPU.
Keeping log-probs must add none, and raises if it waits. Then the mean difference of log-probs to those of a prompt
computed whole: of a hit, and of a prompt computed in two chunks, over the tokens that the hit computes. Prints JSON.
"""

from __future__ import annotations

import statistics
import warnings
from contextlib import nullcontext

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.context.scores import ScoredPrompts
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import report, started
from tests.gpu.syncs import mode, waits
from tests.harness.engine_helpers import cache_gb_for, greedy, random_tokens, run_to_end
from tests.harness.named_models import named

CONTEXT_TOKENS, ENDINGS, LONGEST_ENDING = 2000, 4, 64
SIZES = {"block_tokens": 256, "max_requests": 8}
SIDES = {"whole": 0.0, "kept": 0.1}  # GiB for log-probs


def forbid_waits():
    """Waiting for the GPU raises in all that keeps and takes log-probs."""

    def forbidding(original):
        def call(*args, **kwargs):
            with mode("error"):
                return original(*args, **kwargs)

        return call

    for name in ("capture", "publish", "collect"):
        setattr(ScoredPrompts, name, forbidding(getattr(ScoredPrompts, name)))


class Endings:
    """One engine of one of `SIDES`, and endings of a context."""

    def __init__(self, model, side, step_tokens=8192):
        self.vocabulary, self.number, self.watched = model.hybrid_config.vocab_size, 0, False
        cache_gb = cache_gb_for(model, 20 * ENDINGS, states=40, **SIZES)
        self.engine = build_engine(
            model,
            HybridPrefixConfig(cache_gb=cache_gb, prompt_log_probs_gb=SIDES[side]),
            max_sequence_length=CONTEXT_TOKENS + LONGEST_ENDING + 512,
            max_requests=SIZES["max_requests"],
            max_tokens=step_tokens,
            block_size_tokens=SIZES["block_tokens"],
            enable_chunked_prefill=True,
            materialize_only_last_token_logits=False,
        )

    def prompts(self, seed):
        """The context of a seed, with each ending."""
        context = random_tokens(CONTEXT_TOKENS, seed=seed, vocabulary=self.vocabulary)
        lengths = [1 + LONGEST_ENDING * (i + 1) // (ENDINGS + 1) for i in range(ENDINGS)]
        return [
            context + random_tokens(n, seed=1000 * seed + i, vocabulary=self.vocabulary) for i, n in enumerate(lengths)
        ]

    def run(self, prompts, *, at_once=False):
        """Finished requests in order, tokens computed, and waits in the first step of each prompt."""
        before = self.engine.context.prefix_stats().computed_prompt_tokens
        finished, found, first = {}, [], self.number
        for prompt in prompts:
            self.engine.add_request(self.number, prompt, greedy(1, skip_prompt_log_probs=False, top_n_logprobs=2))
            self.number += 1
            if not at_once:
                with warnings.catch_warnings(record=True) as caught, mode("warn") if self.watched else nullcontext():
                    warnings.simplefilter("always")
                    run_to_end(self.engine, finished, steps=1)
                found.append(waits(caught))
                run_to_end(self.engine, finished)
        run_to_end(self.engine, finished)
        computed = self.engine.context.prefix_stats().computed_prompt_tokens - before
        return [finished[number] for number in range(first, self.number)], computed, found


def off_by(found, right, first_tokens):
    """Mean difference of prompts' log-probs, of each prompt from a position on."""
    return statistics.mean(
        abs(a - b)
        for one, other, first in zip(found, right, first_tokens, strict=True)
        for a, b in zip(one.prompt_log_probs[first:], other.prompt_log_probs[first:], strict=True)
    )


def main(args):
    model = build_hybrid_model(named(args.preset), seed=0, cuda_graph_impl="none")
    sides = {side: Endings(model, side) for side in SIDES}
    with torch.inference_mode():
        for endings in sides.values():  # compiles kernels
            for seed in (901, 902):
                endings.run(endings.prompts(seed))
                endings.run(endings.prompts(seed), at_once=True)
        forbid_waits()
        for endings in sides.values():
            endings.watched = True
        seen = {side: endings.run(endings.prompts(1)) for side, endings in sides.items()}
        half = 64 * (CONTEXT_TOKENS // 128)
        chunks = Endings(model, "whole", step_tokens=half + 512)
        in_chunks = chunks.run(chunks.prompts(1)[1:])[0]
        hits, whole = seen["kept"][0][1:], seen["whole"][0][1:]  # the first one is no hit
        first = [request.num_cached_tokens for request in hits]
        assert min(first) > half, first
        found = {"preset": args.preset, "cached_tokens": first}
        found["waits_in_first_steps"] = {side: run[2] for side, run in seen.items()}
        found["hit_off_by"] = off_by(hits, whole, first)
        found["two_chunks_off_by"] = off_by(in_chunks, whole, first)
        found["computed_tokens"] = {
            name: {side: endings.run(endings.prompts(seed), at_once=at_once)[1] for side, endings in sides.items()}
            for name, seed, at_once in (("in turn", 10, False), ("at once", 110, True))
        }
    report(args, found | {"block_tokens": SIZES["block_tokens"]})


if __name__ == "__main__":
    with started(__doc__, "preset=small") as arguments:
        main(arguments)
