"""Error of hits and misses in bfloat16 against a float32 run, teacher-forced.

    python tests/gpu/hit_error.py small 200
    python tests/gpu/hit_error.py --hf DIR 200      # prompts and given tokens are text, not random

Every prompt has 1024 shared tokens and 40 others. Then 32 given tokens are decoded. The log-prob of each is compared
with a float32 model with the same weights and plain attention, which computes everything at once (``--float64``: with a float64 one
without kernels, which none has to compile; slow with Gated DeltaNet layers). Prints JSON: mean
|log-prob difference| of hits, of misses (caching off), and of misses computed in two chunks.
"""

from __future__ import annotations

import argparse
import json

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers.kinds import invalidate_layers
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.models import Source
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, run_to_end
from tests.harness.naive_model import local_weights
from tests.harness.quadratic_model import QuadraticHybridModel

PREFIX_TOKENS, OWN_TOKENS, FORCED_TOKENS, BATCH = 1024, 40, 32, 8
SIZES = {"block_tokens": 256, "max_requests": BATCH}
BLOCKS = 6 * (BATCH + 1)


def force_tokens(engine, wanted):
    """The engine samples the tokens of ``wanted`` for each request, and records their log-probs."""
    controller, context = engine.controller, engine.context
    original = controller._dynamic_step_sample_logits
    found = {request_id: [] for request_id in wanted}

    def forcing(*args, **kwargs):
        result = original(*args, **kwargs)
        ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        logits = controller._all_logits_cuda[0, : len(ids)].float()
        # What follows a chunk that is not a prompt's last is not used.
        tokens = [0 if i == context.chunked_prefill_request_id else wanted[i][len(found[i])] for i in ids]
        tokens = torch.tensor(tokens, device=logits.device)
        chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0].tolist()
        for request_id, log_prob in zip(ids, chosen, strict=True):
            if request_id != context.chunked_prefill_request_id:
                found[request_id].append(log_prob)
        controller._sampled_tokens_cuda[: len(ids)] = tokens
        return result

    controller._dynamic_step_sample_logits = forcing
    return found


def decoded(model, prompts, forced, prefix=None, **fields):
    """Log-probs of the forced tokens, (prompts, FORCED_TOKENS), and how many prompt tokens were reused."""
    fields = {"max_sequence_length": 2048, "max_requests": BATCH, "max_tokens": 16384} | fields
    engine = build_engine(model, prefix, **(fields | kv_budget(model, BLOCKS, **SIZES)))
    found = force_tokens(engine, dict(enumerate(forced)))
    for start in range(0, len(prompts), BATCH):
        for number in range(start, min(start + BATCH, len(prompts))):
            engine.add_request(number, prompts[number], greedy(FORCED_TOKENS, return_log_probs=False))
            if start == 0:  # one by one, so that the others find what the first two leave
                run_to_end(engine, {})
        run_to_end(engine, {})
    reused = 0 if prefix is None else engine.context.prefix_stats().reused_tokens
    return torch.tensor([found[number] for number in range(len(prompts))]), reused


def whole(model, prompts, forced):
    """The same log-probs, from one prefill of each prompt with its forced tokens."""
    fields = {"max_sequence_length": 2048, "max_requests": BATCH, "materialize_only_last_token_logits": False}
    engine = build_engine(model, **(fields | kv_budget(model, BLOCKS, **SIZES)))
    rows = []
    for number, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        engine.add_request(number, prompt + tokens, greedy(1, return_log_probs=False))
        engine.step_modern()
        logits = engine.controller._all_logits_cuda[0, len(prompt) - 1 : len(prompt) + len(tokens) - 1].float()
        targets = torch.tensor(tokens, device=logits.device)
        rows.append(torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].cpu())
        run_to_end(engine, {})
    return torch.stack(rows)


def in_float32(source, model):
    """The same weights in float32. Local layers: Transformer Engine multiplies float32 in TF32."""
    exact = source.build("float32", transformer_impl="local")
    exact.load_state_dict(local_weights(model), strict=False)
    invalidate_layers(exact)
    return exact


def whole_in_float64(naive, prompts, forced):
    """As `whole`, of a `NaiveHybridModel`."""
    rows = []
    for prompt, tokens in zip(prompts, forced, strict=True):
        log_probs = naive.log_probs(prompt + tokens)[len(prompt) - 1 : -1]
        rows.append(log_probs.gather(1, torch.tensor(tokens, device=log_probs.device)[:, None])[:, 0].cpu())
    return torch.stack(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", nargs="?", default="small")
    parser.add_argument("prompts", type=int)
    parser.add_argument("state_dtype", nargs="?", help="bfloat16 or float32")
    parser.add_argument("--hf", metavar="DIR", help="a Hugging Face folder instead of PRESET")
    parser.add_argument("--layers", choices=("transformer_engine", "local"), help="default: as build_hybrid_model")
    parser.add_argument(
        "--float64", action="store_true", help="compare with the same weights in float64, without kernels"
    )
    arguments = parser.parse_args()
    count, state_dtype = arguments.prompts, arguments.state_dtype
    platform = ensure_platform()
    source = Source(arguments.preset, arguments.hf, transformer_impl=arguments.layers)
    model = source.build("bfloat16")
    shared = source.tokens(PREFIX_TOKENS, seed=1)
    pairs = [source.prompt_and_answer(OWN_TOKENS, FORCED_TOKENS, 100 + i, 10_000 + i) for i in range(count)]
    prompts, forced = [shared + own for own, _ in pairs], [answer for _, answer in pairs]
    # States may be kept in float32, twice as large.
    prefix = HybridPrefixConfig(
        cache_gb=cache_gb_for(model, BLOCKS, states=8 * BATCH, **SIZES), state_dtype=state_dtype
    )
    with torch.inference_mode():
        if arguments.float64:
            right = whole_in_float64(QuadraticHybridModel(model, source.config), prompts, forced)
        else:
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
    report = {
        "platform": platform.describe(),
        "preset": source.name,
        **source.fields,
        "prompts": len(prompts),
        "state_dtype": state_dtype,
    }
    report |= {"forced_tokens": FORCED_TOKENS, "reused_tokens": reused_tokens, "errors": errors}
    report["hit_over_miss"] = errors["hit"] / errors["miss"]
    report["mean_log_prob"] = float(right.mean())
    print(json.dumps(report))
    shut_down()


if __name__ == "__main__":
    main()
