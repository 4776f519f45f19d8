#!/usr/bin/env python3
"""How wrong log-probs are after prompts resumed from checkpoints in fewer bytes, by scheme: docs/states.md.

    scripts/state_error.py small OUT.json                       # random weights; few of the preset's layers and heads
    scripts/state_error.py small OUT.json --minutes 10          # trained before, as `examples/train_bytes.py` does
    scripts/state_error.py small-gdn OUT.json --no-attention    # nothing but the states remembers
    scripts/state_error.py - OUT.json --hf out/bytes            # what that example saved

A conversation resumes at the end of each turn. There the matrix states of all recurrent layers are rounded as a checkpoint is, and nothing else
is: KV and windows of later tokens are those that the model computes from them. The model is a loop over tokens in float64
(`NaiveHybridModel`), so all of the error is that of the scheme. Beside it: the same weights in bfloat16, as an engine computes them, at once
and in steps of 128 tokens; and the chosen scheme by an engine in float32 that resumes from its cache. Tokens are held-out text, or random with random weights. OUT.json gets an entry for the model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import train_bytes  # noqa: E402
from megatron_hybrid_prefix import HybridPrefixConfig, build_engine  # noqa: E402
from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # noqa: E402
from megatron_hybrid_prefix.ops.state_codes import decode, encode  # noqa: E402
from tests.gpu.measure import started  # noqa: E402
from tests.gpu.models import Source  # noqa: E402
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget  # noqa: E402
from tests.harness.naive_model import NaiveHybridModel  # noqa: E402

TURN, LAST = 32, 256  # tokens of a turn, and those that are compared: after the last resume
RESUMES, DEPTH, DEPTHS = (1, 10, 50), 1600, (64, 400)  # `DEPTH` with each number of resumes, the others with one
ABOVE, SINCE = (0.01, 0.1, 1.0), (1, 4, 16, 64, LAST)  # nats; tokens since the resume, up to
STEP = 128

# -- schemes: matrices (heads, rows, columns) as they come back --------------------------------------------------------


def rounded(x: torch.Tensor, dim: int = -1, most: float = 127.0) -> torch.Tensor:
    """To integers times a bfloat16 scale for each slice along ``dim``."""
    scale = (x.abs().amax(dim, keepdim=True) / most).bfloat16().to(x.dtype).clamp(min=1e-30)
    return (x / scale).round().clamp(-most, most) * scale


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    return rounded(x.unflatten(-1, (-1, size))).flatten(-2)


def both_axes(x: torch.Tensor) -> torch.Tensor:
    """A scale for each column, its largest value, and one for each row of what is left."""
    columns = x.abs().amax(-2, keepdim=True).bfloat16().to(x.dtype).clamp(min=1e-30)
    return rounded(x / columns) * columns


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows times a Hadamard matrix, which is its own inverse."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype)) / math.sqrt(2)
    return rounded(x @ matrix) @ matrix


def without_outlier(x: torch.Tensor) -> torch.Tensor:
    """The largest of each row is kept in bfloat16, with its place."""
    place = x.abs().argmax(-1, keepdim=True)
    largest = x.gather(-1, place).bfloat16().to(x.dtype)
    return rounded(x.scatter(-1, place, 0.0)).scatter(-1, place, largest)


def fp8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 448).bfloat16().to(x.dtype).clamp(min=1e-30)
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


Rounding = Callable[[torch.Tensor], torch.Tensor]
# And bits of a value, of so many rows and columns.
SCHEMES: dict[str, tuple[Rounding, Callable[[int, int], float]]] = {
    "bf16": (lambda x: x.bfloat16().to(x.dtype), lambda rows, columns: 16),
    "fp8, row": (fp8, lambda rows, columns: 8 + 16 / columns),
    "int8, row": (rounded, lambda rows, columns: 8 + 16 / columns),
    "int8, column": (lambda x: rounded(x, -2), lambda rows, columns: 8 + 16 / rows),
    "int8, row and column": (both_axes, lambda rows, columns: 8 + 16 / columns + 16 / rows),
    "int8, row and root": (
        lambda x: decode(*encode(x)).to(x.dtype),
        lambda rows, columns: 8 + 16 / columns + 16 / rows,
    ),
    "int8, 64 of a row": (lambda x: in_blocks(x, 64), lambda rows, columns: 8.25),
    "int8, 32 of a row": (lambda x: in_blocks(x, 32), lambda rows, columns: 8.5),
    "int8, rotated": (rotated, lambda rows, columns: 8 + 16 / columns),
    "int8, outlier": (without_outlier, lambda rows, columns: 8 + (16 + 24) / columns),
}


CHOSEN = "int8, row and root"


# -- log-probs ---------------------------------------------------------------------------------------------------------


class Resumed(NaiveHybridModel):
    """Every matrix state is rounded before the tokens at ``places``."""

    rounding: Rounding
    places: frozenset[int]
    bits: dict[str, float]

    def carried(self, state: torch.Tensor, at: int) -> torch.Tensor:
        if at not in self.places:
            return state
        self.bits = {name: bits(*state.shape[-2:]) for name, (_, bits) in SCHEMES.items()}
        return self.rounding(state)

    def found(self, tokens: list[int], rounding: Rounding, places: set[int]) -> torch.Tensor:
        """Log-probs of what comes after each of the last tokens: (LAST, vocabulary)."""
        self.rounding, self.places = rounding, frozenset(places)
        return self.logits(tokens)[-LAST:].log_softmax(-1)


@torch.inference_mode()
def by_engine(
    model: Any, tokens: list[int], *, step: int | None = None, rounding: Rounding | None = None
) -> torch.Tensor:
    """As `Resumed.found`, by an engine.

    Args:
        model: In the dtype to compute in.
        tokens: The tokens.
        step: Tokens that are computed at once; None: all.
        rounding: The prompt is resumed at `DEPTH` from the cache, whose states are rounded before.
    """
    rows: list[torch.Tensor] = []
    sizes = {"block_tokens": 64, "max_requests": 4}
    fields = {
        "max_sequence_length": len(tokens) + 64,
        "max_tokens": step or len(tokens) + 64,
        "enable_chunked_prefill": True,
    }
    prefix, blocks = None, len(tokens) // 64 + 8
    if rounding is None:
        fields |= kv_budget(model, blocks, **sizes)
    else:
        prefix = HybridPrefixConfig(cache_gb=cache_gb_for(model, blocks, states=40, **sizes))
    engine = build_engine(model, prefix, block_size_tokens=64, max_requests=4, **fields)
    hook = model.decoder.register_forward_hook(lambda module, given, result: rows.append(result[:, 0]))
    for number, prompt in enumerate([tokens] if rounding is None else [tokens[: DEPTH + 1], tokens]):
        rows.clear()
        engine.add_request(number, prompt, greedy(1, return_log_probs=False))
        while engine.has_unfinished_requests():
            engine.step_modern()
        for node in [] if prefix is None else engine.context.prefix_cache.nodes():
            state = engine.context.shared_memory.state(node.slot) if node.slot >= 0 else {}
            for name in state.keys() & {"ssm", "gdn_state"}:
                state[name].copy_(rounding(state[name]))
    hook.remove()
    assert rounding is None or engine.context.prefix_stats().reused_tokens == DEPTH
    hidden = torch.cat(rows)[: len(tokens) - DEPTH * (rounding is not None)][-LAST:]
    return model.output_layer(hidden[:, None], runtime_gather_output=True)[0][:, 0].double().log_softmax(-1)


# -- what is said of them ----------------------------------------------------------------------------------------------


class Errors:
    """Of some log-probs beside right ones."""

    def __init__(self) -> None:
        self.off, self.lost, self.same = [], [], []

    def add(self, found: torch.Tensor, right: torch.Tensor, given: torch.Tensor) -> None:
        own, wanted = (each[:-1].gather(1, given[:, None])[:, 0] for each in (found, right))
        self.off.append((own - wanted).abs())
        self.lost.append(-own)
        self.same.append((found.argmax(-1) == right.argmax(-1)).double())

    def summary(self) -> dict[str, Any]:
        off, lost, same = (torch.stack(each) for each in (self.off, self.lost, self.same))
        return {
            "mean": float(off.mean()),
            "p99": float(off.flatten().quantile(0.99)),
            "largest": float(off.max()),
            "above": [float((off > nats).double().mean()) for nats in ABOVE],
            "since": [float(off[:, low:high].mean()) for low, high in pairwise([0, *SINCE])],
            "perplexity": float(lost.mean().exp()),
            "greedy": float(same.mean()),
        }


def table(name: str, found: dict[str, Any]) -> str:
    """A line for each scheme: after one resume, then by resumes, by depth, by tokens since the resume."""
    errors, exact = found["errors"], found["errors"]["float64"]["perplexity"]
    heads = ["bits", "mean", "99 %", "largest", *(f">{nats}" for nats in ABOVE)]
    heads += [f"{n} turns" for n in RESUMES[1:]] + [f"at {depth}" for depth in DEPTHS] + ["greedy", "perplexity"]
    heads += [f"<={since}" for since in SINCE]
    lines = [f"{name}: {found['rows']} rows, perplexity {exact:.4f}; errors in 1e-3 nats"]
    lines.append(f"{'':34}" + "".join(f"{head:>11}" for head in heads))
    for scheme in [name for name in errors if ";" not in name]:
        own = errors[scheme]
        others = [errors.get(f"{scheme}; {case}", own)["mean"] for case in (*RESUMES[1:], *(f"at {d}" for d in DEPTHS))]
        cells = [
            f"{found['bits'].get(scheme, 16):.2f}",
            *(f"{1e3 * own[key]:.3f}" for key in ("mean", "p99", "largest")),
        ]
        cells += [f"{share:.3%}" for share in own["above"]] + [f"{1e3 * each:.3f}" for each in others]
        cells += [f"{own['greedy']:.2%}", f"{own['perplexity'] / exact - 1:+.1e}"]
        lines.append(
            f"{scheme:34}" + "".join(f"{cell:>11}" for cell in [*cells, *(f"{1e3 * x:.3f}" for x in own["since"])])
        )
    return "\n".join(lines)


# -- models ------------------------------------------------------------------------------------------------------------


def few_layers(config: Any, *, trained: bool) -> Any:
    """Fewer and narrower layers; heads are as they were, so what shares a scale is, too."""
    kind, hidden = config.layer_pattern[0], 128 if trained else 256
    fields = {"mamba_num_heads": 4, "mamba_num_groups": 1} if kind == "M" else {}
    fields |= {"gdn_num_key_heads": 2, "gdn_num_value_heads": 4} if kind == "G" else {}
    fields |= {"hidden_size": hidden, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 3 * hidden}
    fields |= {"vocab_size": 264 if trained else 4096, "chunk_size": 64, "dtype": "float32", "long_memory": not trained}
    return replace(config, layer_pattern=f"{kind}-{kind}*-" * 2, **fields)


def silence_attention(model: Any) -> None:
    """Nothing but the states remembers, in training, too. (The engine needs a layer of attention.)"""
    for name, weight in model.named_parameters():
        if name.endswith("self_attention.linear_proj.weight"):
            weight.data.zero_()
            weight.requires_grad_().register_hook(torch.zeros_like)


def train(model: Any, tokens: torch.Tensor, held_out: torch.Tensor, minutes: float) -> None:
    """As the example does."""
    sizes = {"batch": 2, "tokens": DEPTH + LAST, "rate": 3e-3, "seed": 0, "compile": False, "say_s": 20.0}
    train_bytes.train(model, tokens, held_out, argparse.Namespace(minutes=minutes, steps=None, **sizes))
    model.requires_grad_(False).eval()
    with torch.no_grad():
        for weight in model.parameters():  # so that they are the same in both dtypes
            weight.copy_(weight.bfloat16())


def main(args: Any) -> None:
    source, count, minutes = Source(args.preset, args.hf), int(args.rows), float(args.minutes)
    if not args.hf:
        source.config = few_layers(source.config, trained=minutes > 0)
    model = source.build("float32", transformer_impl="local")
    if args.no_attention:
        silence_attention(model)
    if args.hf or minutes:
        texts = train_bytes.tokens_of_texts()
        if minutes:
            train(model, *texts, minutes)
        text = texts[1].tolist()
        apart = (len(text) - DEPTH - LAST) // count
        rows = [text[apart * number :][: DEPTH + LAST] for number in range(count)]
    else:
        rows = [source.tokens(DEPTH + LAST, seed) for seed in range(count)]
    exact, errors = Resumed(model, model.hybrid_config), {}
    in_bf16 = source.build("bfloat16", transformer_impl="local")
    in_bf16.load_state_dict(model.state_dict(), strict=False)
    invalidate_layers(in_bf16)
    cases = {f"; {n}": (DEPTH, {DEPTH - TURN * turn for turn in range(n)}) for n in RESUMES[1:]} | {
        "": (DEPTH, {DEPTH})
    }
    cases |= {f"; at {depth}": (depth, {depth}) for depth in DEPTHS}  # the same last tokens: those before are dropped
    name = f"{source.name}, {'trained' if args.hf or minutes else 'random'}{', no attention' * args.no_attention}"
    out = Path(args.out)
    for number, row in enumerate(rows):
        given, right = torch.tensor(row[-LAST + 1 :]), {}
        for depth in (DEPTH, *DEPTHS):
            right[depth] = exact.found(row[DEPTH - depth :], torch.clone, set())
        errors.setdefault("float64", Errors()).add(right[DEPTH], right[DEPTH], given)
        at_once = by_engine(in_bf16, row)
        errors.setdefault("bf16 model", Errors()).add(at_once, right[DEPTH], given)
        errors.setdefault("bf16 model, two batches", Errors()).add(by_engine(in_bf16, row, step=STEP), at_once, given)
        kept = by_engine(model, row, rounding=SCHEMES[CHOSEN][0])
        errors.setdefault(f"{CHOSEN}, by an engine", Errors()).add(kept, right[DEPTH], given)
        for scheme, (rounding, _) in SCHEMES.items():
            for case, (depth, places) in cases.items():
                found = exact.found(row[DEPTH - depth :], rounding, places)
                errors.setdefault(scheme + case, Errors()).add(found, right[depth], given)
        summary = {scheme: each.summary() for scheme, each in errors.items()}
        entry = {"pattern": source.config.layer_pattern, "rows": number + 1, "bits": exact.bits, "errors": summary}
        entries = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps(entries | {name: entry}, indent=1) + "\n")
        print(f"row {number + 1} of {count}", flush=True)
    print(table(name, entry))


if __name__ == "__main__":
    options = {"hf": None, "minutes": 0.0, "no_attention": False, "rows": 4}
    with started(__doc__, "preset", "out", **options) as arguments:
        main(arguments)
