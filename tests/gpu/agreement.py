"""Next-token log-probs of one preset on GPUs: alone, batched, in chunks, and resumed from either prefix cache.

Run by `test_agreement.py`, alone or under torchrun; also useful by hand:

    python tests/gpu/agreement.py --preset small --out /tmp/small.pt
    torchrun --nproc-per-node 2 tests/gpu/agreement.py --preset small --tp 2 --out /tmp/small2.pt
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from megatron_hybrid_prefix.platform import ensure_platform, shut_down

PREFIX_TOKENS = 1024
PROMPTS = 24


def prompts(vocab_size: int) -> list[list[int]]:
    """Prompts that share 1024 tokens, with tails of 40 to 270 tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, vocab_size, (count,), generator=generator).tolist()

    shared = draw(PREFIX_TOKENS)
    return [shared + draw(40 + 10 * i) for i in range(PROMPTS)]


def next_log_probs(engine, batches, sampling, prefill_steps=1):
    """Log-probs after each prompt's last token, (prompts, vocabulary) fp32 on the CPU, and generated tokens."""
    rows, generated, number = [], {}, 0
    for batch in batches:
        for prompt in batch:
            engine.add_request(number, prompt, sampling)
            number += 1
        step = 0
        while engine.has_unfinished_requests():
            result = engine.step_modern()
            step += 1
            if step == prefill_steps:
                logits = engine.controller._all_logits_cuda[0, : len(batch)].float()
                rows.append(torch.log_softmax(logits, dim=-1).cpu())
            for record in result["finished_request_records"]:
                request = record.merge()
                generated[request.request_id] = list(request.generated_tokens)
    return torch.cat(rows), [generated[i] for i in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    platform = ensure_platform(tp=arguments.tp, pp=arguments.pp)

    from megatron.core.inference.sampling_params import SamplingParams

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
    from megatron_hybrid_prefix.mcore import build_upstream_engine
    from megatron_hybrid_prefix.models import build_hybrid_model, get_preset

    start = time.perf_counter()
    model = build_hybrid_model(arguments.preset, seed=0)
    torch.cuda.synchronize()
    build_s = time.perf_counter() - start
    sampling = SamplingParams(num_tokens_to_generate=8, top_k=1, termination_id=-1)
    texts = prompts(get_preset(arguments.preset).vocab_size)
    alone = [[prompt] for prompt in texts]
    batched = [texts[i : i + 4] for i in range(0, len(texts), 4)]
    fields = dict(max_sequence_length=4096, max_requests=16, max_tokens=8192, buffer_size_gb=8)
    report = {"platform": platform.describe(), "preset": arguments.preset, "build_s": round(build_s, 2)}
    rows = {}
    with torch.inference_mode():
        # In chunks, the arithmetic of a hit without a cache: 1024 tokens, then the tail from the live state.
        for name, work, steps, extra in (
            ("alone", alone, 1, {}),
            ("batched", batched, 1, {}),
            ("chunked", alone, 2, {"enable_chunked_prefill": True, "max_tokens": PREFIX_TOKENS}),
            ("upstream", alone, 1, {"enable_prefix_caching": True, "prefix_caching_mamba_gb": 6.0}),
            ("ours", alone, 1, {"prefix": HybridPrefixConfig(mamba_gb=6.0, check_ranks=True)}),
        ):
            build = build_engine if "prefix" in extra else build_upstream_engine
            engine = build(model, **(fields | extra))
            rows[name], report[f"tokens_{name}"] = next_log_probs(engine, work, sampling, steps)
            report[f"computed_tokens_{name}"] = engine.context.lifetime_prefill_token_count
            del engine
            torch.cuda.empty_cache()
    report["prompt_tokens"] = sum(map(len, texts))
    if platform.rank == 0:
        torch.save({"rows": rows, "report": report}, arguments.out)
        summary = {k: v for k, v in report.items() if not k.startswith("tokens_")}
        print(json.dumps(summary), flush=True)
    shut_down()


if __name__ == "__main__":
    main()
