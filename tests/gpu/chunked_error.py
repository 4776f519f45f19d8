"""Error of whole and chunked prefill in bfloat16, of megatron's engine and this package's, teacher-forced.

    python tests/gpu/chunked_error.py --prompts 200 --json /tmp/chunked.json

Random prompts are sent at once, a step of chunked prefill holds 768 tokens, and 32 given tokens are decoded after each.
The truth is the same weights in float64, computed whole, without chunks and without a state
(`tests/harness/quadratic_model.py`). The engines: megatron's, cache off; this package's, its cache on (random prompts
share nothing); both with float32 states, and both with all in float32. ``--preset upstream-test`` is the hybrid model
of megatron-core's ``TestChunkedPrefillCudaGraphs``, initialised as megatron does: its logits are close together, and in
bfloat16 the best two are often the same number. ``--hf DIR``: the weights of a Hugging Face folder; prompts and given
tokens are text.
"""

from __future__ import annotations

import gc
import json
import math
import time
from itertools import product
from pathlib import Path

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.layers.kinds import invalidate_layers
from megatron_hybrid_prefix.mcore.entrypoints.build import build_upstream_engine
from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config
from tests.gpu.forced import Forced, log_probs_of
from tests.gpu.measure import started
from tests.gpu.models import Source
from tests.harness.engine_helpers import greedy, kv_budget, run_to_end, state_bytes
from tests.harness.quadratic_model import QuadraticHybridModel

SIDES = ("megatron", "ours")
KINDS = ("bfloat16", "float32 states", "float32")
PREFILLS = ("whole", "chunked")
WIDEST = 16384  # tokens of a step in which nothing is chunked
PROMPT_TOKENS, FORCED_TOKENS = (20, 501), 32
STEPS = {"max_tokens": 768, "max_requests": 64, "block_tokens": 256}  # of chunked prefill


def play(model, side, kind, prefill, prompts, forced, *, max_tokens, max_requests, block_tokens):
    """Runs one engine over all prompts, with room for all requests that may run. Returns its `Forced`."""
    from megatron_hybrid_prefix.mcore import restore_mixers  # needs a platform that runs

    restore_mixers(model)
    states = "float32" if kind == "float32 states" else None
    longest = max(map(len, prompts)) + forced.shape[1] + 1
    fields = {
        "max_sequence_length": longest,
        "max_requests": max_requests,
        "block_size_tokens": block_tokens,
        "enable_chunked_prefill": prefill == "chunked",
        "max_tokens": max_tokens if prefill == "chunked" else WIDEST,
    }
    states_gb = (2 if states else 1) * state_bytes(model) / 2**30  # float32 is twice as large
    budget = kv_budget(
        model, max_requests * (longest // block_tokens + 2), block_tokens=block_tokens, max_requests=max_requests
    )
    fields |= budget | {"buffer_size_gb": budget["buffer_size_gb"] + max_requests * states_gb}
    if side == "ours":
        engine = build_engine(
            model, HybridPrefixConfig(mamba_gb=(max_requests + 0.5) * states_gb, state_dtype=states), **fields
        )
    else:
        if states:
            fields["mamba_inference_state_config"] = mamba_state_config(model, ssm_dtype=torch.float32)
        engine = build_upstream_engine(model, **fields)
    found = Forced(engine, forced)
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, greedy(forced.shape[1], return_log_probs=False))
    run_to_end(engine, {})
    assert bool((found.counts == forced.shape[1]).all()), "not every request ran to its end"
    return found


class Truth:
    """The true log-probs of the given tokens, and how far the best token is from the second."""

    def __init__(self, model, prompts, forced):
        self.log_probs, best = [], []
        for prompt, tokens in zip(prompts, forced, strict=True):
            rows = model.log_probs(prompt + tokens)[len(prompt) - 1 : -1]
            self.log_probs.append(log_probs_of(rows, tokens))
            best.append(rows.topk(2).values.cpu())
        self.log_probs = torch.stack(self.log_probs)
        self.margins = torch.stack(best).diff(dim=-1)[..., 0].neg()

    def errors(self, found):
        """|Difference| of a `Forced` to the truth, (prompts, tokens)."""
        return (found.log_probs - self.log_probs).abs()

    def summary(self, found):
        """Errors of one engine."""
        errors, chunks = self.errors(found), found.chunks.values()
        return {
            "mean_error": float(errors.mean()),
            "rms_error": float(errors.square().mean().sqrt()),
            "max_error": float(errors.max()),
            "chunked_prompts": sum(len(own) > 1 for own in chunks),
            "short_tails": sum(len(own) > 1 and own[-1] < 4 for own in chunks),
        }

    def disagreement(self, one, other):
        """Differences between two engines, or between two ways of prefill; margins are those where choices differ."""
        apart, differ = (one.log_probs - other.log_probs).abs(), one.choices != other.choices
        return {
            "equal_log_probs": float((apart == 0).double().mean()),
            "mean_difference": float(apart.mean()),
            "max_difference": float(apart.max()),
            "other_tokens": int(differ.sum()),
            "margins": sorted(self.margins[differ].tolist()),
        }

    def ratio(self, ours, theirs):
        """Mean error of ours over theirs, and its standard error over the prompts."""
        one, other = self.errors(ours).mean(1), self.errors(theirs).mean(1)
        value = float(one.mean() / other.mean())
        residual = one - value * other
        return {"ratio": value, "standard_error": float(residual.std() / math.sqrt(len(one)) / other.mean())}


def further_off(report):
    """Cases in which this package's engine is further from the truth than megatron's by more than four standard errors."""
    return [
        name for name, d in report["ours_against_megatron"].items() if d["ratio"] > 1 + 4 * d["standard_error"] + 1e-12
    ]


def measure(models, truth_model, prompts, forced, *, kinds=KINDS, **fields):
    """The report of all engines. ``models`` are by dtype, with the weights of ``truth_model``; one of ``kinds`` is "bfloat16"."""
    started_s, tokens = time.perf_counter(), torch.tensor(forced)
    truth = Truth(truth_model, prompts, forced)
    print(f"truth of {len(prompts)} prompts: {time.perf_counter() - started_s:.1f} s", flush=True)
    found = {}
    for kind, side, prefill in product(kinds, SIDES, PREFILLS):
        started_s = time.perf_counter()
        model = models["float32" if kind == "float32" else "bfloat16"]
        found[kind, side, prefill] = own = play(model, side, kind, prefill, prompts, tokens, **fields)
        gc.collect()
        error, seconds = truth.errors(own).mean(), time.perf_counter() - started_s
        print(f"{kind}, {side}, {prefill}: mean {error:.3e}, {seconds:.1f} s", flush=True)
    return {
        "engines": {", ".join(key): truth.summary(one) for key, one in found.items()},
        "whole_against_chunked": {
            f"{kind}, {side}": truth.disagreement(found[kind, side, "whole"], found[kind, side, "chunked"])
            for kind, side in product(kinds, SIDES)
        },
        "ours_against_megatron": {
            f"{kind}, {prefill}": truth.disagreement(*pair) | truth.ratio(*pair)
            for kind, prefill in product(kinds, PREFILLS)
            for pair in [[found[kind, side, prefill] for side in reversed(SIDES)]]
        },
        "chunked_over_whole": {
            f"{kind}, {side}": truth.ratio(found[kind, side, "chunked"], found[kind, side, "whole"])
            for kind, side in product(kinds, SIDES)
        },
    }


def build_models(source, seed=0):
    """The model in both dtypes with the same weights, and the reference model."""
    base, models = source.config, {dtype: source.build(dtype, seed) for dtype in ("bfloat16", "float32")}
    if source.name == "upstream-test":
        initialise_as_megatron(models["bfloat16"], base, seed)
    weights = {name: value for name, value in models["bfloat16"].state_dict().items() if value is not None}
    models["float32"].load_state_dict(weights, strict=False)
    for model in models.values():
        invalidate_layers(model)
    return models, QuadraticHybridModel(models["float32"], base)


@torch.no_grad()
def initialise_as_megatron(model, config, seed):
    """Initialises matrices as megatron does: std 0.02, and 0.02 / sqrt(2 layers) for a layer's output."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            ends = any(part in name for part in ("out_proj", "linear_proj", "linear_fc2"))
            std = 0.02 / math.sqrt(2 * config.num_layers) if ends else 0.02
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def main(args):
    source = Source(args.preset, args.hf)
    models, truth_model = build_models(source)
    lengths = torch.randint(*PROMPT_TOKENS, (args.prompts,), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [source.prompt_and_answer(count, FORCED_TOKENS, i, 10**6 + i) for i, count in enumerate(lengths)]
    prompts, forced = zip(*pairs, strict=True)
    with torch.inference_mode():
        report = measure(models, truth_model, prompts, forced, **STEPS)
    print(json.dumps(report, indent=1), flush=True)
    if args.json is not None:
        Path(args.json).write_text(json.dumps({"platform": args.platform.describe()} | report, indent=1))


if __name__ == "__main__":
    with started(__doc__, preset="upstream-test", hf=None, prompts=200, json=None) as arguments:
        main(arguments)
