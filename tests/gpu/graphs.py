"""Answers with and without CUDA graphs, hits and misses, decode and mixed steps. Usage: ``graphs.py PRESET OUT.json``.

Of a model that drafts: answers with drafts, the cache on and off, beside those without drafts. Drafts are made from the
latter, so that 0, 1 or 2 of each pair are accepted. In some runs requests have end tokens, which may be accepted
drafts. Every engine has a model of its own: graphs are tied to the modules they were captured on.
"""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from pathlib import Path

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from tests.gpu.measure import started
from tests.gpu.models import GPT, built
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget, random_tokens, run_to_end
from tests.harness.named_models import named

NEW_TOKENS = 24
PREFIX_TOKENS = 512
MAX_REQUESTS, BLOCK_TOKENS = 16, 256
BLOCKS, STATES = 5 * MAX_REQUESTS, 4 * MAX_REQUESTS  # more than all prompts need, and few where memory is tight
TIGHT_BLOCKS, TIGHT_STATES = 8, 2
DRAFTS = 2


def prompts(vocab_size):
    """Groups of prompts. Each group is sent while the previous one still decodes. Most prompts share a prefix."""
    prefix = random_tokens(PREFIX_TOKENS, seed=1, vocabulary=vocab_size)
    tails = ((3,), (1, 40), (2, 7, 100), (5, 64), (130,), (1, 2, 3, 4))
    groups = []
    for number, group in enumerate(tails):
        own = [random_tokens(count, seed=10 * number + count, vocabulary=vocab_size) for count in group]
        groups.append([tail if number == 3 else prefix + tail for tail in own])
    return groups


def run(preset, *, graphs, mode="legacy", together=True, cached=True, answers=None, ends=False, tight=False, **fields):
    """Tokens and log-probs of every request, and how many steps of each kind replayed graphs.

    Drafts are made from ``answers``, if there are some; ``ends``: each request has an end token, taken from its answer. ``tight``: of
    a model in float32, memory is: entries are evicted and requests wait, so that steps have other requests; in bfloat16 that alone
    would change the answers.
    """
    gc.collect()  # the model of the run before
    torch.cuda.empty_cache()
    model = built(preset, **({"cuda_graph_impl": "local"} if graphs else {}))
    config = model.hybrid_config
    if graphs:
        fields["num_cuda_graphs"] = -1
    drafts = fields.get("num_speculative_tokens", 0)
    sizes = {"block_tokens": BLOCK_TOKENS, "max_requests": MAX_REQUESTS, "speculative_tokens": drafts}
    few = tight and config.dtype == "float32"
    blocks, states = (TIGHT_BLOCKS, TIGHT_STATES) if few else (BLOCKS, STATES)
    cache_gb, dtype = cache_gb_for(model, blocks, states=states, **sizes), fields.pop("checkpoint_dtype", None)
    engine = build_engine(
        model,
        HybridPrefixConfig(cache_gb=cache_gb, checkpoint_dtype=dtype) if cached else None,
        max_sequence_length=2048,
        max_requests=MAX_REQUESTS,
        block_size_tokens=BLOCK_TOKENS,
        async_sched_mode=mode,
        **kv_budget(model, BLOCKS, **sizes),
        **fields,
    )
    context, finished = engine.context, {}
    counts, addresses = count_steps(context), addresses_of(context) if cached else {}
    groups = prompts(config.vocab_size)
    drafting = nullcontext()
    if answers is not None:
        every = [prompt for group in groups for prompt in group]
        truth = {number: prompt + answer for number, (prompt, answer) in enumerate(zip(every, answers, strict=True))}
        drafting = forced_drafts(engine, truth, lambda number, position: (7 * number + position) % (DRAFTS + 1))
    with torch.inference_mode(), drafting:
        for group in groups:
            for prompt in group:
                number = len(finished) + len(engine.requests)
                params = greedy(NEW_TOKENS)
                if ends:
                    params.add_attributes({"stop_token_ids": [end_of(number, answers[number])]})
                engine.add_request(number, prompt, params)
                if not together:
                    run_to_end(engine, finished)
            run_to_end(engine, finished, 6)
        run_to_end(engine, finished)
    counts["accepted"] = int(engine._spec_tokens_accepted_per_pos.sum())
    if cached:
        context.check_integrity()
        assert addresses_of(context) == addresses
    if tight:
        counts |= {"moved": engine.context.prefix_cache.memory_use().moved_blocks}
        counts |= {"evicted": context.prefix_stats().evictions}
    if graphs:
        release_engine(engine)
    return answers_of(finished, counts)


def count_steps(context):
    """Steps from now on that compute prompts and that only decode, and those of each that replay CUDA graphs."""
    counts = {"prefill": 0, "decode": 0, "graph_prefill": 0, "graph_decode": 0}
    initialize = context.initialize_attention_state

    def counting(*args, **kwargs):
        result = initialize(*args, **kwargs)
        kind = "prefill" if context.num_prefill_requests else "decode"
        counts[kind] += 1
        counts[f"graph_{kind}"] += bool(context.using_cuda_graph_this_step())
        return result

    context.initialize_attention_state = counting
    return counts


def answers_of(finished, counts):
    """What finished requests said, in order, and how many steps of each kind there were."""
    requests = [finished[number] for number in sorted(finished)]
    return {
        "tokens": [list(map(int, request.generated_tokens)) for request in requests],
        "log_probs": [list(request.generated_log_probs) for request in requests],
        "cached_tokens": [request.num_cached_tokens for request in requests],
        "counts": counts,
    }


def end_of(number, answer):
    """The end token of a request: its answer ends at the first place of it."""
    return answer[5 * number % NEW_TOKENS]


def addresses_of(context):
    """Addresses that a captured graph has: they must stay."""
    memory, indices = context.shared_memory, context.prefill_step.buffer
    tensors = memory.states | memory.rings | {"kv": context.memory_buffer, "indices": indices}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def without_drafts(preset):
    """Eager runs and runs with graphs."""
    found = {"eager": run(preset, graphs=False), "alone": run(preset, graphs=False, together=False)}
    found["uncached_graphs"] = run(preset, graphs=True, cached=False)
    for mode in ("legacy", "async"):
        found[f"graphs_{mode}"] = run(preset, graphs=True, mode=mode)
    found["graphs_tight"] = run(preset, graphs=True, mode="async", tight=True)
    for name in ("int8", "graphs_int8"):
        found[name] = run(preset, graphs=name != "int8", mode="async", checkpoint_dtype="int8")
    return found


def with_drafts(preset):
    """Runs with drafts, and one without."""
    found = {"eager": run(preset, graphs=False), "alone": run(preset, graphs=False, together=False)}
    drafting = {"answers": found["eager"]["tokens"], "num_speculative_tokens": DRAFTS}
    found["uncached_drafts"] = run(preset, graphs=False, cached=False, **drafting)
    found["eager_drafts"] = run(preset, graphs=False, **drafting)
    for mode in ("legacy", "async"):
        found[f"graphs_drafts_{mode}"] = run(preset, graphs=True, mode=mode, **drafting)
    for mode in ("legacy", "async"):
        found[f"graphs_drafts_ends_{mode}"] = run(preset, graphs=True, mode=mode, ends=True, **drafting)
    found["graphs_drafts_tight"] = run(preset, graphs=True, tight=True, **drafting)
    return found


def write(find, doc):
    """The main function of a script with PRESET and OUT.json: writes what ``find`` gives for the preset, and prints the counts."""
    with started(doc, "preset", "out") as args:
        found = find(args.preset)
        Path(args.out).write_text(json.dumps(found))
        print({name: value["counts"] for name, value in found.items()})


if __name__ == "__main__":
    write(lambda name: (with_drafts if named(name.removeprefix(GPT)).mtp_num_layers else without_drafts)(name), __doc__)
