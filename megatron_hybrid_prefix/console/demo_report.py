"""What the demo shows: is each answer the one without a cache, how much was reused, when the first token came.

Nothing is known beforehand: every verdict is computed from the answers. No torch.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.answers import compare_results
from megatron_hybrid_prefix.console.plots import bar_inches, draw_bars, page

# Log-probs are computed in float32: parts of a prompt that are added up in another order differ by about 1e-6, an answer
# from a wrong state by more than 1e-3.
SAME_LOG_PROB = 1e-4
NAMES = {"off": "off", "upstream": "megatron-core", "ours": "this cache"}
WIDTH = 100
LARGE_SPREAD = 0.3  # of the median: from there on the fastest and the slowest round are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one engine did in one part.

    Attributes:
        exact: Whether, in all rounds, every answer has the tokens of caching off, and log-probs within `SAME_LOG_PROB` of its own.
        difference: Where not, how it differs, in words.
        max_log_prob_difference: Over the tokens before the first that differs; None: there are none.
        reused_tokens: Prompt tokens that were not computed, of all requests of a round; the least of all rounds.
        prompt_tokens: Of all requests of a round.
        first_token_ms: Of the request that waited longest; the median of the rounds, since other work may slow one of them.
        first_tokens_ms: The same of each round.
    """

    exact: bool
    difference: str
    max_log_prob_difference: float | None
    reused_tokens: int
    prompt_tokens: int
    first_token_ms: float
    first_tokens_ms: list[float]

    def time(self, *, spread: bool = False) -> str:
        """The first token, in words; with ``spread`` also the fastest and the slowest round, if they differ much."""
        least, most = min(self.first_tokens_ms), max(self.first_tokens_ms)
        is_large = spread and most - least > LARGE_SPREAD * self.first_token_ms
        return f"{self.first_token_ms:,.0f} ms" + (f" ({least:,.0f} to {most:,.0f})" if is_large else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the engines did in one situation.

    Attributes:
        name: What is sent, in a few words.
        title: The same in full.
        engines: Engine -> what it did.
    """

    name: str
    title: str
    engines: Mapping[str, Outcome]

    @property
    def verdict(self) -> str:
        """One sentence: who is wrong, or who reuses less."""
        upstream, ours = self.engines["upstream"], self.engines["ours"]
        if not ours.exact:
            return f"THIS CACHE IS WRONG: {ours.difference}. Please report it."
        if not upstream.exact:
            return f"megatron-core's cache answers WRONGLY: {upstream.difference}. This cache answers as without one."
        if not ours.reused_tokens + upstream.reused_tokens:
            return "Both exact. Nothing is cached yet."
        if ours.reused_tokens == upstream.reused_tokens:
            return f"Both exact, and both reuse {ours.reused_tokens:,} prompt tokens."
        more = f"This cache reuses {ours.reused_tokens:,} prompt tokens, megatron-core's {upstream.reused_tokens:,}"
        return f"Both exact. {more}: first token after {ours.time()} against {upstream.time()}."


def outcomes(answers: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Outcome]:
    """What each engine did in a part; the answers of the engine "off" are the truth.

    Args:
        answers: Engine -> for each round a `RequestResult` of every request.
    """
    truth = [result for one in answers["off"] for result in one]
    found = {}
    for name, rounds in answers.items():
        results = [result for one in rounds for result in one]
        entries = compare_results(truth, results)
        gap = max((gap for entry in entries if (gap := entry["max_log_prob_difference"]) is not None), default=None)
        other = [entry["first_difference"] for entry in entries if not entry["tokens_equal"]]
        difference = ""
        if any(math.isnan(value) for result in results for value in result.log_probs):
            difference = "a log-prob is no number"
        elif other:
            difference = f"other tokens than without a cache, from token {min(other) + 1} on"
        elif (gap or 0.0) > SAME_LOG_PROB:
            difference = f"a log-prob is off by {gap:.2g}"
        waits_ms = [1e3 * max(result.time_to_first_token_s for result in one) for one in rounds]
        found[name] = Outcome(
            exact=not difference,
            difference=difference,
            max_log_prob_difference=gap,
            reused_tokens=min(sum(result.reused_tokens for result in one) for one in rounds),
            prompt_tokens=sum(result.prompt_tokens for result in rounds[0]),
            first_token_ms=statistics.median(waits_ms),
            first_tokens_ms=waits_ms,
        )
    return found


def summary(parts: Sequence[Part]) -> str:
    """The whole demo in one or two sentences."""
    pairs = [(part.engines["upstream"], part.engines["ours"]) for part in parts]
    both = [(upstream.reused_tokens, ours.reused_tokens) for upstream, ours in pairs if upstream.exact and ours.exact]
    text = f"Exact in {sum(ours.exact for _, ours in pairs)} of {len(pairs)} parts: this cache. "
    text += f"In {sum(upstream.exact for upstream, _ in pairs)} of {len(pairs)}: megatron-core's. "
    text += f"Where both are exact, this cache reuses more in {sum(ours > upstream for upstream, ours in both)} of {len(both)}"
    less = sum(ours < upstream for upstream, ours in both)
    return text + (f", less in {less}." if less else ".")


def print_demo(console: Console, parts: Sequence[Part]) -> None:
    """A table with three rows a part, a verdict a part, and what comes of all."""
    table = Table(title_justify="left", width=min(WIDTH, console.width))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("what is sent", ratio=1)
    for head in ("cache", "answer", "reused tokens", "first token"):
        table.add_column(head, justify="left" if head in ("cache", "answer") else "right", no_wrap=True)
    for number, part in enumerate(parts, 1):
        rows = []
        for name, outcome in part.engines.items():
            answer = "reference" if name == "off" else "exact" if outcome.exact else "[bold red]WRONG[/]"
            reused = "-" if name == "off" else f"{outcome.reused_tokens:,} of {outcome.prompt_tokens:,}"
            row = (NAMES[name], answer, reused, outcome.time(spread=True))
            rows.append([f"[bold]{text}[/]" if name == "ours" else text for text in row])
        table.add_row(str(number), part.title, *map("\n".join, zip(*rows, strict=True)), end_section=True)
    console.print(table)
    verdicts = [(f"{number}. ", part.verdict) for number, part in enumerate(parts, 1)]
    exact = f"exact: the tokens of caching off, and log-probs within {SAME_LOG_PROB} of its own."
    for head, text in (("", exact), ("", ""), *verdicts, ("", ""), ("", summary(parts))):
        lines = textwrap.fill(text, table.width or WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        console.print(lines, markup=False, soft_wrap=True)


def as_json(part: Part) -> dict[str, Any]:
    """A part as JSON values."""
    engines = {name: asdict(outcome) for name, outcome in part.engines.items()}
    return {"part": part.name, "title": part.title, "verdict": part.verdict, "engines": engines}


def save_demo_plot(path: Path, parts: Sequence[Mapping[str, Any]], subtitle: str) -> None:
    """First tokens side by side; a wrong answer says so on its bar.

    Args:
        path: PNG or SVG, by its ending.
        parts: Each of `as_json`. Of the first one, which fills the cache, there is nothing to see.
        subtitle: Model, machine and workload.
    """
    drawn = parts[1:]
    engines = {name: [part["engines"][name] for part in drawn] for name in parts[0]["engines"]}
    title, heights = "Time to first token: shorter is better", [bar_inches(len(drawn), len(engines))]
    with page(path, title=title, subtitle=subtitle, heights=heights, engines=list(engines)) as axes:
        draw_bars(
            axes[0],
            [part["part"] for part in drawn],
            {name: [one["first_token_ms"] for one in row] for name, row in engines.items()},
            figure_of=lambda value: f"{value:,.0f} ms",
            ranges={name: [one["first_tokens_ms"] for one in row] for name, row in engines.items()},
            notes={
                (name, number): "WRONG ANSWER"
                for name, row in engines.items()
                for number, one in enumerate(row)
                if not one["exact"]
            },
        )
