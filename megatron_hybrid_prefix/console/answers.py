"""What requests are and what engines answered: compared, as tables; and the least tokens that any cache computes."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.terminal import excerpt, printable, table_of
from megatron_hybrid_prefix.text.tokenizer import common_tokens

# Most requests that have rows of their own, and most whose answers are printed in full.
_SHOW_REQUESTS = 24
_SHOW_WHOLE_TEXTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. ``sampling`` has fields of megatron's ``SamplingParams``."""

    label: str
    tokens: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """Results of one engine, in the order of the requests; total seconds; statistics of this package's cache."""

    name: str
    requests: list[Request]
    results: list[Any]
    wall_s: float
    prefix_stats: dict[str, Any] | None = None


# --- Figures ---------------------------------------------------------------------------------------------------------


def compare_results(first: Sequence[Any], other: Sequence[Any]) -> list[dict[str, Any]]:
    """Compares answers to the same requests, one entry each. Log-probs are compared up to the first different token."""
    entries = []
    for a, b in zip(first, other, strict=True):
        equal = a.generated == b.generated
        same = common_tokens(a.generated, b.generated)
        gaps = [abs(x - y) for x, y in zip(a.log_probs[:same], b.log_probs[:same], strict=False)]
        entries.append(
            {
                "tokens_equal": equal,
                "first_difference": None if equal else same,
                "compared_log_probs": len(gaps),
                "max_log_prob_difference": max(gaps, default=None),
            }
        )
    return entries


def least_tokens(prompts: Sequence[list[int]]) -> list[int]:
    """For each prompt, the tokens after its longest common prefix with any earlier prompt.

    Args:
        prompts: Token ids, in the order of sending.
    """
    # In sorted order the longest common prefix is with a neighbour.
    earlier: list[list[int]] = []
    least: list[int] = []
    for tokens in prompts:
        at = bisect_left(earlier, tokens)
        near = earlier[max(0, at - 1) : at + 1]
        least.append(len(tokens) - max((common_tokens(tokens, other) for other in near), default=0))
        earlier.insert(at, tokens)
    return least


def totals(run: EngineRun) -> dict[str, Any]:
    """Sums over an engine's requests, and the computed tokens as a multiple of the least possible."""
    keys = ("prompt_tokens", "computed_tokens", "reused_tokens", "recomputed_tokens")
    sums: dict[str, Any] = {key: sum(getattr(result, key) for result in run.results) for key in keys}
    generated = sum(len(result.generated) for result in run.results)
    least = sum(least_tokens([request.tokens for request in run.requests]))
    firsts_s = [s for result in run.results if (s := result.time_to_first_token_s) is not None]
    return sums | {
        "requests": len(run.results),
        "failed_requests": sum(result.status == "failed" for result in run.results),
        "least_computed_tokens": least,
        "computed_over_least": sums["computed_tokens"] / least,
        "median_first_token_s": statistics.median(firsts_s) if firsts_s else None,
        "generated_tokens": generated,
        "wall_s": run.wall_s,
        "generated_tokens_per_second": generated / run.wall_s,
    }


# --- Report ----------------------------------------------------------------------------------------------------------


def print_report(console: Console, runs: list[EngineRun], comparisons: list[dict[str, Any]]) -> None:
    """Prints the totals of each engine, and how its answers differ; of few requests also each, of very few the answers."""
    requests = runs[0].requests
    if len(requests) <= _SHOW_REQUESTS:
        for run in runs:
            console.print(_requests_table(run))
    for run in runs:
        failed = [pair for pair in zip(run.requests, run.results, strict=True) if pair[1].error]
        for request, result in failed[:_SHOW_WHOLE_TEXTS]:
            console.print(f"{run.name}: {request.label} failed: {printable(result.error)}", markup=False)
    for request, result in zip(requests, runs[0].results, strict=True):
        if len(requests) <= _SHOW_WHOLE_TEXTS and not result.error:
            console.print(f"--- {request.label}\n{printable(result.text)}", markup=False)
    console.print(_totals_table(runs))
    for comparison in comparisons:
        entries = comparison["requests"]
        equal = sum(entry["tokens_equal"] for entry in entries)
        gaps = [gap for entry in entries if (gap := entry["max_log_prob_difference"]) is not None]
        text = f"{comparison['engine']} against {comparison['against']}: {equal} of {len(entries)} answers equal"
        console.print(text + (f", log-probs within {max(gaps):.2e}" if gaps else ""), markup=False)
        for entry in [entry for entry in entries if not entry["tokens_equal"]][:_SHOW_REQUESTS]:
            console.print(f"{entry['label']}: DIFFERENT from token {entry['first_difference'] + 1} on", markup=False)


def _requests_table(run: EngineRun) -> Table:
    heads = ("request", "prompt", "computed", "reused", "first token ms", "tokens/s", "answer")
    table = table_of(f"engine: {run.name}", *heads)
    for request, result in zip(run.requests, run.results, strict=True):
        first_s, rate = result.time_to_first_token_s, result.tokens_per_second
        table.add_row(
            request.label.replace("[", "\\["),
            str(result.prompt_tokens),
            str(result.computed_tokens),
            str(result.reused_tokens),
            "-" if first_s is None else f"{first_s * 1000:.1f}",
            "-" if rate is None else f"{rate:.0f}",
            excerpt(result.text, 28).replace("[", "\\[") if result.status == "completed" else result.status,
        )
    return table


def _totals_table(runs: Sequence[EngineRun]) -> Table:
    heads = ("engine", "prompt tokens", "computed", "reused", "least possible", "computed / least")
    title = f"{len(runs[0].requests)} requests; first tokens are medians"
    table = table_of(title, *heads, "first token ms", "tokens/s", "wall s", "failed")
    for run in runs:
        total = totals(run)
        first_s = total["median_first_token_s"]
        table.add_row(
            run.name,
            *(f"{total[f'{name}_tokens']:,}" for name in ("prompt", "computed", "reused", "least_computed")),
            f"{total['computed_over_least']:.3f}",
            "-" if first_s is None else f"{first_s * 1000:.1f}",
            f"{total['generated_tokens_per_second']:.0f}",
            f"{run.wall_s:.2f}",
            str(total["failed_requests"]),
        )
    return table
