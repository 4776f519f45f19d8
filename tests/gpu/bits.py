"""Bits of ``exact="bits"``: each request alone and uncached, beside random schedules of all. Usage: ``bits.py PRESET --out FOLDER``.

    python tests/gpu/bits.py small --out out/bits                       # about a minute on an H200; small-gdn likewise
    torchrun --nproc-per-node 2 tests/gpu/bits.py small --tp 2 --out out/bits
    python tests/gpu/bits.py tiny --device cpu --requests 20 --out out/bits         # to try it

Requests share prefixes, and some continue the answer of another one. Tokens, their log-probs, and log-probs of prompts must
have the same bits, and answers those of a trainer's forward. With layers that draft (`small-mtp`) some engines draft, and a random
number of drafts are right. The last engine is the control: one product of each MLP depends on the number of rows, and bits differ.
"""

from __future__ import annotations

import gc
import json
import random
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import started
from tests.harness.bits import SPANS, bits
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import cache_gb_for, greedy, random_tokens, run_to_end
from tests.harness.named_models import named
from tests.harness.trainer import trained

MAX_REQUESTS, MAX_TOKENS = 16, 1024
LONGEST_TOKENS = 1200  # of a shared prefix: longer than a step's MAX_TOKENS
PLENTY_TOKENS = 4 * MAX_REQUESTS * (LONGEST_TOKENS + 300)  # cached and running, where memory is not tight
WAITS = (0, 0, 1, 2, 5)  # requests that arrive before a step


class Job:
    """A request: its prompt, how many tokens to generate, and whether log-probs of the prompt are wanted."""

    def __init__(self, prompt, answer_tokens, prompt_log_probs):
        self.prompt, self.answer_tokens, self.prompt_log_probs = prompt, answer_tokens, prompt_log_probs

    def params(self, **fields):
        """Sampling parameters; ``fields`` are attributes that megatron does not have."""
        params = greedy(self.answer_tokens, skip_prompt_log_probs=not self.prompt_log_probs)
        for name, value in fields.items():
            setattr(params, name, value)
        return params


def make_jobs(engine, count, vocabulary, longest, seed=0):
    """Requests and what each gives alone, with a salt that no other request has."""
    rng = random.Random(seed)
    shared = [random_tokens(longest, seed=number, vocabulary=vocabulary) for number in range(4)]
    jobs, truth = [], []
    for number in range(count):
        own = random_tokens(rng.choice((*SPANS, 200)), seed=1000 + number, vocabulary=vocabulary)
        before = rng.choice(shared)[: rng.randrange(1, longest)]
        earlier = rng.randrange(number) if number and rng.random() < 0.4 else None
        if earlier is not None and len(jobs[earlier].prompt) < longest:
            before = jobs[earlier].prompt + truth[earlier][0]
        jobs.append(Job(before + own, rng.randrange(1, 13), rng.random() < 0.2))
        finished = {}
        engine.add_request(number, jobs[-1].prompt, jobs[-1].params(cache_salt=f"alone {number}"))
        run_to_end(engine, finished)
        assert not finished[number].num_cached_tokens
        truth.append(bits(finished[number]))
    return jobs, truth


def play(engine, jobs, seed):
    """A random schedule: {number: request}, and how many steps there were."""
    rng, waiting, finished, steps = random.Random(seed), list(range(len(jobs))), {}, 0
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice(WAITS)):
            if waiting:
                number = waiting.pop(rng.randrange(min(12, len(waiting))))
                engine.add_request(number, jobs[number].prompt, jobs[number].params())
        if engine.has_unfinished_requests():
            run_to_end(engine, finished, steps=1)
            steps += 1
    engine.context.check_integrity()
    return finished, steps


def scores_that_differ(engine, jobs, truth, most=60):
    """How many log-probs of answers are others than by one prefill of prompt and answer; answers of more than a chunk among them."""
    long = [Job(job.prompt, 300, False) for job in jobs[:4]]
    params = [job.params(cache_salt=f"long {number}") for number, job in enumerate(long)]
    found = [bits(engine.generate([job.prompt], own)[0].merge()) for job, own in zip(long, params, strict=True)]
    differ = 0
    for job, (tokens, log_probs, _) in zip([*long, *jobs[:most]], [*found, *truth[:most]], strict=True):
        scores = engine.score(job.prompt + tokens)[len(job.prompt) - 1 :]
        differ += sum(score != log_prob for score, log_prob in zip(scores, log_probs, strict=True))
    return differ


def of_a_trainer(engine, model, jobs, block_tokens):
    """What `invariant_forward` gives of some answers of more than a chunk; the engine is suspended."""
    params = [Job(job.prompt, 150, False).params(cache_salt=f"trained {number}") for number, job in enumerate(jobs)]
    found = [bits(engine.generate([job.prompt], own)[0].merge())[:2] for job, own in zip(jobs, params, strict=True)]
    engine.suspend()
    return trained(
        model, [(job.prompt + own, scores) for job, (own, scores) in zip(jobs, found, strict=True)], block_tokens
    )


@contextmanager
def dependent_on_rows(shape):
    """Products with weights of this shape are sums of two, in an order that depends on the number of rows."""
    from megatron_hybrid_prefix.layers import invariant

    linear = invariant.linear

    def planted(x, weight, *dtype):
        if weight.shape != shape:
            return linear(x, weight, *dtype)
        at = shape[1] // (2 + x.numel() // shape[1] % 4)
        return F.linear(x[..., :at], weight[:, :at]) + F.linear(x[..., at:], weight[:, at:])

    invariant.linear = planted
    try:
        yield
    finally:
        invariant.linear = linear


def where_different(finished, found, truth):
    """Of each request with other bits: its number, its cached tokens, and the place and values of the first other log-prob."""
    for number, (mine, alone) in enumerate(zip(found, truth, strict=True)):
        for where, ours, wanted in ("prompt", mine[2] or (), alone[2] or ()), ("answer", mine[1], alone[1]):
            at = next((i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b), None)
            if at is not None:
                yield number, finished[number].num_cached_tokens, f"{where}, {at}", ours[at], wanted[at]
                break


def control_shape(config, tp):
    """Of the weights whose product depends on rows in the control: the second product of an MLP, or of a shared expert."""
    width = config.ffn_hidden_size if "-" in config.layer_pattern else config.moe_shared_expert_intermediate_size
    return torch.Size((config.hidden_size, width // tp))


def main(options):
    begin, platform, config = time.perf_counter(), options.platform, named(options.preset)
    cuda, speaks = platform.device.type == "cuda", platform.rank == 0
    longest = LONGEST_TOKENS if cuda else 300
    fields = {
        "max_sequence_length": 4096,
        "max_requests": MAX_REQUESTS,
        "max_tokens": MAX_TOKENS if cuda else 320,
        "block_size_tokens": options.block_tokens,
        "enable_chunked_prefill": True,
        "materialize_only_last_token_logits": False,
    }
    report = {"platform": platform.describe(), "preset": options.preset, "dtype": config.dtype}
    report["requests"] = options.requests
    model = build_hybrid_model(config, seed=0, transformer_impl="local", cuda_graph_impl="none")
    sizes = {"block_tokens": options.block_tokens, "max_requests": MAX_REQUESTS, "is_open": True}
    blocks = PLENTY_TOKENS // options.block_tokens
    plenty = {"cache_gb": cache_gb_for(model, blocks, states=4 * MAX_REQUESTS, **sizes)}
    tight = {"cache_gb": cache_gb_for(model, 80, states=12, **sizes), "host_gb": 2.0 if cuda else 0.05}
    engines = {
        "eager": (plenty, {}),
        "async": (plenty, {"async_sched_mode": "async"}),
        "tight": (tight, {}),
        "graphs": (plenty, {"num_cuda_graphs": -1, "async_sched_mode": "async"}),
    }
    if drafts := config.mtp_num_layers:
        engines["drafts"] = tight, {"num_speculative_tokens": drafts}
        engines["drafts in graphs"] = plenty, engines["graphs"][1] | {"num_speculative_tokens": drafts}
    engines["control"] = plenty, {}
    if not cuda or (config.num_moe_experts and config.dtype != "bfloat16"):  # those are refused
        engines = {name: engine for name, engine in engines.items() if "graphs" not in name}
    with torch.inference_mode():
        alone = build_engine(model, HybridPrefixConfig(exact="bits", **plenty), **fields)
        jobs, truth = make_jobs(alone, options.requests, config.vocab_size, longest)
        report["scores"] = scores_that_differ(alone, jobs, truth)
        if not config.mtp_num_layers:  # those are refused
            report["trainer"] = of_a_trainer(alone, model, jobs[:1], options.block_tokens)
        del alone
        if speaks:
            print(f"each alone: {time.perf_counter() - begin:.1f} s since the start", flush=True)
        for seed, (name, (memory, more)) in enumerate(engines.items()):
            if options.engines and name not in options.engines.split(","):
                continue
            own = model
            if "graphs" in name:  # graphs are tied to the modules that they were captured on
                own = build_hybrid_model(config, seed=0, transformer_impl="local", cuda_graph_impl="local")
            engine = build_engine(own, HybridPrefixConfig(exact="bits", **memory), **(fields | more))
            changed = dependent_on_rows(control_shape(config, options.tp)) if name == "control" else nullcontext()
            if "drafts" in name:
                known = {number: jobs[number].prompt + tokens for number, (tokens, *_) in enumerate(truth)}
                dice = random.Random(seed)
                changed = forced_drafts(engine, known, lambda *_, dice=dice: dice.randint(0, drafts))
            with changed:
                finished, steps = play(engine, jobs, seed)
            found = [bits(finished[number]) for number in range(len(jobs))]
            differ = [sum(a[part] != b[part] for a, b in zip(found, truth, strict=True)) for part in range(3)]
            stats = engine.context.prefix_stats()
            report[name] = {
                "different": dict(zip(("tokens", "log-probs", "log-probs of prompts"), differ, strict=True)),
                "steps": steps,
                "hits": sum(bool(request.num_cached_tokens) for request in finished.values()),
                "evictions": stats.evictions,
                "first different": next(where_different(finished, found, truth), None),
            }
            if "graphs" in name:
                release_engine(engine)
            del engine, own
            gc.collect()
            if speaks:
                print(f"{name:>8}: {report[name]}; {time.perf_counter() - begin:.1f} s since the start", flush=True)
    if speaks:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"bits_{options.preset}_tp{options.tp}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    fields = {"requests": 200, "tp": 1, "block_tokens": 256, "engines": "", "out": "out/bits"}
    with started(__doc__, "preset", sizes=lambda args: {"tp": args.tp}, **fields) as arguments:
        main(arguments)
