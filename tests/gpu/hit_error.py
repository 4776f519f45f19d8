"""Error of hits and misses in bfloat16 against a float32 run, teacher-forced.

    python tests/gpu/hit_error.py small 200
    python tests/gpu/hit_error.py small 200 --hf DIR      # prompts and given tokens are text, not random

Every prompt has 1024 shared tokens and 40 others. Then 32 given tokens are decoded. The log-prob of each is compared
with a float32 model with the same weights, which computes everything at once. Prints JSON: mean |log-prob difference|
of hits, of misses (caching off), and of misses computed in two chunks.
"""

from __future__ import annotations

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers.kinds import invalidate_layers
from tests.gpu.forced import Forced, log_probs_of
from tests.gpu.measure import report, started
from tests.gpu.models import Source
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, run_to_end
from tests.harness.naive_model import local_weights

PREFIX_TOKENS, OWN_TOKENS, FORCED_TOKENS, BATCH = 1024, 40, 32, 8
SIZES = {"block_tokens": 256, "max_requests": BATCH}
BLOCKS = 6 * (BATCH + 1)


def decoded(model, prompts, forced, prefix=None, **fields):
    """Log-probs of the forced tokens, (prompts, FORCED_TOKENS), and how many prompt tokens were reused."""
    fields = {"max_sequence_length": 2048, "max_requests": BATCH, "max_tokens": 16384} | fields
    engine = build_engine(model, prefix, **(fields | kv_budget(model, BLOCKS, **SIZES)))
    found = Forced(engine, torch.tensor(forced))
    for start in range(0, len(prompts), BATCH):
        for number in range(start, min(start + BATCH, len(prompts))):
            engine.add_request(number, prompts[number], greedy(FORCED_TOKENS, return_log_probs=False))
            if start == 0:  # one by one, so that the others find what the first two leave
                run_to_end(engine, {})
        run_to_end(engine, {})
    reused = 0 if prefix is None else engine.context.prefix_stats().reused_tokens
    return found.log_probs, reused


def whole(model, prompts, forced):
    """The same log-probs, from one prefill of each prompt with its forced tokens."""
    fields = {"max_sequence_length": 2048, "max_requests": BATCH, "materialize_only_last_token_logits": False}
    engine = build_engine(model, **(fields | kv_budget(model, BLOCKS, **SIZES)))
    rows = []
    for number, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        engine.add_request(number, prompt + tokens, greedy(1, return_log_probs=False))
        engine.step_modern()
        logits = engine.controller._all_logits_cuda[0, len(prompt) - 1 : len(prompt) + len(tokens) - 1].float()
        rows.append(log_probs_of(torch.log_softmax(logits, dim=-1), tokens))
        run_to_end(engine, {})
    return torch.stack(rows)


def in_float32(source, model):
    """The same weights in float32. Local layers: Transformer Engine multiplies float32 in TF32."""
    exact = source.build("float32", transformer_impl="local")
    exact.load_state_dict(local_weights(model), strict=False)
    invalidate_layers(exact)
    return exact


def main(args):
    source, count = Source(args.preset, args.hf), int(args.prompts)
    model = source.build("bfloat16")
    shared = source.tokens(PREFIX_TOKENS, seed=1)
    pairs = [source.prompt_and_answer(OWN_TOKENS, FORCED_TOKENS, 100 + i, 10_000 + i) for i in range(count)]
    prompts, forced = [shared + own for own, _ in pairs], [answer for _, answer in pairs]
    prefix = HybridPrefixConfig(cache_gb=cache_gb_for(model, BLOCKS, states=4 * BATCH, **SIZES))
    with torch.inference_mode():
        right = whole(in_float32(source, model), prompts, forced)
        print(f"truth: mean log-prob {float(right.mean()):.4f}", flush=True)
        misses, _ = decoded(model, prompts, forced)
        print(f"misses: {float((misses - right).abs().mean()):.6f}", flush=True)
        hits, reused_tokens = decoded(model, prompts, forced, prefix)
        print(f"hits, the first two included: {float((hits - right).abs().mean()):.6f}", flush=True)
        chunked, _ = decoded(model, prompts, forced, enable_chunked_prefill=True, max_tokens=PREFIX_TOKENS)
    hit_rows = slice(2, None)  # the first two computed all
    errors = {
        name: float((rows - right)[hit_rows].abs().mean())
        for name, rows in (("hit", hits), ("miss", misses), ("chunked", chunked))
    }
    found = {"preset": source.name, "prompts": len(prompts), "forced_tokens": FORCED_TOKENS}
    found |= {"reused_tokens": reused_tokens, "errors": errors, "hit_over_miss": errors["hit"] / errors["miss"]}
    report(args, found)


if __name__ == "__main__":
    with started(__doc__, "preset", "prompts", hf=None) as arguments:
        main(arguments)
