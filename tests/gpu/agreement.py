"""Next-token log-probs of one model: alone, batched, in chunks, by this package without hits, and with either cache.

Run by `test_agreement.py`, alone or under torchrun; also useful by hand:

    python tests/gpu/agreement.py --preset small --out /tmp/small.pt
    torchrun --nproc-per-node 2 tests/gpu/agreement.py --preset small --tp 2 --out /tmp/small2.pt
    python tests/gpu/agreement.py --hf DIR --out /tmp/hf.pt         # prompts are text, not random

Figures are differences to each prompt alone with caching off. ``--layers`` is ``transformer_impl``. With ``--fp8`` products are in FP8, by this
recipe, with ``--fp8-weights`` the weights, too. ``--graphs`` replays CUDA graphs, but alone. ``--float32`` saves the same weights' log-probs
in float32, too.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace

import torch

from tests.gpu.graphs import count_steps
from tests.gpu.hit_error import in_float32
from tests.gpu.measure import started
from tests.gpu.models import Source
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, state_bytes
from tests.harness.named_models import runs_on_megatron

PREFIX_TOKENS = 1024
PROMPTS = 24
BATCH = 4
SIZES = {"block_tokens": 256, "max_requests": BATCH}
BLOCKS, STATES = 6 * (PROMPTS + BATCH), 3 * PROMPTS  # all that the prompts leave: nothing is evicted


def prompts(source: Source) -> list[list[int]]:
    """Prompts that share 1,024 tokens, with tails of 40 to 270 tokens."""
    shared = source.tokens(PREFIX_TOKENS, seed=0)
    return [shared + source.tokens(40 + 10 * i, seed=1 + i) for i in range(PROMPTS)]


def error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean absolute log-prob difference over the 50 most likely tokens of the reference."""
    best = reference.topk(50, dim=-1).indices
    return float((rows.gather(1, best) - reference.gather(1, best)).abs().mean())


def spoil_before_restores(memory) -> None:
    """What a restore leaves of a live state as it was is NaN."""
    restore = memory.restore

    def spoiling(slots, live_slots):
        for part in (part for slot in live_slots for part in memory.state(slot).values()):
            part.fill_(float("nan"))
        restore(slots, live_slots)

    memory.restore = spoiling


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


OPTIONS = {"preset": "small", "prompts": PROMPTS, "out": "", "tp": 1, "pp": 1, "ep": 1, "hf": None, "layers": None}
FLAGS = {"fp8": (None, "tensorwise", "blockwise", "delayed"), "fp8_weights": False, "graphs": False, "float32": False}


def sizes(args) -> dict[str, int]:
    """With inference-optimized layers, tensor-parallel ranks have whole experts."""
    etp = {"etp": 1} if args.layers == "inference_optimized" else {}
    return {"tp": args.tp, "pp": args.pp, "ep": args.ep} | etp


def main(arguments) -> None:
    platform = arguments.platform
    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
    from megatron_hybrid_prefix.mcore import build_upstream_engine
    from megatron_hybrid_prefix.mcore.runner import release_engine

    fp8 = {"fp8": "e4m3", "fp8_recipe": arguments.fp8, "fp8_param": arguments.fp8_weights}
    layers = {"transformer_impl": arguments.layers} if arguments.layers else {}
    source = Source(arguments.preset, arguments.hf, **layers, **(fp8 if arguments.fp8 else {}))
    start, model = time.perf_counter(), source.build()
    sampling = greedy(8, return_log_probs=False)
    texts = prompts(source)[: arguments.prompts]
    alone = [[prompt] for prompt in texts]
    batched = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    fields = {"max_sequence_length": 4096, "max_requests": BATCH, "max_tokens": 8192}
    fields |= kv_budget(model, BLOCKS, **SIZES)
    # Megatron's own engine where it can run the layers, this package's with its cache off where not.
    on_megatron = runs_on_megatron(source.config)
    plain = build_upstream_engine if on_megatron else build_engine
    upstream = {"enable_prefix_caching": True, "prefix_caching_mamba_gb": STATES * state_bytes(model) / 2**30}
    ours = HybridPrefixConfig(cache_gb=cache_gb_for(model, BLOCKS, states=STATES, **SIZES), check_ranks=True)
    nothing_kept = HybridPrefixConfig(cache_gb=ours.cache_gb, mamba_gb=0)
    cases = [
        # In chunks, the arithmetic of a hit without a cache: 1024 tokens, then the tail from the live state.
        ("alone", alone, 1, {}),
        ("batched", batched, 1, {}),
        ("chunked", alone, 2, {"enable_chunked_prefill": True, "max_tokens": PREFIX_TOKENS}),
        *([("upstream", alone, 1, upstream)] if on_megatron else []),
        ("cold", alone, 1, {"prefix": nothing_kept}),  # this package's kernels, without hits
        ("ours", alone, 1, {"prefix": ours}),
        ("int8", alone, 1, {"prefix": replace(ours, checkpoint_dtype="int8")}),
    ]
    report = {"platform": platform.describe(), "preset": source.name, **source.fields}
    rows = {}
    with torch.inference_mode():
        for name, work, steps, extra in cases:
            build, of_case = build_engine if "prefix" in extra else plain, model
            if arguments.graphs and name != "alone":  # they are tied to the modules that they were captured on
                of_case, extra = source.build(cuda_graph_impl="local"), extra | {"num_cuda_graphs": -1}
            engine = build(of_case, **(fields | extra))
            counts = count_steps(engine.context)
            if name == "int8":
                spoil_before_restores(engine.context.shared_memory)
            rows[name], report[f"tokens_{name}"] = next_log_probs(engine, work, sampling, steps)
            report[f"computed_tokens_{name}"] = engine.context.lifetime_prefill_token_count
            if platform.rank == 0:
                off, seconds = error(rows[name], rows["alone"]), time.perf_counter() - start
                graphs = f", steps: {counts}" if arguments.graphs else ""
                print(f"{name}: {off:.6f} off alone{graphs}, {seconds:.1f} s since the start", flush=True)
            if of_case is not model:
                release_engine(engine)
            del engine, of_case
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.float32:
            model.cpu()  # both do not fit some GPUs
            torch.cuda.empty_cache()
            exact = in_float32(source, model)
            engine = build_engine(exact, **(fields | kv_budget(exact, BLOCKS, **SIZES)))
            rows["float32"], _ = next_log_probs(engine, alone, sampling)
    report["prompt_tokens"] = sum(map(len, texts))
    if platform.rank == 0:
        torch.save({"rows": rows, "report": report}, arguments.out)
        summary = {k: v for k, v in report.items() if not k.startswith("tokens_")}
        print(f"another prompt: {error(rows['alone'].roll(1, 0), rows['alone']):.6f}", json.dumps(summary), sep="\n")


if __name__ == "__main__":
    with started(__doc__, sizes=sizes, **OPTIONS, **FLAGS) as given:
        main(given)
