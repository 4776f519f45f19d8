"""What the demo shows: is each answer the one without a cache, how much was reused, when the first token came.

Nothing is known beforehand: every verdict is computed from the answers. No torch.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.plots import bar_inches, draw_bars, page, styles_of
from megatron_hybrid_prefix.console.terminal import EngineRun, Request, compare

# Log-probs are computed in float32: parts of a prompt that are added up in another order differ by about 1e-6, an answer
# from a wrong state by more than 1e-3.
SAME_LOG_PROB = 1e-4
NAMES = {"off": "off", "upstream": "megatron-core", "ours": "this cache"}
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One situation.

    Attributes:
        key: Its name in the JSON.
        title: What is sent.
        short: The same in a few words, for the plot; empty: the plot leaves the part out.
        rounds: Engine -> for each round a `RequestResult` of every request.
    """

    key: str
    title: str
    short: str
    rounds: Mapping[str, Sequence[Sequence[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one engine did in one part.

    Attributes:
        exact: Whether, in all rounds, every answer has the tokens of caching off, and log-probs within `SAME_LOG_PROB` of its own.
        difference: Where not, how it differs, in words.
        reused_tokens: Prompt tokens that were not computed, of all requests of a round; the least of all rounds.
        prompt_tokens: Of all requests of a round.
        first_token_ms: Of the request that waited longest; the median of the rounds.
        max_log_prob_difference: Over the tokens before the first that differs; None: there are none.
    """

    exact: bool
    difference: str
    reused_tokens: int
    prompt_tokens: int
    first_token_ms: float
    max_log_prob_difference: float | None


def outcomes(part: Part) -> dict[str, Outcome]:
    """What each engine did; the answers of the engine "off" are the truth."""
    truth = _as_run("off", part.rounds["off"])
    found = {}
    for name, rounds in part.rounds.items():
        entries = compare(truth, _as_run(name, rounds))
        gaps = [gap for entry in entries if (gap := entry["max_log_prob_difference"]) is not None]
        no_number = any(math.isnan(value) for one in rounds for result in one for value in result.log_probs)
        difference = "a log-prob is no number" if no_number else _difference(entries, max(gaps, default=0.0))
        waits_s = [max(result.time_to_first_token_s for result in results) for results in rounds]
        found[name] = Outcome(
            exact=not difference,
            difference=difference,
            reused_tokens=min(sum(result.reused_tokens for result in results) for results in rounds),
            prompt_tokens=sum(result.prompt_tokens for result in rounds[0]),
            first_token_ms=1e3 * statistics.median(waits_s),
            max_log_prob_difference=max(gaps, default=None),
        )
    return found


def _as_run(name: str, rounds: Sequence[Sequence[Any]]) -> EngineRun:
    results = [result for one in rounds for result in one]
    requests = [Request(label=str(number), tokens=[], sampling={}) for number, _ in enumerate(results, 1)]
    return EngineRun(name=name, requests=requests, results=results, wall_s=0.0)


def _difference(entries: Sequence[Mapping[str, Any]], gap: float) -> str:
    """How answers differ; empty where they do not."""
    other = [entry["first_difference"] for entry in entries if not entry["tokens_equal"]]
    if other:
        return f"other tokens than without a cache, from token {min(other) + 1} on"
    if gap > SAME_LOG_PROB:
        return f"a log-prob is off by {gap:.2g}"
    return ""


def verdict(found: Mapping[str, Outcome]) -> str:
    """One sentence about a part: who is wrong, or who reuses less."""
    upstream, ours = found["upstream"], found["ours"]
    if not ours.exact:
        return f"THIS CACHE IS WRONG: {ours.difference}. Please report it."
    if not upstream.exact:
        return f"megatron-core's cache answers WRONGLY: {upstream.difference}. This cache answers as without one."
    times = f"first token after {_ms(ours)} against {_ms(upstream)}"
    if ours.reused_tokens > upstream.reused_tokens:
        more = f"{ours.reused_tokens:,} prompt tokens, megatron-core's {upstream.reused_tokens:,}"
        return f"Both exact. This cache reuses {more}: {times}."
    if ours.reused_tokens < upstream.reused_tokens:
        more = f"{upstream.reused_tokens:,} prompt tokens, this one {ours.reused_tokens:,}"
        return f"Both exact. megatron-core's cache reuses {more}: {times}."
    if not ours.reused_tokens:
        return "Both exact. There is nothing to reuse yet."
    return f"Both exact, and both reuse {ours.reused_tokens:,} prompt tokens."


def summary(parts: Sequence[Mapping[str, Outcome]]) -> str:
    """The whole demo in one or two sentences."""
    count = len(parts)
    exact = {name: sum(found[name].exact for found in parts) for name in ("upstream", "ours")}
    both = [found for found in parts if found["upstream"].exact and found["ours"].exact]
    more = sum(found["ours"].reused_tokens > found["upstream"].reused_tokens for found in both)
    less = sum(found["ours"].reused_tokens < found["upstream"].reused_tokens for found in both)
    text = f"Exact in {exact['ours']} of {count} parts: this cache. In {exact['upstream']} of {count}: megatron-core's."
    text += f" Where both are exact, this cache reuses more in {more} of {len(both)}"
    return text + (f", less in {less}." if less else ".")


def print_demo(console: Console, parts: Sequence[Part], found: Sequence[Mapping[str, Outcome]]) -> None:
    """A table with three rows a part, a verdict a part, and what comes of all. ``found``: the `outcomes` of each part."""
    table = Table(title_justify="left", width=min(WIDTH, console.width))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("what is sent", ratio=1)
    table.add_column("cache", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    table.add_column("reused tokens", justify="right", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    for number, (part, by_engine) in enumerate(zip(parts, found, strict=True), 1):
        cells: list[list[str]] = [[], [], [], []]
        for name, outcome in by_engine.items():
            answer = "reference" if name == "off" else "exact" if outcome.exact else "[bold red]WRONG[/]"
            reused = "-" if name == "off" else f"{outcome.reused_tokens:,} of {outcome.prompt_tokens:,}"
            row = (NAMES[name], answer, reused, _ms(outcome))
            for cell, text in zip(cells, row, strict=True):
                cell.append(f"[bold]{text}[/]" if name == "ours" else text)
        table.add_row(str(number), part.title, *("\n".join(cell) for cell in cells), end_section=True)
    console.print(table)
    _print_wrapped(console, "", f"exact: the tokens of caching off, and log-probs within {SAME_LOG_PROB} of its own.")
    console.print()
    for number, by_engine in enumerate(found, 1):
        _print_wrapped(console, f"{number}. ", verdict(by_engine))
    console.print()
    _print_wrapped(console, "", summary(found))


def _print_wrapped(console: Console, head: str, text: str) -> None:
    width = min(WIDTH, console.width)
    lines = textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head))
    console.print(lines, markup=False, soft_wrap=True)


def as_json(parts: Sequence[Part], found: Sequence[Mapping[str, Outcome]]) -> list[dict[str, Any]]:
    """Outcomes and verdicts of all parts; arguments as of `print_demo`."""
    return [
        {
            "part": part.key,
            "title": part.title,
            "short": part.short,
            "verdict": verdict(by_engine),
            "engines": {
                name: {
                    "exact": outcome.exact,
                    "difference": outcome.difference or None,
                    "max_log_prob_difference": outcome.max_log_prob_difference,
                    "reused_tokens": outcome.reused_tokens,
                    "prompt_tokens": outcome.prompt_tokens,
                    "first_token_ms": outcome.first_token_ms,
                }
                for name, outcome in by_engine.items()
            },
        }
        for part, by_engine in zip(parts, found, strict=True)
    ]


def save_demo_plot(path: Path, parts: Sequence[Mapping[str, Any]], subtitle: str) -> None:
    """First tokens side by side; a wrong answer says so on its bar.

    Args:
        path: PNG or SVG, by its ending.
        parts: Of `as_json`; those without a short title are left out.
        subtitle: Model, machine and workload.
    """
    drawn = [part for part in parts if part["short"]]
    engines = list(drawn[0]["engines"])
    values = {name: [part["engines"][name]["first_token_ms"] for part in drawn] for name in engines}
    notes = {
        (name, number): "WRONG ANSWER"
        for number, part in enumerate(drawn)
        for name in engines
        if not part["engines"][name]["exact"]
    }
    heights = [bar_inches(len(drawn), len(engines))]
    title = "Time to first token: shorter is better"
    with page(path, title=title, subtitle=subtitle, heights=heights, legend=styles_of(engines)) as axes:
        draw_bars(
            axes[0],
            [part["short"] for part in drawn],
            values,
            figure_of=lambda value: f"{value:,.0f} ms",
            notes=notes,
            label_characters=24,
        )


def _ms(outcome: Outcome) -> str:
    return f"{outcome.first_token_ms:,.0f} ms"
