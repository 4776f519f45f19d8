"""Error of whole and chunked prefill in bfloat16, of megatron's engine and this package's, teacher-forced.

    python tests/gpu/chunked_error.py --prompts 200 --json /tmp/chunked.json

Random prompts are sent at once, a step of chunked prefill holds ``--max-tokens``, and 32 given tokens are decoded after
each. The truth is the same weights in float64, computed whole, without chunks and without a state
(`tests/harness/quadratic_model.py`). The engines: megatron's, cache off; this package's, its cache on (random prompts share
nothing); both with float32 states, and both with all in float32. ``--preset upstream-test`` is the hybrid model of
megatron-core's ``TestChunkedPrefillCudaGraphs``, initialised as megatron does: its logits are close together, and in
bfloat16 the best two are often the same number. ``--hf DIR``: the weights of a Hugging Face folder; prompts and given tokens
are text.
"""

from __future__ import annotations

import argparse
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
from megatron_hybrid_prefix.models import HybridModelConfig
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.models import Source
from tests.harness.engine_helpers import greedy, kv_budget, run_to_end, state_bytes
from tests.harness.quadratic_model import QuadraticHybridModel

UPSTREAM_TEST = HybridModelConfig(
    layer_pattern="M*-",
    hidden_size=256,
    vocab_size=10000,
    max_sequence_length=2048,
    mamba_num_heads=16,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=16,
    ffn_hidden_size=1024,
)
SIDES = ("megatron", "ours")
KINDS = ("bfloat16", "float32 states", "float32")
PREFILLS = ("whole", "chunked")
WIDEST = 16384  # tokens of a step in which nothing is chunked


class Forced:
    """What an engine says where each request is made to answer with given tokens.

    Args:
        engine: The engine; its requests are numbered from 0.
        forced: (prompts, tokens) int64, on its device.
        truth: (prompts, tokens, vocabulary) float64, the true log-probs there.

    Attributes:
        log_probs: (prompts, tokens) float64, of the given tokens.
        errors: The same, less the truth's.
        spread: (prompts, tokens), mean |error| over the vocabulary.
        choices: (prompts, tokens) int64, what the engine sampled before it was made to take the given one.
        ties: (prompts, tokens), whether its two best logits are equal.
        chunks: Tokens of each chunk, by request.
    """

    def __init__(self, engine, forced, truth):
        self.forced, self.truth = forced, truth
        self.controller, self.context = engine.controller, engine.context
        self.log_probs, self.errors, self.spread = (torch.zeros(forced.shape, dtype=torch.float64) for _ in range(3))
        self.choices, self.ties = (
            torch.zeros(forced.shape, dtype=torch.int64),
            torch.zeros(forced.shape, dtype=torch.bool),
        )
        self.counts = torch.zeros(len(forced), dtype=torch.int64)
        self.chunks = {number: [] for number in range(len(forced))}
        self._sample, self._add = self.controller._dynamic_step_sample_logits, self.context.add_request
        self.controller._dynamic_step_sample_logits = self._sample_and_force
        self.context.add_request = self._note_chunk

    def _note_chunk(self, request, prefill_chunk_length=None):
        whole = request.remaining_prompt_length
        self.chunks[request.request_id].append(whole if prefill_chunk_length is None else prefill_chunk_length)
        return self._add(request, prefill_chunk_length)

    def _sample_and_force(self, *args, **kwargs):
        result = self._sample(*args, **kwargs)
        context, sampled = self.context, self.controller._sampled_tokens_cuda
        ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        # What follows a chunk that is not a prompt's last is not used.
        rows = torch.tensor([row for row, i in enumerate(ids) if i != context.chunked_prefill_request_id])
        if not len(rows):
            return result
        numbers = torch.tensor(ids)[rows]
        at = self.counts[numbers]
        self.counts[numbers] += 1
        here, there = (numbers, at), (numbers.to(self.forced.device), at.to(self.forced.device))
        rows = rows.to(self.forced.device)
        log_probs = torch.log_softmax(self.controller._all_logits_cuda[0, rows].double(), dim=-1)
        tokens, truth = self.forced[there], self.truth[there]
        best = log_probs.topk(2).values
        self.log_probs[here] = log_probs.gather(1, tokens[:, None])[:, 0].cpu()
        self.errors[here] = (log_probs - truth).gather(1, tokens[:, None])[:, 0].cpu()
        self.spread[here] = (log_probs - truth).abs().mean(-1).cpu()
        self.choices[here] = sampled[rows].cpu()
        self.ties[here] = (best[:, 0] == best[:, 1]).cpu()
        sampled[rows] = tokens
        return result


def play(model, side, kind, prefill, prompts, forced, truth, *, max_tokens, max_requests, block_tokens):
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
    found = Forced(engine, forced, truth)
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, greedy(forced.shape[1], return_log_probs=False))
    run_to_end(engine, {})
    assert bool((found.counts == forced.shape[1]).all()), "not every request ran to its end"
    return found


def summary(found, truth_best, in_chunks):
    """Errors of one engine against the truth."""
    wrong = found.choices != truth_best.indices[..., 0]
    margins = truth_best.values[..., 0] - truth_best.values[..., 1]
    errors = found.errors.abs()
    return {
        "mean_error": float(errors.mean()),
        "rms_error": float(errors.square().mean().sqrt()),
        "max_error": float(errors.max()),
        "mean_error_of_chunked_prompts": float(errors[in_chunks].mean()),
        "mean_error_over_vocabulary": float(found.spread.mean()),
        "other_tokens": int(wrong.sum()),
        "largest_margin_of_other_tokens": float(margins[wrong].max()) if wrong.any() else 0.0,
        "ties": int(found.ties.sum()),
        "chunked_prompts": sum(len(chunks) > 1 for chunks in found.chunks.values()),
        "short_tails": sum(len(chunks) > 1 and chunks[-1] < 4 for chunks in found.chunks.values()),
    }


def disagreement(one, other, truth_best):
    """Differences between two engines, or between two ways of prefill."""
    margins = truth_best.values[..., 0] - truth_best.values[..., 1]
    differ = one.choices != other.choices
    apart = (one.log_probs - other.log_probs).abs()
    return {
        "equal_log_probs": float((apart == 0).double().mean()),
        "mean_difference": float(apart.mean()),
        "max_difference": float(apart.max()),
        "other_tokens": int(differ.sum()),
        "of_them_ties": int((differ & (one.ties | other.ties)).sum()),
        "margins": sorted(margins[differ].tolist()),
    }


def ratio(ours, theirs):
    """Mean |error| of ours over theirs, and its standard error over the prompts."""
    one, other = ours.errors.abs().mean(1), theirs.errors.abs().mean(1)
    value = float(one.mean() / other.mean())
    residual = one - value * other
    return {"ratio": value, "standard_error": float(residual.std() / math.sqrt(len(one)) / other.mean())}


def further_off(report):
    """Cases in which this package's engine is further from the truth than megatron's by more than four standard errors."""
    return [
        name for name, d in report["ours_against_megatron"].items() if d["ratio"] > 1 + 4 * d["standard_error"] + 1e-12
    ]


def measure(models, truth_model, prompts, forced, *, kinds=KINDS, say=print, **fields):
    """All engines; returns the report.

    Args:
        models: By dtype, "bfloat16" and "float32", with the same weights.
        truth_model: A `NaiveHybridModel` of them.
        prompts: Token ids of each.
        forced: Of each, the tokens that follow it.
        kinds: Of `KINDS`; "bfloat16" has to be one.
        say: Told of each engine as it ends.
        **fields: See `play`.
    """
    device = next(models["float32"].parameters()).device
    started_s, count = time.perf_counter(), len(forced[0])
    rows = [truth_model.log_probs(p + f)[len(p) - 1 : -1] for p, f in zip(prompts, forced, strict=True)]
    truth, tokens = torch.stack(rows).to(device), torch.tensor(forced, device=device)
    best = truth.topk(2)
    truth_best = torch.return_types.topk((best.values.cpu(), best.indices.cpu()))
    margins = truth_best.values[..., 0] - truth_best.values[..., 1]
    say(f"truth of {len(prompts)} prompts: {time.perf_counter() - started_s:.1f} s")
    found = {}
    for kind, side, prefill in product(kinds, SIDES, PREFILLS):
        started_s = time.perf_counter()
        model = models["float32" if kind == "float32" else "bfloat16"]
        found[kind, side, prefill] = play(model, side, kind, prefill, prompts, tokens, truth, **fields)
        gc.collect()
        errors = found[kind, side, prefill].errors.abs()
        say(f"{kind}, {side}, {prefill}: mean {errors.mean():.3e}, {time.perf_counter() - started_s:.1f} s")
    split = found["bfloat16", "ours", "chunked"].chunks
    in_chunks = torch.tensor([len(split[number]) > 1 for number in range(len(prompts))])
    return {
        "prompts": len(prompts),
        "autotuned": autotuned() if device.type == "cuda" else {},
        "positions": len(prompts) * count,
        "truth_margin_quantiles": torch.quantile(margins.flatten(), torch.tensor([0.01, 0.1, 0.5]).double()).tolist(),
        "engines": {", ".join(key): summary(one, truth_best, in_chunks) for key, one in found.items()},
        "whole_against_chunked": {
            f"{kind}, {side}": disagreement(found[kind, side, "whole"], found[kind, side, "chunked"], truth_best)
            for kind, side in product(kinds, SIDES)
        },
        "ours_against_megatron": {
            f"{kind}, {prefill}": disagreement(
                found[kind, "ours", prefill], found[kind, "megatron", prefill], truth_best
            )
            | ratio(found[kind, "ours", prefill], found[kind, "megatron", prefill])
            for kind, prefill in product(kinds, PREFILLS)
        },
        "chunked_over_whole": {
            f"{kind}, {side}": ratio(found[kind, side, "chunked"], found[kind, side, "whole"])
            for kind, side in product(kinds, SIDES)
        },
    }


def autotuned():
    """Block sizes that Triton's autotuner chose for megatron's scan in this process. They decide the order of sums."""
    from megatron_hybrid_prefix.upstream.ssd_kernels import AUTOTUNED

    return {name: sorted({str(config) for config in kernel.cache.values()}) for name, kernel in AUTOTUNED.items()}


def table(report):
    """The report as text."""
    low, tenth, middle = report["truth_margin_quantiles"]
    yield f"{report['positions']} positions; truth's margin, best to second: 1% {low:.1e}, 10% {tenth:.1e}, median {middle:.1e}"
    for part in ("engines", "whole_against_chunked", "ours_against_megatron", "chunked_over_whole"):
        yield part.replace("_", " ") + (", against the truth" if part == "engines" else "")
        for name, figures in report[part].items():
            shown = {
                key: value if not isinstance(value, list) else max(value, default=0.0) for key, value in figures.items()
            }
            yield f"  {name:32} " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
    for name, configs in report["autotuned"].items():
        yield f"{name}: {'; '.join(configs)}"


def open_source(preset, hf=None):
    """The `Source` of a preset, of ``upstream-test``, or of a folder."""
    if hf is not None or preset != "upstream-test":
        return Source(preset, hf)
    source = Source("tiny")
    source.name, source.config = preset, UPSTREAM_TEST
    return source


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="upstream-test", help="upstream-test (default), tiny, small, ...")
    parser.add_argument("--hf", metavar="DIR", help="a Hugging Face folder instead of --preset")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=20, help="tokens of a prompt at least")
    parser.add_argument("--longest", type=int, default=500, help="and at most")
    parser.add_argument("--forced", type=int, default=32, help="tokens decoded after each")
    parser.add_argument("--max-tokens", type=int, default=768, help="of a step of chunked prefill")
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of parameters and states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    platform = ensure_platform(device=arguments.device)
    print(platform.describe(), flush=True)
    source = open_source(arguments.preset, arguments.hf)
    models, truth_model = build_models(source)
    generator = torch.Generator().manual_seed(arguments.seed)
    lengths = torch.randint(arguments.shortest, arguments.longest + 1, (arguments.prompts,), generator=generator)
    first = 1000 * arguments.seed
    pairs = [
        source.prompt_and_answer(n, arguments.forced, first + i, 10**6 + first + i)
        for i, n in enumerate(lengths.tolist())
    ]
    prompts, forced = [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
    with torch.inference_mode():
        report = measure(
            models,
            truth_model,
            prompts,
            forced,
            kinds=arguments.kinds,
            say=lambda line: print(line, flush=True),
            max_tokens=arguments.max_tokens,
            max_requests=arguments.max_requests,
            block_tokens=arguments.block_tokens,
        )
    report = {"platform": platform.describe(), "arguments": {k: str(v) for k, v in vars(arguments).items()}} | report
    print(*table(report), sep="\n", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    shut_down()


if __name__ == "__main__":
    main()
