"""One layout's answers, as JSON. Usage: ``torchrun parallel_engine.py OUT.json TP PP``."""

from __future__ import annotations

import sys

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import described, greedy, random_tokens, run_to_end
from tests.harness.workers.launch import write_findings

LENGTHS = (257, 1, 128, 3, 600, 2, 256, 127, 129, 255)
NEW_TOKENS = 16
BUFFER_GB = 0.05  # room for all requests; each engine fills it with zeros


def mixed_batches(model):
    """Prompts that arrive two at a time while others decode."""
    engine = build_engine(model, max_sequence_length=1024, async_sched_mode="async", buffer_size_gb=BUFFER_GB)
    finished: dict = {}
    for number, length in enumerate(LENGTHS):
        engine.add_request(number, random_tokens(length, seed=number), greedy(NEW_TOKENS))
        if number % 2:
            run_to_end(engine, finished, steps=2)
    run_to_end(engine, finished)
    return described(finished)


def chunked_prompts(model, mode):
    """Log-probs of two prompts, computed in chunks, and of their answers; as one list each."""
    engine = build_engine(
        model,
        max_sequence_length=512,
        max_tokens=64,
        enable_chunked_prefill=True,
        materialize_only_last_token_logits=False,
        async_sched_mode=mode,
        buffer_size_gb=BUFFER_GB,
    )
    finished: dict = {}
    for number, seed in enumerate((128, 136)):  # where float32 is close, see test_prompt_log_probs.py
        engine.add_request(number, random_tokens(150, seed=seed), greedy(4, skip_prompt_log_probs=False))
    run_to_end(engine, finished)
    return [list(finished[i].prompt_log_probs) + list(finished[i].generated_log_probs) for i in sorted(finished)]


def endings(model, mode):
    """Endings of one context, which part at a boundary, one before it and one after it: everything about their log-probs."""
    engine = build_engine(
        model,
        HybridPrefixConfig(mamba_gb=0.02),
        max_sequence_length=512,
        block_size_tokens=64,
        enable_chunked_prefill=True,
        max_tokens=128,
        materialize_only_last_token_logits=False,
        async_sched_mode=mode,
        buffer_size_gb=BUFFER_GB,
    )
    finished: dict = {}
    context = random_tokens(240, seed=128)
    for number, cut in enumerate((127, 128, 129, 128)):
        sampling = greedy(1, skip_prompt_log_probs=False, top_n_logprobs=2)
        sampling.add_attributes({"top_n_by_id": True})
        engine.add_request(number, context[:cut] + random_tokens(40, seed=60 + number), sampling)
        if number != 2:  # the last two come together
            run_to_end(engine, finished)
    run_to_end(engine, finished)
    return [
        {
            "cached_tokens": finished[number].num_cached_tokens,
            "prompt": finished[number].prompt_tokens.tolist(),
            "generated_tokens": list(finished[number].generated_tokens),
            "prompt_log_probs": finished[number].prompt_log_probs,
            "prompt_top_n_logprobs": finished[number].prompt_top_n_logprobs,
            "generated_log_probs": finished[number].generated_log_probs,
            "generated_top_n_logprobs": finished[number].generated_top_n_logprobs,
        }
        for number in sorted(finished)
    ]


def layout_answers(tp, pp):
    """Everything that must be the same in all layouts."""
    platform = ensure_platform(tp=tp, pp=pp, device="cpu")
    model = build_hybrid_model("tiny", seed=0, platform=platform)
    found = {"platform": platform.describe(), "parameters": sum(p.numel() for p in model.parameters())}
    found["mixed"] = mixed_batches(model)
    found["chunked"] = chunked_prompts(model, "legacy") + chunked_prompts(model, "async")
    found["endings"] = {mode: endings(model, mode) for mode in ("legacy", "async")}
    return found


def main(out, tp, pp):
    write_findings(out, layout_answers(tp, pp))
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
