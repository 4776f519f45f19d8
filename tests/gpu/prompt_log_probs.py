"""Prompts that want their log-probs: with them kept beside the cache, and with every such prompt computed whole.

Endings of one context, one after another and at once: tokens computed, seconds, and calls that make the CPU wait for the GPU.
Keeping log-probs must add none, and raises if it waits. Then the mean difference of log-probs to those of a prompt computed
whole: of a hit, and of a prompt computed in two chunks, over the tokens that the hit computes. Usage: ``prompt_log_probs.py [--preset P] [--context N] [--endings N] [--repeats N] [--device cpu] --out DIR``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.context.scores import ScoredPrompts
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

LONGEST_ENDING = 64
SIDES = {"whole": 0.0, "kept": 1.0}  # GiB for log-probs


@contextmanager
def sync_mode(name):
    """A context with ``torch.cuda.set_sync_debug_mode``; without a GPU nothing."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(name)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def forbid_waits():
    """Waiting for the GPU raises in all that keeps and takes log-probs."""

    def forbidding(original):
        def call(*args, **kwargs):
            with sync_mode("error"):
                return original(*args, **kwargs)

        return call

    for name in ("capture", "publish", "collect"):
        setattr(ScoredPrompts, name, forbidding(getattr(ScoredPrompts, name)))


class Endings:
    """One engine, and endings of a context.

    Args:
        model: The model.
        side: Of `SIDES`.
        options: Options of the script.
        step_tokens: Most tokens of a step.
    """

    def __init__(self, model, side, options, step_tokens=8192):
        self.vocabulary = get_preset(options.preset).vocab_size
        self.options, self.number = options, 0
        self.engine = build_engine(
            model,
            HybridPrefixConfig(mamba_gb=options.mamba_gb, prompt_log_probs_gb=SIDES[side]),
            max_sequence_length=options.context + LONGEST_ENDING + 512,
            max_requests=8,
            max_tokens=step_tokens,
            buffer_size_gb=options.buffer_gb,
            enable_chunked_prefill=True,
            materialize_only_last_token_logits=False,
        )

    def prompts(self, seed):
        """The context of a seed, with each ending."""
        context = random_tokens(self.options.context, seed=seed, vocabulary=self.vocabulary)
        lengths = [1 + LONGEST_ENDING * (i + 1) // (self.options.endings + 1) for i in range(self.options.endings)]
        return [
            context + random_tokens(n, seed=1000 * seed + i, vocabulary=self.vocabulary) for i, n in enumerate(lengths)
        ]

    def run(self, prompts, *, at_once=False, asks=True):
        """Finished requests in order, tokens computed, seconds, and waits in the first step of each prompt."""
        before = self.engine.context.prefix_stats().computed_prompt_tokens
        finished, waits, first = {}, [], self.number
        began_s = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(
                self.number,
                prompt,
                greedy(1, return_log_probs=asks, skip_prompt_log_probs=False, top_n_logprobs=2 * asks),
            )
            self.number += 1
            if not at_once:
                waits.append(self.first_step(finished))
                run_to_end(self.engine, finished)
        run_to_end(self.engine, finished)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began_s
        computed = self.engine.context.prefix_stats().computed_prompt_tokens - before
        return [finished[number] for number in range(first, self.number)], computed, seconds, waits

    def first_step(self, finished):
        with warnings.catch_warnings(record=True) as caught, sync_mode("warn") if self.options.syncs else nullcontext():
            warnings.simplefilter("always")
            run_to_end(self.engine, finished, steps=1)
        return sum("synchronizing" in str(warning.message) for warning in caught)


def off_by(found, right, first_tokens):
    """Mean difference of prompts' log-probs, of each prompt from a position on."""
    return statistics.mean(
        abs(a - b)
        for one, other, first in zip(found, right, first_tokens, strict=True)
        for a, b in zip(one.prompt_log_probs[first:], other.prompt_log_probs[first:], strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--endings", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mamba-gb", type=float, default=4.0)
    parser.add_argument("--buffer-gb", type=float, default=4.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.syncs = False
    platform = ensure_platform(**({} if options.device is None else {"device": options.device}))
    print(platform.describe(), flush=True)
    model = build_hybrid_model(options.preset, seed=0)
    sides = {side: Endings(model, side, options) for side in SIDES}
    found = {"platform": platform.describe(), "options": {k: str(v) for k, v in vars(options).items()}}
    with torch.inference_mode():
        for endings in sides.values():  # compiles kernels
            for seed in (901, 902):
                endings.run(endings.prompts(seed))
                endings.run(endings.prompts(seed), at_once=True)
        print("warm", flush=True)
        # Does nothing wait, and are log-probs the same?
        forbid_waits()
        options.syncs = True
        seen = {side: endings.run(endings.prompts(1)) for side, endings in sides.items()}
        options.syncs = False
        half = 64 * (options.context // 128)
        chunks = Endings(model, "whole", options, step_tokens=half + 512)
        in_chunks = chunks.run(chunks.prompts(1)[1:])[0]
        hits, whole = seen["kept"][0][1:], seen["whole"][0][1:]  # the first one is no hit
        first = [request.num_cached_tokens for request in hits]
        assert min(first) > half, first
        found["waits_in_first_steps"] = {side: run[3] for side, run in seen.items()}
        found["cached_tokens"] = first
        found["hit_off_by"] = off_by(hits, whole, first)
        found["two_chunks_off_by"] = off_by(in_chunks, whole, first)
        print(f"waits {found['waits_in_first_steps']}, cached {first}", flush=True)
        print(f"off by {found['hit_off_by']:.2e}, in two chunks {found['two_chunks_off_by']:.2e}", flush=True)
        del chunks
        for at_once in (False, True):
            rows = {side: [] for side in SIDES}
            for repeat in range(options.repeats):
                for side, endings in sides.items():
                    _, computed, seconds, _ = endings.run(endings.prompts(10 + repeat + 100 * at_once), at_once=at_once)
                    rows[side].append((computed, seconds))
                    print(
                        f"{'at once' if at_once else 'in turn'}, {side}: {computed} tokens, {seconds:.3f} s", flush=True
                    )
            found["at once" if at_once else "in turn"] = {
                side: {
                    "computed_tokens": statistics.median(computed for computed, _ in values),
                    "seconds": statistics.median(seconds for _, seconds in values),
                }
                for side, values in rows.items()
            }
        cold = {side: [] for side in SIDES}  # a prompt that nobody shares: what keeping its log-probs costs
        for repeat in range(options.repeats + 2):
            for side, endings in sides.items():
                cold[side].append(endings.run(endings.prompts(500 + repeat)[:1])[2])
        found["cold_prompt_s"] = {side: statistics.median(values[2:]) for side, values in cold.items()}
        stats = sides["kept"].engine.context.prefix_stats()
        found["scores_bytes_used"] = stats.scores_bytes_used
        found["block_tokens"] = sides["kept"].engine.context.block_size_tokens
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prompt_log_probs.json").write_text(json.dumps(found, indent=1))
    print(f"\n{options.endings} endings of {options.context} tokens | computed whole | kept | ratio")
    for name in ("in turn", "at once"):
        whole, kept = (found[name][side] for side in SIDES)
        print(
            f"{name} | {whole['computed_tokens']:.0f} tokens, {whole['seconds']:.3f} s | {kept['computed_tokens']:.0f} tokens, "
            f"{kept['seconds']:.3f} s | {kept['seconds'] / whole['seconds']:.2f}"
        )
    cold_s = found["cold_prompt_s"]
    print(f"a cold prompt | {cold_s['whole']:.4f} s | {cold_s['kept']:.4f} s | {cold_s['kept'] / cold_s['whole']:.3f}")
    print(json.dumps(found))
    shut_down()


if __name__ == "__main__":
    main()
